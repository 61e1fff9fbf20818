"""The run folder at a start: new, with a run to resume, or with a finished run; one launcher uses it at a time.

A file beside the run folder is locked with flock, and names the owner of the folder for other hosts: host, boot,
process and start time of that process. Some network file systems have no locks (Lustre without ``-o flock``: ENOSYS).
There a second file names the owner. It is created exclusively. A file that a dead process of this host has left is
replaced. One of another host is respected: whether its process is alive cannot be seen from here.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Self

import msgspec
import psutil

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import conflict, read_config, steps_of, write_config
from areal_lora.config.rules.findings import Finding, warning
from areal_lora.config.sections.run import Role
from areal_lora.data.prompts import Formatter, load_tokenizer
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.launcher.slurm.job_query import look, submitted_job
from areal_lora.launcher.slurm.states import Phase, explain, is_active
from areal_lora.launcher.sweep import Sweep, record_sweep
from areal_lora.obs.report.summary import read_summary
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.events import StartEvent, now_utc, write_event
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import begin_session, forget_sessions
from areal_lora.tasks.datasets import load_samples, reads_hub
from areal_lora.types import Sample

WAIT = "wait for it, or set another run.name"
NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
LOCKS = Path("/proc/locks")
_LOCK = re.compile(r"^\d+: (?:FLOCK|OFDLCK|POSIX)\s+ADVISORY\s+WRITE (-?\d+) [0-9a-f]+:[0-9a-f]+:(\d+) ", re.MULTILINE)

log = get_logger(__name__)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process, so that no other one is taken for it: not after a reboot, not in another container."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """The process that the file at ``path`` names; None where there is none, or none that can be read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return None

    @classmethod
    def me(cls) -> Self:
        return cls(
            host=socket.gethostname(),
            boot=BOOT_ID.read_text(encoding="ascii").strip(),
            namespace=os.readlink(PID_NAMESPACE),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
        )

    @property
    def here(self) -> bool:
        """Whether this process may signal it by its number."""
        me = Owner.me()
        return (self.host, self.boot, self.namespace) == (me.host, me.boot, me.namespace)

    def is_over(self) -> bool:
        """True only where that is certain, as seen from this process."""
        me = Owner.me()
        return (self.host == me.host and self.boot != me.boot) or (
            self.here and _started(self.pid) not in (0, self.started)
        )


def _started(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since the boot; None where there is no such process, or it has ended.

    0 for another user's, where ``/proc`` hides it (hidepid).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0 if psutil.pid_exists(pid) else None
    # Its second field is a name in parentheses that may hold anything; the start is the 22nd.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else int(fields[18])


def holder(folder: RunFolder) -> Owner | None:
    """The launcher that holds ``folder``, or the one that its mark names; None where none is known.

    Takes no lock, which a launcher that starts would meet, unless one elsewhere has not released it.
    """
    with contextlib.suppress(FileNotFoundError):
        for pid in lock_holders(LOCKS.read_text(encoding="ascii"), folder.lock.stat().st_ino):
            if pid > 0 and (started := _started(pid)) is not None:
                return msgspec.structs.replace(Owner.me(), pid=pid, started=started)
    for path in (folder.owner, folder.lock):
        owner = Owner.of(path)
        if owner is not None and not owner.is_over() and not (path == folder.lock and is_free(folder)):
            return owner
    return None


def is_free(folder: RunFolder) -> bool:
    """Whether no launcher of any machine holds the lock; False where that cannot be found out.

    Takes the lock for a moment: call it only where a launcher is not likely to start.
    """
    with contextlib.suppress(OSError), folder.lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def lock_holders(locks: str, inode: int) -> list[int]:
    """Processes that hold a lock of the file ``inode``, from the text of /proc/locks."""
    return [int(pid) for pid, number in _LOCK.findall(locks) if int(number) == inode]


@contextlib.contextmanager
def run_lock(folder: RunFolder) -> Iterator[None]:
    """Hold ``folder`` in the block, or until the process ends. Raises ConfigError where a launcher holds it, or may."""
    with contextlib.ExitStack() as held:
        fd = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o600)
        held.callback(os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("run.name", f"a run in {folder} is still going", WAIT) from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise ConfigError("run.root", f"{folder.lock} cannot be locked: {error.strerror}") from error
            lacks = f"the file system of {folder.path.parent} has no flock ({error.strerror})"
            log.warning("%s: %s marks the run as started here instead", lacks, folder.owner.name)
            with _one_at_a_time(folder.owner):
                _mark(folder, held)
        else:
            held.callback(_name_holder, fd, b"")
            _name_holder(fd, msgspec.json.encode(Owner.me()))
        yield


def _name_holder(fd: int, owner: bytes) -> None:
    """Replace what the locked file holds. A run needs no name, so a disk error is none of its own."""
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, owner, 0)
        os.fsync(fd)  # a network file system keeps it here until the file is closed


def _mark(folder: RunFolder, held: contextlib.ExitStack) -> None:
    """Name this process as the owner until ``held`` closes. Raises ConfigError where another one may be alive."""
    other = Owner.of(folder.owner)
    if other is not None and other.is_over():
        folder.owner.unlink()
    try:
        with folder.owner.open("xb") as file:
            held.callback(folder.owner.unlink, missing_ok=True)
            file.write(msgspec.json.encode(Owner.me()))
    except FileExistsError:
        by = f"started by process {other.pid} on {other.host}" if other else "according to a mark that cannot be read"
        fix = f"{WAIT}, or remove {folder.owner} if that process is over"
        raise ConfigError("run.name", f"a run in {folder} is still going, {by}", fix) from None


def _one_at_a_time(path: Path) -> socket.socket:
    """A context that only one process of this host is in, for ``path``: else two would replace one stale mark.

    The name exists in the kernel and disappears with its process.
    """
    gate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    try:
        gate.bind(f"\0areal_lora.{name}")
    except OSError:
        gate.close()
        raise ConfigError("run.name", "another launcher is starting in the same folder", "start again") from None
    return gate


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousRun:
    """The run that a folder holds. ``versions`` are those with a checkpoint, by adapter, whole or not.

    ``steps`` are those that each adapter of a run that ended has made, 0 in any other.
    """

    config: Config
    steps: dict[str, int]
    versions: dict[str, list[int]]

    @property
    def steps_done(self) -> int:
        return sum(self.steps.values())

    def finished(self, config: Config) -> bool:
        """Whether every adapter has made its own steps of ``config``. One that failed has not.

        A run with a service is never finished: adapters may come.
        """
        made = (self.steps.get(name, 0) >= wanted for name, wanted in steps_of(config).items())
        return config.service is None and all(made)


def previous_run(folder: RunFolder) -> PreviousRun | None:
    """The run in ``folder``, None where there is none. Raises ConfigError for a folder of something else."""
    if not _holds_run(folder):
        return None
    config = read_config(folder)
    versions = {a.name: versions_in(folder.adapter_checkpoints(a.name)) for a in config.adapters}
    steps = dict.fromkeys(versions, 0)
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
        summary = read_summary(folder)
        steps = {name: summary.steps_of(name) for name in versions}
    return PreviousRun(config=config, steps=steps, versions=versions)


def with_absolute_root(config: Config) -> Config:
    """Processes may have another working folder than the launcher."""
    return config.model_copy(update={"run": config.run.model_copy(update={"root": config.run.root.absolute()})})


class RunStart:
    """The run folder, locked while the launcher runs. ``previous`` is the run to resume.

    Entering takes the lock and, with ``fresh``, renames an earlier run to the first free ``<name>.N`` (``moved``).
    ``prepare`` makes the folder ready for processes and puts ``code`` (texts by file name) into it. The run is that of
    ``sweep``, if given. Raises ConfigError for a folder in use, of something else, or whose run cannot be resumed so.
    """

    def __init__(
        self, config: Config, fresh: bool = False, code: Mapping[str, str] | None = None, sweep: Sweep | None = None
    ) -> None:
        self.config = with_absolute_root(config)
        self.folder = self.config.run_folder
        self.previous: PreviousRun | None = None
        self.moved: Path | None = None
        self._fresh, self._code, self._sweep = fresh, code or {}, sweep

    def __enter__(self) -> "RunStart":
        self.folder.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            held.enter_context(run_lock(self.folder))
            check_no_job(self.folder)
            if self._fresh and _holds_run(self.folder):
                there = self.folder.path.resolve()  # a link to it keeps its place, which is the lock's, too
                names = (there.with_name(f"{there.name}.{n}") for n in count(1))
                self.moved = there.rename(next(path for path in names if not path.exists()))
            self.previous = previous_run(self.folder)
            if self.previous is not None and (error := conflict(self.previous.config, self.config)) is not None:
                raise error
            self._held = held.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._held.close()

    def prepare(self) -> None:
        """Write the configuration and the given code; start the session of a run on this machine."""
        self.folder.path.resolve().mkdir(exist_ok=True)
        if self.previous is None:
            write_config(self.folder, self.config)  # first: no start takes a folder that has files and not this one
        if self._sweep is not None:
            record_sweep(self.folder, self._sweep)
        if self.config.cluster.kind != "slurm":
            begin_session(self.folder)
        else:
            forget_sessions(self.folder)  # the job starts its own
        self.folder.logs.mkdir(exist_ok=True)
        # Written at the end: an unfinished run has none.
        self.folder.summary.unlink(missing_ok=True)
        if self._code:
            self.folder.code.mkdir(exist_ok=True)
        for name, text in self._code.items():
            (self.folder.code / name).write_text(text, encoding="utf-8")
        write_config(self.folder, self.config)
        write_event(self.folder, StartEvent(at=now_utc(), resumes=self.previous is not None))


def _holds_run(folder: RunFolder) -> bool:
    """False for a missing or empty folder. Raises ConfigError for a folder of something else."""
    path = folder.path
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    if not folder.config.is_file():
        raise ConfigError("run.name", f"{folder} exists and is not a run folder", "set another run.name or run.root")
    return True


def check_no_job(folder: RunFolder) -> None:
    """Raise ConfigError where the Slurm job that was submitted for ``folder`` waits or runs, or may do so."""
    if (job := submitted_job(folder)) is None:
        return
    record = look(job)
    if is_active(record):
        fix = f"wait for it, scancel {job}, or set another run.name"
        raise ConfigError("run.name", f"Slurm job {job} works in {folder}", fix)
    if explain(record).phase is Phase.UNKNOWN and not record.forgotten:
        fix = f"start where scontrol works, or remove {folder.job_id} if the job is over"
        raise ConfigError("run.name", f"Slurm job {job} may still work in {folder}: {record.why or record.state}", fix)


def prompt_findings(config: Config, *, online: bool) -> Iterator[Finding]:
    """Warn of prompts that are all longer than the room beside an answer, and of few different ones.

    Prompts of several adapters are read once, unless there is a warning of them.

    Hub data sets are read only if ``online``. The tasks must have passed `task_problems`.
    """
    good = set[str]()
    for i, adapter in enumerate(config.adapters):
        room = config.rollout.max_model_len - adapter.sampling.max_new_tokens
        checked = repr((adapter.task, room))
        if adapter.is_client or (reads_hub(adapter.task) and not online) or checked in good:
            continue
        samples = load_samples(adapter.task, "train")
        different = len({hash(sample.prompt) for sample in samples})
        if few := different <= len(samples) // 2:
            reason = f"{len(samples)} training rows have {different} different prompt{'s' * (different != 1)}"
            yield warning(f"adapters.{i}.task", reason, "check task.columns.prompt and the template")
        if not _one_fits(config, adapter, samples, room):
            yield warning(
                "rollout.max_model_len",
                f"all {len(samples)} prompts of {adapter.name} are longer than the {room} tokens left beside "
                "the answer: the run would end at its start",
                "raise it, or lower sampling.max_new_tokens",
            )
        elif not few:
            good.add(checked)


def _one_fits(config: Config, adapter: AdapterConfig, samples: Sequence[Sample], room: int) -> bool:
    """Whether one prompt has at most ``room`` tokens, as far as the files here show.

    A text has no more tokens than bytes, so a tokenizer, whose import takes seconds, is rarely needed.
    """
    sizes = [len(sample.prompt.encode()) for sample in samples]
    if min(sizes) < room or not (Path(config.model.folder) / "tokenizer.json").is_file():
        return True
    # The process may be a notebook that uses transformers' models later.
    formatter = Formatter(tokenizer=load_tokenizer(config.model.folder), how=adapter.task.format)
    return any(
        len(formatter.token_ids(sample)) <= room
        for sample in map(samples.__getitem__, sorted(range(len(sizes)), key=sizes.__getitem__))
    )


ENGINES = {"megatron": ("megatron.core", "megatron.bridge"), "fsdp": ("transformers",)}
"""Modules of the trainer role by engine; its other packages are dependencies of these or of areal_lora."""
TRANSFORMER_ENGINE = "transformer_engine_torch"  # of Megatron's layers on GPUs; built against the installed torch
SERVERS = ("vllm",)


def check_packages(config: Config, roles: Collection[Role] = ("trainer", "rollout")) -> None:
    """Raise EnvironmentError_ for a missing package of one of ``roles`` that this interpreter runs; imports nothing.

    Roles with an interpreter of their own are examined by `areal-lora doctor`.
    """
    on_gpus = config.trainer.engine == "megatron" and config.cluster.device == "cuda"
    for role, modules, own in (
        ("trainer", (*ENGINES[config.trainer.engine], *[TRANSFORMER_ENGINE] * on_gpus), config.trainer.python),
        ("rollout", SERVERS, config.rollout.python),
    ):
        for module in modules if role in roles and own in (None, sys.executable) else ():
            try:
                spec = importlib.util.find_spec(module)
            except ModuleNotFoundError:  # its parent is missing
                spec = None
            if spec is None:
                fix = f"see 'Install' in docs/en/quickstart.md, or set {role}.python to an interpreter that has it"
                raise EnvironmentError_(f"{role}: {sys.executable} has no package {module} (fix: {fix})")

"""The run folder at a start: new, with a run to resume, or with a finished run.

One launcher a run folder, also on file systems without flock.

A file beside the run folder is locked with flock. Some network file systems have none (Lustre without ``-o flock``:
ENOSYS). There a second file names the owner of the folder: host, boot, process and start time of that process. It is
created exclusively. A file that a dead process of this host has left is replaced. One of another host is respected:
whether its process is alive cannot be seen from here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.config.models import AdapterConfig, Config, ModelConfig
from areal_lora.config.recorded import conflict, read_config, steps_of, write_config
from areal_lora.config.rules.findings import Finding, Severity
from areal_lora.data.formatting import Formatter, load_tokenizer
from areal_lora.errors import ConfigError, EnvironmentError_, undo_on_error
from areal_lora.launcher.slurm.job_query import look
from areal_lora.launcher.slurm.states import Phase, explain, is_active
from areal_lora.obs.report.summary import read_summary
from areal_lora.processes.startup import get_logger
from areal_lora.run_folder.events import StartEvent, now_utc, write_event
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.status import begin_session, forget_sessions
from areal_lora.tasks.datasets import hub_sources, load_samples
from areal_lora.types import Sample

NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")

log = get_logger(__name__)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process, so that no other one is taken for it: not after a reboot, not in another container."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: int

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, text: bytes) -> Self:
        return msgspec.json.decode(text, type=cls)

    @classmethod
    def me(cls) -> Self:
        return cls(
            host=socket.gethostname(),
            boot=BOOT_ID.read_text(encoding="ascii").strip(),
            namespace=os.readlink(PID_NAMESPACE),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0,
        )

    def is_over(self) -> bool:
        """True only where that is certain, as seen from this process."""
        here = Owner.me()
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return True
        if self.namespace != here.namespace:
            return False
        return _started(self.pid) != self.started


def _started(pid: int) -> int | None:
    """When ``pid`` started, in clock ticks since the boot; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Its second field is a name in parentheses that may hold anything; this is the 22nd.
    return int(stat.rpartition(")")[2].split()[19])


def is_locked(run_folder: RunFolder, locks: Path = Path("/proc/locks")) -> bool:
    """Whether a launcher of this host uses ``run_folder``. Takes no lock, which a launcher that starts would meet."""
    try:
        owner = msgspec.json.decode(run_folder.owner.read_bytes(), type=Owner)
        return not owner.is_over()
    except (FileNotFoundError, msgspec.DecodeError):
        pass
    try:
        inode = run_folder.lock.stat().st_ino
    except FileNotFoundError:
        return False
    # 1: FLOCK  ADVISORY  WRITE 707 fe:00:263171 0 EOF
    rows = [line.split() for line in locks.read_text(encoding="ascii").splitlines()]
    return any("FLOCK" in row and row[5].rpartition(":")[2] == str(inode) for row in rows if len(row) > 5)


class RunLock:
    """Held from :meth:`take` to :meth:`release`, or until the process ends."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._folder = run_folder
        self._path = run_folder.lock
        self.owner_path = run_folder.owner
        self._fd = -1
        self._mine = False

    def take(self) -> None:
        """Raises ConfigError where another launcher holds the folder, or may hold it."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        with undo_on_error(self.release):
            self._take()

    def release(self) -> None:
        if self._mine:
            self.owner_path.unlink(missing_ok=True)
            self._mine = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._going("") from None
        except OSError as error:
            if error.errno not in NO_FLOCK:
                raise ConfigError("run.root", f"{self._path} cannot be locked: {error.strerror}") from error
            log.warning(
                "the file system of %s has no flock (%s): %s marks the run as started here instead",
                self._path.parent,
                error.strerror,
                self.owner_path.name,
            )
        else:
            return
        with _one_at_a_time(self.owner_path):
            if (other := self._owner()) is not None:
                if not other.is_over():
                    raise self._going(f", started by process {other.pid} on {other.host}", self.owner_path)
                self.owner_path.unlink()
            self._create()

    def _owner(self) -> Owner | None:
        try:
            return msgspec.json.decode(self.owner_path.read_bytes(), type=Owner)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            raise self._going(", according to a mark that cannot be read", self.owner_path) from None

    def _create(self) -> None:
        try:
            with self.owner_path.open("xb") as file:
                self._mine = True
                file.write(msgspec.json.encode(Owner.me()))
        except FileExistsError:
            raise self._going(", started a moment ago", self.owner_path) from None

    def _going(self, holder: str, mark: Path | None = None) -> ConfigError:
        fix = "wait for it, or set another run.name"
        if mark is not None:
            fix += f", or remove {mark} if that process is over"
        return ConfigError("run.name", f"a run in {self._folder} is still going{holder}", fix)


def _one_at_a_time(path: Path) -> socket.socket:
    """A context that only one process of this host is in, for ``path``: else two would replace one stale mark.

    The name exists in the kernel: it needs no file system, and disappears with its process.
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
    """The run that a folder holds.

    ``steps`` are those that each adapter of a run that ended has made, 0 in any other. ``versions`` are those with a
    checkpoint, by adapter, whole or not.
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
        return config.service is None and all(
            self.steps.get(name, 0) >= wanted for name, wanted in steps_of(config).items()
        )


def previous_run(folder: RunFolder) -> PreviousRun | None:
    """The run in ``folder``, None where there is none. Raises ConfigError for a folder of something else."""
    if not _holds_run(folder):
        return None
    config = read_config(folder)
    versions = {a.name: versions_in(folder.adapter_checkpoints(a.name)) for a in config.adapters}
    return PreviousRun(config=config, steps=_steps(folder, config), versions=versions)


def recorded_model(config: Config) -> ModelConfig | None:
    """The base model of the run that ``config`` would resume; None where there is none."""
    previous = previous_run(with_absolute_root(config).run_folder)
    return previous.config.model if previous else None


def _steps(folder: RunFolder, config: Config) -> dict[str, int]:
    """Return the steps of each adapter of a run that ended, else 0."""
    try:
        summary = read_summary(folder)
    except (FileNotFoundError, msgspec.DecodeError):
        return dict.fromkeys(steps_of(config), 0)
    return {adapter.name: summary.steps_of(adapter.name) for adapter in config.adapters}


def with_absolute_root(config: Config) -> Config:
    """Processes may have another working folder than the launcher."""
    return config.model_copy(update={"run": config.run.model_copy(update={"root": config.run.root.absolute()})})


class RunStart:
    """The run folder, locked while the launcher runs.

    Entering takes the lock and, with ``fresh``, moves an earlier run aside (``moved``). ``previous`` is
    the run to resume; ``prepare`` makes the folder ready for processes to start and puts ``code`` (texts by file name)
    into it.

    Raises ConfigError where a launcher or a job is using the folder, it holds something else, or
    the run in it cannot be resumed with this configuration.
    """

    def __init__(self, config: Config, fresh: bool = False, code: Mapping[str, str] | None = None) -> None:
        self.config = with_absolute_root(config)
        self.folder = self.config.run_folder
        self.previous: PreviousRun | None = None
        self.moved: Path | None = None
        self._fresh, self._code = fresh, code or {}
        self._lock = RunLock(self.folder)

    def __enter__(self) -> RunStart:
        self.folder.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        try:
            self._look()
        except ConfigError:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()

    def _look(self) -> None:
        check_no_job(self.folder)
        if self._fresh:
            self.moved = move_aside(self.folder)
        self.previous = previous_run(self.folder)
        if self.previous is not None and (error := conflict(self.previous.config, self.config)) is not None:
            raise error

    def prepare(self) -> None:
        """Write the configuration and the given code; start the session of a run on this machine."""
        self.folder.path.mkdir(exist_ok=True)
        if self.config.cluster.kind == "local":
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


def move_aside(folder: RunFolder) -> Path | None:
    """Rename an earlier run's folder to the first free ``<name>.N``; None where there was none."""
    if not _holds_run(folder):
        return None
    n = 1
    while (target := folder.path.with_name(f"{folder.name}.{n}")).exists():
        n += 1
    folder.path.rename(target)
    return target


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
    try:
        job = folder.job_id.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return
    record = look(job)
    if is_active(record):
        fix = f"wait for it, scancel {job}, or set another run.name"
        raise ConfigError("run.name", f"Slurm job {job} works in {folder}", fix)
    if explain(record).phase is Phase.UNKNOWN and not record.forgotten:
        raise ConfigError(
            "run.name",
            f"Slurm job {job} may still work in {folder}: {record.why or record.state}",
            f"start where scontrol works, or remove {folder.job_id} if the job is over",
        )


def prompt_findings(config: Config, *, online: bool) -> Iterator[Finding]:
    """Warn of prompts that are all longer than the room beside an answer, and of few different ones.

    Hub data sets are read only if ``online``. The tasks must have passed `task_problems`.
    """
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client or (hub_sources(adapter.task) and not online):
            continue
        samples = load_samples(adapter.task, "train")
        different = len({sample.prompt for sample in samples})
        if different <= len(samples) // 2:
            yield Finding(
                path=f"adapters.{i}.task",
                reason=f"{len(samples)} training rows have {different} different prompt{'s' * (different != 1)}",
                fix="check task.columns.prompt and the template",
                severity=Severity.WARNING,
            )
        room = config.rollout.max_model_len - adapter.sampling.max_new_tokens
        if not _one_fits(config, adapter, samples, room):
            yield Finding(
                path="rollout.max_model_len",
                reason=f"all {len(samples)} prompts of {adapter.name} are longer than the {room} tokens left beside "
                "the answer: the run would end at its start",
                fix="raise it, or lower sampling.max_new_tokens",
                severity=Severity.WARNING,
            )


def _one_fits(config: Config, adapter: AdapterConfig, samples: Sequence[Sample], room: int) -> bool:
    """Whether one prompt has at most ``room`` tokens, as far as the files here show.

    A text has no more tokens than bytes, so a tokenizer, whose import takes seconds, is rarely needed.
    """
    shortest = sorted(samples, key=lambda sample: len(sample.prompt.encode()))
    if len(shortest[0].prompt.encode()) < room or not (Path(config.model.folder) / "tokenizer.json").is_file():
        return True
    # The process may be a notebook that uses transformers' models later.
    formatter = Formatter(tokenizer=load_tokenizer(config.model.folder), how=adapter.task.format)
    return any(len(formatter.token_ids(sample)) <= room for sample in shortest)


ENGINES = {"megatron": ("megatron.core", "megatron.bridge"), "fsdp": ("transformers",)}
"""Modules of the trainer role by engine; its other packages are dependencies of these or of areal_lora."""
SERVERS = ("vllm",)


def check_packages(config: Config) -> None:
    """Raise EnvironmentError_ for a missing package of a role that this interpreter runs; imports nothing.

    Roles with an interpreter of their own are examined by `areal-lora doctor`.
    """
    own = {"trainer": config.trainer.python, "rollout": config.rollout.python}
    for role, modules in {"trainer": ENGINES[config.trainer.engine], "rollout": SERVERS}.items():
        if own[role] not in (None, sys.executable):
            continue
        for module in modules:
            if not _is_here(module):
                fix = f"see 'Install' in docs/en/quickstart.md, or set {role}.python to an interpreter that has it"
                raise EnvironmentError_(f"{role}: {sys.executable} has no package {module} (fix: {fix})")


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False

"""The run folder: every file and folder that the processes of a run share, by name; files written whole or not at all.

No other module of the package spells one of these names. Readers of a finished run take a plain path too and convert it
with :meth:`RunFolder.of`.

What describes the living processes of a Slurm job (secret, endpoints, statuses, heartbeats, exit codes) is in
``sessions/<job id>-<restarts>``: a node whose view of the file system is old never meets an earlier life of the job.

The desired state: which adapters a run is to have beside those of its configuration, in ``RUN/desired.json``.

One process writes the file, a service or a script. Trainer rank 0 reads it between steps and while it waits, and takes
one step after another towards it: whoever is killed at any moment reads the same file again. What the run has is in the
``state`` records of ``metrics.jsonl``, under the `DesiredAdapter.key` of each adapter.
"""

import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from areal_lora.errors import CheckpointError, ConfigError, undo_on_error
from areal_lora.processes.log import get_logger


def write_file(path: Path, content: str | bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Write ``content`` (text as UTF-8) in one step; see `replacing`. Raises OSError that names ``path``."""
    try:
        with replacing(path, mode=mode, durable=durable) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:  # that of a write names no file, others the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def replacing(path: Path, *, mode: int = 0o666, durable: bool = False) -> Iterator[BinaryIO]:
    """A new file beside ``path`` that replaces it at the end of the block, or is removed if the block raises.

    ``mode`` is that of a new file, which the umask restricts. ``durable``: content and name survive a loss of power
    that comes after the block. Hosts, processes and threads may write one file at the same time: the last one wins.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{threading.get_ident():x}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed and had the same id
    with undo_on_error(partial(temporary.unlink, missing_ok=True)):
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` survive a loss of power. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


SESSION_VARIABLE = "AREAL_LORA_SESSION"
"""Names the session of a run on several nodes to all its processes."""


class FolderEntry:
    """A path of each `RunFolder` by its ``name`` below the folder, or below that of its session if ``of_session``."""

    def __init__(self, name: str, *, of_session: bool = False) -> None:
        self.name, self._of_session = name, of_session

    def __get__(self, folder: "RunFolder", owner: object) -> Path:
        above = folder.sessions / folder.session if self._of_session and folder.session else folder.path
        return above / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below ``path``. ``process`` is ``<role>-<index>``, for example ``trainer-0``. Touches no file.

    ``session`` is that of this process, empty outside of Slurm jobs. ``lock`` and ``owner`` are those of the folder
    that a link leads to.
    """

    path: Path
    session: str = field(default_factory=lambda: os.environ.get(SESSION_VARIABLE, ""))

    @classmethod
    def of(cls, folder: "RunFolder | Path | str") -> "RunFolder":
        return folder if isinstance(folder, RunFolder) else cls(Path(folder))

    @classmethod
    def current(cls, folder: "RunFolder | Path | str") -> "RunFolder":
        """The folder with its newest session, for commands and clients that are not part of the job."""
        path, session = Path(folder), ""
        with suppress(FileNotFoundError):
            session = cls(path).session_name.read_text(encoding="ascii").strip()
        return cls(path, session)

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    __str__ = __fspath__

    @property
    def name(self) -> str:
        return self.path.name

    # --- of a whole run

    config = FolderEntry("config.json")
    """The resolved configuration, written by the launcher at every start."""
    code = FolderEntry("code")
    """Folder of the user code that was given to ``areal_lora.train`` as objects."""
    desired = FolderEntry("desired.json")
    """The adapters that a service wants the run to have (`DesiredAdapters`)."""
    sweep = FolderEntry("sweep.json")
    """Trials, rungs and decisions of a sweep (``launcher.sweep``)."""
    service_tables = FolderEntry("service.sqlite")
    """Tenants, adapters and operations of the service (`service.queue.queue_store`)."""
    service_key = FolderEntry("service.key")
    """The operator's key of the service, mode 0600."""
    service_exports = FolderEntry(".service-exports")
    """Scratch folder of downloads in progress; emptied when the service starts."""
    inbox = FolderEntry("inbox")
    """Folder from which the service takes YAML files with an adapter each (`service.acceptance`)."""
    metrics = FolderEntry("metrics.jsonl")
    rollouts = FolderEntry("rollouts")
    """Folder of the rollouts in columns (``obs.metrics.rollout_store``)."""
    conversations = FolderEntry("conversations.jsonl")
    """Requests of agents and the answers (``rollout.conversations``)."""
    conversations_before = FolderEntry("conversations.1.jsonl")
    answers = FolderEntry("answers.jsonl")
    """Answers of served versions to the same prompts (``obs.report.version_answers``)."""
    tensorboard = FolderEntry("tensorboard")
    tracking = FolderEntry("tracking")
    """Folder of what a tracker keeps on this side (``obs.tracking``)."""
    profile = FolderEntry("profile")
    """Folder of the traces of training steps (``obs.trace``)."""
    events = FolderEntry("events.jsonl")
    """Starts, restarts and stalls (``run_folder.events``)."""
    ledger = FolderEntry("ledger.sqlite")
    """The run ledger of the rollout controller."""
    group_counts = FolderEntry("groups.json")
    """Its counts (`rollout.ledger.reconcile`)."""
    judge = FolderEntry("judge")
    """Folder with the replies of judges (``tasks.judge``); their scorer processes may write it."""
    trainer_session = FolderEntry("trainer_session")
    """Counts the starts of the trainer (`raise_session`)."""
    checkpoints = FolderEntry("checkpoints")
    """Folder with one folder per adapter (``checkpoint.checkpoint_store``)."""
    saved_states = FolderEntry("states")
    """By adapter, what clients saved (``trainer.saved_states``)."""
    base_evals = FolderEntry("base_evals")
    """Folder with the results of evaluations of the base model (``rollout.controller.evaluation``)."""
    report = FolderEntry("report.html")
    summary = FolderEntry("summary.json")
    """Figures of the run. Absent while the run is unfinished."""

    def adapter_checkpoints(self, adapter: str) -> Path:
        return self.checkpoints / adapter

    def saved_state(self, adapter: str, label: str) -> Path:
        """What a client saved of an adapter, until it is dropped; it outlives the adapter."""
        return self.saved_states / adapter / label

    def adapter_export(self, adapter: str) -> Path:
        """PEFT folder of the trained adapter, written at the end of the run."""
        return self.path / "adapters" / adapter

    # --- of the processes of one start

    session_name = FolderEntry("session")
    """Names the session of the Slurm job that works in the folder, or was the last to do so."""
    sessions = FolderEntry("sessions")
    secret = FolderEntry("secret", of_session=True)
    """The run secret, mode 0600 (contract C12)."""
    ca = FolderEntry("ca.pem")
    """Certificate of the data plane's authority, for clients outside the run."""
    data_key = FolderEntry("data.key")
    """Bearer key of the data plane, mode 0600, for clients outside the run."""
    remote_token = FolderEntry("remote.token")
    """Bearer key of the gateway for remote servers, mode 0600; another one at each start."""
    shard_keys = FolderEntry("shard.keys")
    """On the machine of a remote server: the keys of its run's shards, mode 0600."""
    endpoints = FolderEntry("rendezvous", of_session=True)
    """Folder of the published ports (``run_folder.rendezvous``)."""
    page = FolderEntry("page.address", of_session=True)
    """Address of the run's page with its token, mode 0600 (`run.page`)."""
    restart_request = FolderEntry("restart-servers.json", of_session=True)
    """A restart of all servers in turn that was requested (`launcher.watch`)."""
    restart_progress = FolderEntry("restarting.json", of_session=True)
    leaves = FolderEntry("leaves", of_session=True)
    """Folder with the process ids of servers that are to leave in order, by server."""
    heartbeats = FolderEntry("heartbeats", of_session=True)
    statuses = FolderEntry("status", of_session=True)
    logs = FolderEntry("logs")
    stacks = FolderEntry("stacks")

    def endpoint(self, process: str) -> Path:
        return self.endpoints / f"{process}.json"

    def excluded(self, process: str) -> Path:
        """Exists while the launcher does without ``process``: for the rest of this start, or until its node returns."""
        return self.endpoints / f"{process}.excluded"

    def heartbeat(self, process: str) -> Path:
        return self.heartbeats / process

    def status(self, process: str) -> Path:
        return self.statuses / f"{process}.txt"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    def stack_dump(self, process: str) -> Path:
        """File to which ``process`` appends the stacks of its threads on SIGUSR1 (``processes.stacks``)."""
        return self.stacks / f"{process}.txt"

    # --- of the launcher and of a Slurm job

    @property
    def lock(self) -> Path:
        """Beside the folder: locked while a launcher uses it."""
        path = self.path.resolve()
        return path.with_name(f".{path.name}.lock")

    @property
    def owner(self) -> Path:
        """Beside the folder: names the launcher that uses it, on file systems without flock."""
        path = self.path.resolve()
        return path.with_name(f".{path.name}.owner")

    spares = FolderEntry("spares")
    """Folder of claimed server indices and of jobs that run spare servers (``launcher.spares``)."""
    job_script = FolderEntry("job.sbatch")
    job_id = FolderEntry("job.id")
    job_requeues = FolderEntry("job.requeues.json")
    """Requeues of the last job and the checkpoints at the start of each lifetime (``launcher.slurm.job``)."""
    steps = FolderEntry("steps", of_session=True)
    """Folder with one folder per job step: its task script, host file and the exit codes of its tasks.

    ``first`` in it links to the first code that is not 0.
    """
    requeue_request = FolderEntry("requeue-requested", of_session=True)
    """Exists when USR1 has reached a task: the job is to be requeued."""


def raise_session(run_folder: RunFolder) -> int:
    """The number of the trainer's session: the next one, from 1, once it is durable.

    Versions are numbered by steps: a trainer that ends with versions that servers hold and no checkpoint has makes
    others of the same numbers in its next session. Raises CheckpointError for a file that cannot be read or written.
    """
    path, last = run_folder.trainer_session, 0
    try:
        if path.exists():
            last = int(path.read_text(encoding="ascii"))
        write_file(path, f"{last + 1}\n", durable=True)
    except ValueError as e:
        fix = "remove it, then start trainer and rollout servers, which refuse a lower number than they have seen"
        raise CheckpointError(f"{path}: {e} (fix: {fix})") from e
    except OSError as e:
        raise CheckpointError(f"{path}: {e.strerror} (fix: make the run folder writable)") from e
    return last + 1


Record = TypeVar("Record", bound=msgspec.Struct)
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")

log = get_logger(__name__)


class DesiredPhase(StrEnum):
    """``active``: it trains until its last step. ``paused``: it stays, and takes no steps. ``deleted``: it leaves."""

    ACTIVE = "active"
    PAUSED = "paused"
    DELETED = "deleted"


class DesiredAdapter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One adapter. A deleted one may also be left out.

    ``incarnation`` distinguishes it from earlier bearers of its name, and never returns for a name: one that is used
    again meets neither versions nor checkpoints of its former bearer. ``adapter`` is its section of the configuration
    as data, without ``name``. It is fixed: other settings are another incarnation.
    """

    name: str
    incarnation: int
    phase: DesiredPhase = DesiredPhase.ACTIVE
    adapter: dict[str, Any]

    @property
    def key(self) -> str:
        """What the run calls it, in records, versions, checkpoints and on servers: ``name.incarnation``."""
        return f"{self.name}.{self.incarnation}"


class DesiredAdapters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The adapters, the first that is to join first. ``generation`` grows with every change.

    ``closed``: no further adapter will come, so the run ends when all adapters have made their steps.
    """

    generation: int = 0
    adapters: tuple[DesiredAdapter, ...] = ()
    closed: bool = False


class DesiredWatch:
    """Reads the file of one run again whenever it has been replaced. A look costs one ``stat``.

    A file that is no desired state is logged, and the one before it counts on.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self._run_folder = run_folder
        self._seen: tuple[int, int, int] | None = None
        self.newest = DesiredAdapters()
        """What was read last."""

    def look(self) -> DesiredAdapters:
        """The newest desired state; an empty one before the first."""
        try:
            now = os.stat(self._run_folder.desired)
            mark = (now.st_ino, now.st_mtime_ns, now.st_size)
            if mark != self._seen:
                self._seen = mark
                self.newest = read_desired(self._run_folder)
        except FileNotFoundError:
            pass  # there is none yet
        except ConfigError as error:
            log.error("the desired state is ignored: %s", error)
        return self.newest


def read_record(path: Path, kind: type[Record], what: str = "record", fix: str = "remove it") -> Record | None:
    """The JSON record in ``path``; None without the file. Raises ConfigError for a file that is no such ``what``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"it is no {what}: {error}", fix) from None


def read_desired(run_folder: RunFolder) -> DesiredAdapters:
    """The desired state of the run; an empty one where there is none. Raises ConfigError for a file that is none."""
    path, fix = run_folder.desired, "write it with write_desired"
    desired = read_record(path, DesiredAdapters, "desired state", fix) or DesiredAdapters()
    if fault := next(_faults(desired), None):
        raise ConfigError(str(path), fault, "correct it with write_desired")
    return desired


def write_desired(run_folder: RunFolder, desired: DesiredAdapters) -> None:
    """Replace the desired state; it is on the disk, mode 0600, when this returns. One process may write.

    Raises ConfigError for a name or an incarnation that cannot be, a generation that does not grow, and a change of
    the settings of an adapter.
    """
    path, before = run_folder.desired, read_desired(run_folder)
    if fault := next(_faults(desired), None) or next(_broken_promises(before, desired), None):
        raise ConfigError(str(path), fault, "correct the desired state")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, msgspec.json.format(msgspec.json.encode(desired), indent=1) + b"\n", mode=0o600, durable=True)


def _faults(desired: DesiredAdapters) -> Iterator[str]:
    for adapter in desired.adapters:
        if not NAME.fullmatch(adapter.name):
            yield f"{adapter.name!r} is no name: up to 64 of a-z, 0-9, _ and -, the first a letter or a digit"
        if adapter.incarnation < 1:
            yield f"incarnation {adapter.incarnation} of {adapter.name!r} is below 1"
        if "name" in adapter.adapter:
            yield f"the settings of {adapter.name!r} have a name of their own"
    for key, count in Counter(adapter.key for adapter in desired.adapters).items():
        if count > 1:
            yield f"{key} is there {count} times"
    for name, count in Counter(a.name for a in desired.adapters if a.phase is not DesiredPhase.DELETED).items():
        if count > 1:
            yield f"{count} adapters are named {name!r}"


def _broken_promises(before: DesiredAdapters, now: DesiredAdapters) -> Iterator[str]:
    if now.generation <= before.generation:
        yield f"generation {now.generation} does not follow {before.generation}"
    was = {adapter.key: adapter for adapter in before.adapters}
    for adapter in now.adapters:
        if adapter.key in was and was[adapter.key].adapter != adapter.adapter:
            yield f"the settings of {adapter.key} changed: another incarnation may have others"
        if adapter.key in was and was[adapter.key].phase is DesiredPhase.DELETED and adapter.phase != "deleted":
            yield f"{adapter.key} was deleted: another incarnation may take the name"

"""The exception tree. Every error message states the fault, its reason and the fix.

ArealLoraError
├── ConfigError          wrong input, found before any process starts
├── ConfigErrors         all ConfigErrors of one configuration
├── EnvironmentError_    a required program, package or device is missing
├── AdapterError         an adapter's tensors, names or files differ from its declaration
│   ├── UnknownTensorError
│   ├── UnknownVersionError  a version that no slot of the server holds
│   └── ManifestError    a publish was refused; the old version keeps serving
├── PublishError         a publish did not reach the servers (time-out, dead peer)
├── ParityError          trainer and server disagree about the policy (C6)
├── AlignmentError       a batch violates the alignment contract (C10)
├── NonFiniteError       gradients were not finite, several steps in a row
├── StalenessError       a sample beyond ``max_staleness`` reached the trainer (C7)
├── RolloutError         the rollout plane answered with an error
│   ├── AdapterRolloutError  the rollouts of one adapter have failed; those of the others continue
│   └── UserCodeError    a reward, environment, agent or workflow fails on whatever it gets
├── CheckpointError      checkpoints cannot be written, or no existing one can be read
├── RecordError          records of the run cannot be written
├── RequestError         the service refuses a request
│   └── Unavailable      until its files can be read and written again
├── ProcessFailed        a supervised process ended
├── RunFailed            a run that was started from Python ended before its last step
│   └── RunInterrupted   by a signal
└── BackgroundFailed     a long-lived thread or task of this process died
"""

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes of the launcher and its processes; the numbers follow sysexits.h where it defines one."""

    DONE = 0
    FAILED = 1
    """An unexpected error: a traceback is in the log."""
    WRONG_INPUT = 64
    CONTRADICTION = 65
    """The run's data violate a contract: parity, staleness, alignment, a broken adapter, gradients not finite."""
    MISSING = 69
    COMPONENT_FAILED = 70
    DISK = 74
    """Checkpoints or records cannot be written or read."""
    TEMPORARY = 75
    """A temporary failure of another process or the network."""
    INTERRUPTED = 130


NON_RETRYABLE = frozenset({ExitCode.WRONG_INPUT, ExitCode.CONTRADICTION, ExitCode.MISSING, ExitCode.DISK})
"""Codes that a restart would repeat: the launcher restarts no such process and exits with the same code."""


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class ArealLoraError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is the exit code of a process that the error ends."""

    exit_code: int = ExitCode.FAILED


class ConfigError(ArealLoraError):
    """Wrong input. ``path`` is the dotted configuration key, or a file."""

    exit_code = ExitCode.WRONG_INPUT

    def __init__(self, path: str, reason: str, fix: str = "") -> None:
        self.path, self.reason, self.fix = path, reason, fix
        super().__init__(f"{path}: {reason}" + (f" (fix: {fix})" if fix else ""))


class ConfigErrors(ArealLoraError):
    """All faults of one configuration, one ConfigError for each key."""

    exit_code = ExitCode.WRONG_INPUT

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__("\n".join(map(str, errors)))


class EnvironmentError_(ArealLoraError):
    exit_code = ExitCode.MISSING


class AdapterError(ArealLoraError):
    exit_code = ExitCode.CONTRADICTION


class UnknownTensorError(AdapterError):
    """A tensor name that no converter knows, or a required one that is missing."""


class UnknownVersionError(AdapterError):
    """A version that is not resident on this server; the base model never answers in its place."""


class RefusalReason(StrEnum):
    """Why a publish was refused."""

    MALFORMED = "malformed"  # the manifest itself cannot be read
    WRONG_RUN = "wrong_run"
    WRONG_BASE = "wrong_base"
    STALE_VERSION = "stale_version"  # older than the current one, or a parent that is not older
    DUPLICATE = "duplicate"  # the current version again (a server acknowledges it again), or one name twice
    UNKNOWN_LAYOUT = "unknown_layout"  # a digest of a layout that was never sent to this server
    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSOR = "missing_tensor"
    PREFIX = "prefix"
    SHAPE = "shape"
    DTYPE = "dtype"
    RANK = "rank"
    ALPHA = "alpha"
    TARGETS = "targets"
    SIZE = "size"
    HASH = "hash"
    NON_FINITE = "non_finite"
    SLOT = "slot"  # no free adapter slot on the server yet: running requests hold them
    WIRE = "wire"  # the transfer broke or missed its deadline
    WRITE = "write"  # the engine failed to take the tensors


class ManifestError(AdapterError):
    """A publish was refused. ``reason`` is a `RefusalReason`."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"publish refused: {reason}: {detail}")


class PublishError(ArealLoraError):
    exit_code = ExitCode.TEMPORARY


class ParityError(ArealLoraError):
    exit_code = ExitCode.CONTRADICTION


class AlignmentError(ArealLoraError):
    exit_code = ExitCode.CONTRADICTION


class NonFiniteError(ArealLoraError):
    exit_code = ExitCode.CONTRADICTION


class StalenessError(ArealLoraError):
    exit_code = ExitCode.CONTRADICTION


class RolloutError(ArealLoraError):
    exit_code = ExitCode.TEMPORARY


class AdapterRolloutError(RolloutError):
    """The rollouts of one adapter have failed, with an error of ``exit_code``. Those of the others continue."""

    def __init__(self, reason: str, exit_code: int = ExitCode.TEMPORARY) -> None:
        self.exit_code = ExitCode(exit_code)
        super().__init__(reason)


class UserCodeError(RolloutError):
    exit_code = ExitCode.WRONG_INPUT


class CheckpointError(ArealLoraError):
    exit_code = ExitCode.DISK


class RecordError(ArealLoraError):
    exit_code = ExitCode.DISK


class RequestError(ArealLoraError):
    """A request that gets ``status`` and a body with path, reason and fix, and ``retry_s`` as ``Retry-After``."""

    def __init__(self, path: str, reason: str, fix: str = "", *, status: int = 422, retry_s: int | None = None) -> None:
        self.status, self.path, self.reason, self.fix, self.retry_s = status, path, reason, fix, retry_s
        super().__init__(f"{path}: {reason}" + (f" (fix: {fix})" if fix else ""))


class Unavailable(RequestError):
    """The service cannot read or write its files at present; the same request succeeds once it can."""

    def __init__(self, status: int, reason: str) -> None:
        fix = "repeat the request later; the operator frees or repairs the disk"
        super().__init__("service", reason, fix, status=status)


def internal_error() -> RequestError:
    fix = "repeat the request; the service's log has the traceback"
    return RequestError("service", "an internal error, nothing was changed", fix, status=500)


class ProcessFailed(ArealLoraError):
    exit_code = ExitCode.COMPONENT_FAILED


class RunFailed(ArealLoraError):
    """A run ended before its last step. ``folder`` is its run folder; the same call resumes it."""

    def __init__(self, folder: Path, exit_code: ExitCode, why: str) -> None:
        self.folder, self.exit_code = folder, exit_code
        super().__init__(f"the run in {folder} ended with exit code {int(exit_code)}: {why}")


class RunInterrupted(RunFailed):
    """Ctrl-C, SIGTERM or SIGHUP ended a run and all its processes."""


class BackgroundFailed(ArealLoraError):
    """A long-lived thread or task died and ended its process. ``exit_code`` is that of the causing error."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.exit_code = exit_code_of(error)
        super().__init__(
            f"{name} died, so this process ends with exit code {int(self.exit_code)}: {type(error).__name__}: {error}"
        )


def exit_code_of(error: BaseException) -> int:
    """Exit code of a process that ``error`` ends; one of a full or read-only disk, too, would be repeated."""
    if isinstance(error, ArealLoraError):
        return error.exit_code
    return ExitCode.DISK if isinstance(error, OSError) and error.errno in DISK_ERRORS else ExitCode.FAILED


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` where the block raises anything, an interrupt included."""
    try:
        yield
    except BaseException:
        undo()
        raise

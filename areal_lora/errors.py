"""The exception tree. Every error names what, why and the fix in one message.

ArealLoraError
├── ConfigError          wrong input, found before anything starts (exit code 64)
├── EnvironmentError_    a needed program, package or device is missing (exit code 69)
├── AdapterError         an adapter's tensors, names or files are not what was declared
│   ├── UnknownTensorError
│   ├── UnknownVersionError  a version that no slot of the server holds
│   └── ManifestError    a publish was refused; the old version keeps serving
├── PublishError         a publish did not reach the servers (deadline, dead peer)
├── ParityError          trainer and server disagree about the policy (C6)
├── AlignmentError       a batch breaks the alignment contract (C10)
├── StalenessError       a sample beyond ``max_staleness`` reached the trainer (C7)
├── RolloutError         the rollout plane answered with an error
└── ProcessFailed        a supervised process ended (exit code 70)
"""

from __future__ import annotations


class ArealLoraError(Exception):
    """Base of all errors raised on purpose. ``exit_code`` is what the launcher exits with."""

    exit_code = 1


class ConfigError(ArealLoraError):
    """Wrong input. ``path`` is the dotted configuration key, or a file."""

    exit_code = 64

    def __init__(self, path: str, reason: str, fix: str = "") -> None:
        self.path, self.reason, self.fix = path, reason, fix
        super().__init__(f"{path}: {reason}" + (f" (fix: {fix})" if fix else ""))


class EnvironmentError_(ArealLoraError):
    """Something the run needs is not installed or not reachable on this machine."""

    exit_code = 69


class AdapterError(ArealLoraError):
    """An adapter does not match its declaration."""


class UnknownTensorError(AdapterError):
    """A tensor name that no converter knows, or a required one that is missing."""


class UnknownVersionError(AdapterError):
    """A version that is not resident on this server; never answered by the base model instead."""


class ManifestError(AdapterError):
    """A publish was refused. ``reason`` is one of the words in ``weight_sync.refusal.Refusal``."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"publish refused: {reason}: {detail}")


class PublishError(ArealLoraError):
    """A publish could not be completed on at least one server."""


class ParityError(ArealLoraError):
    """Trainer and server score the probe differently, or the server still equals the base."""


class AlignmentError(ArealLoraError):
    """Per-token arrays of a batch do not line up."""


class StalenessError(ArealLoraError):
    """A sample older than the budget reached consumption."""


class RolloutError(ArealLoraError):
    """The rollout plane (controller or server) answered with an error."""


class ProcessFailed(ArealLoraError):
    """A supervised process ended when it should not have."""

    exit_code = 70

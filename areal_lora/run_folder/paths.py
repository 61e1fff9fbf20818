"""The run folder: every file and folder that the processes of a run share, by name.

No other module of the package spells one of these names. Readers of a finished run take a plain path too and convert it
with :meth:`RunFolder.of`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below ``path``. ``process`` is ``<role>-<index>``, for example ``trainer-0``. Touches no file."""

    path: Path

    @classmethod
    def of(cls, folder: RunFolder | Path | str) -> RunFolder:
        return folder if isinstance(folder, RunFolder) else cls(Path(folder))

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    # --- of a whole run

    @property
    def config(self) -> Path:
        """The resolved configuration, written by the launcher at every start."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Folder of the rollout samples (``obs.samples``)."""
        return self.path / "samples"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def events(self) -> Path:
        """Starts, restarts and stalls, one JSON object per line (``run_folder.events``)."""
        return self.path / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """The run ledger of the rollout controller, an SQLite file."""
        return self.path / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        """Folder with one folder per adapter (``checkpoint.store``)."""
        return self.path / "checkpoints"

    def adapter_checkpoints(self, adapter: str) -> Path:
        return self.checkpoints / adapter

    def adapter_export(self, adapter: str) -> Path:
        """PEFT folder of the trained adapter, written at the end of the run."""
        return self.path / "adapters" / adapter

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def summary(self) -> Path:
        """Figures of the run. Absent while the run is unfinished."""
        return self.path / "summary.json"

    # --- of the processes of one start

    @property
    def secret(self) -> Path:
        """The run secret, mode 0600 (contract C12)."""
        return self.path / "secret"

    @property
    def ca(self) -> Path:
        """Certificate of the data plane's authority, for clients outside the run."""
        return self.path / "ca.pem"

    @property
    def data_key(self) -> Path:
        """Bearer key of the data plane, mode 0600, for clients outside the run."""
        return self.path / "data.key"

    @property
    def endpoints(self) -> Path:
        """Folder of the published ports (``run_folder.rendezvous``)."""
        return self.path / "rendezvous"

    def endpoint(self, process: str) -> Path:
        return self.endpoints / f"{process}.json"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    def heartbeat(self, process: str) -> Path:
        return self.heartbeats / process

    @property
    def statuses(self) -> Path:
        return self.path / "status"

    def status(self, process: str) -> Path:
        return self.statuses / f"{process}.txt"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log(self, process: str) -> Path:
        return self.logs / f"{process}.log"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"

    def stack_dump(self, process: str) -> Path:
        """File to which ``process`` appends the stacks of its threads on SIGUSR1 (``processes.stacks``)."""
        return self.stacks / f"{process}.txt"

    # --- of the launcher

    @property
    def lock(self) -> Path:
        """Beside the folder: locked while a launcher uses it."""
        return self.path.with_name(f".{self.path.name}.lock")

    @property
    def owner(self) -> Path:
        """Beside the folder: names the launcher that uses it, on file systems without flock."""
        return self.path.with_name(f".{self.path.name}.owner")

    # --- of a Slurm job

    @property
    def job_script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def job_id(self) -> Path:
        return self.path / "job.id"

    @property
    def job_failures(self) -> Path:
        """Number of starts that followed a failure."""
        return self.path / "job.failures"

    @property
    def exits(self) -> Path:
        """Folder of the exit codes of tasks; ``first`` links to the first that is not 0."""
        return self.path / "exits"

    def task_hosts(self, role: str) -> Path:
        return self.path / f"hosts-{role}"

    def task_script(self, role: str) -> Path:
        return self.path / f"task-{role}.sh"

    def living(self) -> tuple[Path, ...]:
        """Folders that describe processes which run now; emptied at every start."""
        return (self.endpoints, self.statuses, self.heartbeats)

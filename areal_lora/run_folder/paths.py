"""The run folder: every file and folder that the processes of a run share, by name.

No other module of the package spells one of these names. Readers of a finished run take a plain path too and convert it
with :meth:`RunFolder.of`.

What describes the living processes of a Slurm job (secret, endpoints, statuses, heartbeats, exit codes) is in
``sessions/<job id>-<restarts>``: a node whose view of the file system is old never meets an earlier life of the job.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

SESSION_VARIABLE = "AREAL_LORA_SESSION"
"""Names the session of a Slurm job to all its processes."""


def _inherited() -> str:
    return os.environ.get(SESSION_VARIABLE, "")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths below ``path``. ``process`` is ``<role>-<index>``, for example ``trainer-0``. Touches no file.

    ``session`` is that of this process, empty outside of Slurm jobs.
    """

    path: Path
    session: str = field(default_factory=_inherited)

    @classmethod
    def of(cls, folder: RunFolder | Path | str) -> RunFolder:
        return folder if isinstance(folder, RunFolder) else cls(Path(folder))

    @classmethod
    def current(cls, folder: RunFolder | Path | str) -> RunFolder:
        """The folder with its newest session, for commands and clients that are not part of the job."""
        path = Path(folder)
        try:
            return cls(path, cls(path).session_name.read_text(encoding="ascii").strip())
        except FileNotFoundError:
            return cls(path, "")

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
    def code(self) -> Path:
        """Folder of the user code that was given to ``areal_lora.train`` as objects."""
        return self.path / "code"

    @property
    def desired(self) -> Path:
        """The adapters that a service wants the run to have (``run_folder.desired``)."""
        return self.path / "desired.json"

    @property
    def service_tables(self) -> Path:
        """Tenants, adapters and operations of the service, an SQLite file (`service.queue.queue_store`)."""
        return self.path / "service.sqlite"

    @property
    def service_key(self) -> Path:
        """The operator's key of the service, mode 0600."""
        return self.path / "service.key"

    @property
    def service_exports(self) -> Path:
        """Scratch folder of downloads in progress; emptied when the service starts."""
        return self.path / ".service-exports"

    @property
    def inbox(self) -> Path:
        """Folder from which the service takes YAML files with an adapter each (`service.acceptance`)."""
        return self.path / "inbox"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        """Folder of the rollout samples (``obs.samples``)."""
        return self.path / "samples"

    @property
    def conversations(self) -> Path:
        """Requests of agents and the answers (``rollout.conversations``)."""
        return self.path / "conversations.jsonl"

    @property
    def conversations_before(self) -> Path:
        """The conversations before those."""
        return self.path / "conversations.1.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def tracking(self) -> Path:
        """Folder of what a tracker keeps on this side (``obs.tracking``)."""
        return self.path / "tracking"

    @property
    def events(self) -> Path:
        """Starts, restarts and stalls, one JSON object per line (``run_folder.events``)."""
        return self.path / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """The run ledger of the rollout controller, an SQLite file."""
        return self.path / "ledger.sqlite"

    def base_eval(self, key: str) -> Path:
        """Result of an evaluation of the base model (``rollout.controller.base_evals``)."""
        return self.path / "base_evals" / f"{key}.json"

    @property
    def judge(self) -> Path:
        """Folder with the replies of judges (``tasks.judge``); their scorer processes may write it."""
        return self.path / "judge"

    @property
    def checkpoints(self) -> Path:
        """Folder with one folder per adapter (``checkpoint.checkpoint_store``)."""
        return self.path / "checkpoints"

    def adapter_checkpoints(self, adapter: str) -> Path:
        return self.checkpoints / adapter

    @property
    def saved_states(self) -> Path:
        """By adapter, what clients saved (``trainer.saved_states``)."""
        return self.path / "states"

    def saved_state(self, adapter: str, label: str) -> Path:
        """What a client saved of an adapter, until it is dropped; it outlives the adapter."""
        return self.saved_states / adapter / label

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
    def session_name(self) -> Path:
        """Names the session of the Slurm job that works in the folder, or was the last to do so."""
        return self.path / "session"

    @property
    def sessions(self) -> Path:
        return self.path / "sessions"

    @property
    def living_root(self) -> Path:
        """Folder of what describes the processes of this session."""
        return self.sessions / self.session if self.session else self.path

    @property
    def secret(self) -> Path:
        """The run secret, mode 0600 (contract C12)."""
        return self.living_root / "secret"

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
        return self.living_root / "rendezvous"

    def endpoint(self, process: str) -> Path:
        return self.endpoints / f"{process}.json"

    def excluded(self, process: str) -> Path:
        """Exists once the launcher does without ``process`` for the rest of this start."""
        return self.endpoints / f"{process}.excluded"

    @property
    def heartbeats(self) -> Path:
        return self.living_root / "heartbeats"

    def heartbeat(self, process: str) -> Path:
        return self.heartbeats / process

    @property
    def statuses(self) -> Path:
        return self.living_root / "status"

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
        """File to which ``process`` appends the stacks of its threads on SIGUSR1 (``processes.startup``)."""
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

    @property
    def spares(self) -> Path:
        """Folder of claimed server indices and of jobs that run spare servers (``launcher.spares``)."""
        return self.path / "spares"

    # --- of a Slurm job

    @property
    def job_script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def job_id(self) -> Path:
        return self.path / "job.id"

    @property
    def job_requeues(self) -> Path:
        """Requeues of the last job and the checkpoints at the start of each lifetime (``launcher.slurm.job``)."""
        return self.path / "job.requeues.json"

    def step(self, name: str) -> Path:
        """Folder of a job step: its task script, host file and the exit codes of its tasks.

        ``first`` in it links to the first code that is not 0.
        """
        return self.living_root / "steps" / name

    @property
    def requeue_request(self) -> Path:
        """Exists when USR1 has reached a task: the job is to be requeued."""
        return self.living_root / "requeue-requested"

    def living(self) -> tuple[Path, ...]:
        """Folders that describe processes which run now; emptied at every start."""
        return (self.endpoints, self.statuses, self.heartbeats)

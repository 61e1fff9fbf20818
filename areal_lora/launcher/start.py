"""The run folder at a start: new, with a run to resume, or with a finished run."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_lora.checkpoint.store import versions_in
from areal_lora.config.models import Config, ModelConfig
from areal_lora.config.recorded import read_config, write_config
from areal_lora.config.resume import conflict
from areal_lora.errors import ConfigError
from areal_lora.launcher.run_lock import RunLock
from areal_lora.obs.report.summary import read_summary
from areal_lora.run_folder.events import StartEvent, now_utc, write_event
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret

SQUEUE_S = 60.0
_FORGOTTEN = "Invalid job id"
"""Error of squeue for a job that ended some minutes ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousRun:
    """The run that a folder holds. ``versions`` are those with a checkpoint, by adapter, whole or not."""

    config: Config
    steps_done: int
    versions: dict[str, list[int]]

    def finished(self, config: Config) -> bool:
        """Whether the run has made all steps of ``config``."""
        return self.steps_done >= config.run.steps


def previous_run(folder: RunFolder) -> PreviousRun | None:
    """The run in ``folder``, None where there is none. Raises ConfigError for a folder of something else."""
    if not _holds_run(folder):
        return None
    config = read_config(folder)
    versions = {a.name: versions_in(folder.adapter_checkpoints(a.name)) for a in config.adapters}
    return PreviousRun(config=config, steps_done=_steps_done(folder), versions=versions)


def recorded_model(config: Config) -> ModelConfig | None:
    """The base model of the run that ``config`` would resume; None where there is none."""
    previous = previous_run(with_absolute_root(config).run_folder)
    return previous.config.model if previous else None


def _steps_done(folder: RunFolder) -> int:
    """Return the steps of a run that ended with success, else 0."""
    try:
        return read_summary(folder).steps
    except (FileNotFoundError, msgspec.DecodeError):
        return 0


def with_absolute_root(config: Config) -> Config:
    """Processes may have another working folder than the launcher."""
    return config.model_copy(update={"run": config.run.model_copy(update={"root": config.run.root.absolute()})})


class RunStart:
    """The run folder, locked while the launcher runs.

    Entering takes the lock and, with ``fresh``, moves an earlier run aside (``moved``). ``previous`` is
    the run to resume; ``prepare`` makes the folder ready for processes to start.

    Raises ConfigError where a launcher or a job is using the folder, it holds something else, or
    the run in it cannot be resumed with this configuration.
    """

    def __init__(self, config: Config, fresh: bool = False) -> None:
        self.config = with_absolute_root(config)
        self.folder = self.config.run_folder
        self.previous: PreviousRun | None = None
        self.moved: Path | None = None
        self._fresh = fresh
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
        """Write the configuration; recreate what describes processes: secret, endpoints, statuses, heartbeats."""
        self.folder.path.mkdir(exist_ok=True)
        for path in self.folder.living():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        self.folder.logs.mkdir(exist_ok=True)
        # Written at the end: an unfinished run has none.
        self.folder.summary.unlink(missing_ok=True)
        write_config(self.folder, self.config)
        create_secret(self.folder)
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
    command = ["squeue", "-h", "-j", job, "-o", "%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SQUEUE_S)
        why = " ".join(done.stderr.split())
    except FileNotFoundError:
        done, why = None, "squeue is not on this machine"
    except subprocess.TimeoutExpired:
        done, why = None, f"squeue gave no answer within {SQUEUE_S:g} s"
    if done is not None and done.returncode == 0:
        if done.stdout.strip():
            fix = f"wait for it, scancel {job}, or set another run.name"
            raise ConfigError("run.name", f"Slurm job {job} works in {folder}", fix)
    elif _FORGOTTEN not in why:
        raise ConfigError(
            "run.name",
            f"Slurm job {job} may still work in {folder}: {why}",
            f"start where squeue works, or remove {folder.job_id} if the job is over",
        )

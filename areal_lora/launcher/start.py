"""The run folder at a start: new, with a run to resume, or with a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.config.adapter_run import steps_of
from areal_lora.config.models import Config, ModelConfig
from areal_lora.config.recorded import read_config, write_config
from areal_lora.config.resume import conflict
from areal_lora.errors import ConfigError
from areal_lora.launcher.run_lock import RunLock
from areal_lora.launcher.slurm.job_query import look
from areal_lora.launcher.slurm.states import Phase, explain, is_active
from areal_lora.obs.report.summary import read_summary
from areal_lora.run_folder.events import StartEvent, now_utc, write_event
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.sessions import begin_session, forget_sessions


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

"""A run as its folder records it, for scripts and notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.checkpoint.versions import pick_version
from areal_lora.config.adapter_run import adapter_named
from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config_here
from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.reader import iter_metrics, read_metrics
from areal_lora.obs.metrics.records import EvalRecord, Record, RunMetrics, StepRecord
from areal_lora.obs.report.page import write_report
from areal_lora.obs.report.summary import Summary, read_summary
from areal_lora.run_folder.events import EndEvent, last_end
from areal_lora.run_folder.paths import RunFolder


@dataclass(frozen=True)
class Run:
    """A run, finished or not. Its files are read when an attribute is first used; ``load_run`` again for newer ones."""

    folder: Path

    @cached_property
    def config(self) -> Config:
        """The resolved configuration, at the place where the folder is now."""
        return read_config_here(RunFolder(self.folder))

    @cached_property
    def metrics(self) -> RunMetrics:
        """All records in memory: steps, publishes, evaluations, samples, checkpoints, resumes, members."""
        return read_metrics(self.folder)

    def records(self) -> Iterator[Record]:
        """The same records one by one, for runs that are too long for memory."""
        return iter_metrics(self.folder)

    @property
    def steps(self) -> list[StepRecord]:
        return self.metrics.steps

    @property
    def evals(self) -> list[EvalRecord]:
        return self.metrics.evals

    @property
    def finished(self) -> bool:
        """Whether the last start came to its end; of several adapters one may have failed (``summary.adapters``)."""
        return RunFolder(self.folder).summary.is_file()

    @property
    def failure(self) -> EndEvent | None:
        """Why the last start ended before the last step: process, exit code and error; None where no one knows."""
        return None if self.finished else last_end(RunFolder(self.folder))

    @cached_property
    def summary(self) -> Summary:
        """Figures of the whole run. Raises ConfigError before its end."""
        if not self.finished:
            raise ConfigError(
                str(self.folder), "the run is not finished", "train it to its end; `steps` has what it did"
            )
        return read_summary(self.folder)

    @property
    def versions(self) -> list[int]:
        """Versions of the only adapter with a checkpoint, oldest first. Raises ConfigError for several adapters."""
        return self.versions_of()

    def versions_of(self, adapter: str | None = None) -> list[int]:
        """Versions of ``adapter`` that have a checkpoint, oldest first; of the only one without a name."""
        return versions_in(RunFolder(self.folder).adapter_checkpoints(adapter_named(self.config, adapter).name))

    @property
    def adapters(self) -> dict[str, Path]:
        """PEFT folder by adapter; empty before the end of the run."""
        folder = RunFolder(self.folder)
        places = {adapter.name: folder.adapter_export(adapter.name) for adapter in self.config.adapters}
        return {name: path for name, path in places.items() if path.is_dir()}

    @property
    def adapter(self) -> Path:
        """PEFT folder of the only adapter. Raises ConfigError if there are several, and before the end of the run."""
        path = RunFolder(self.folder).adapter_export(adapter_named(self.config).name)
        if not path.is_dir():
            raise ConfigError(
                str(path), "it is written at the end of the run", "export(version, folder) writes another"
            )
        return path

    def export(self, version: int | str, folder: Path | str, adapter: str | None = None) -> Path:
        """Write a version (a number, ``newest`` or ``best``) of ``adapter`` as a PEFT folder; returns the folder.

        A run with one adapter needs no name. Raises ConfigError for an adapter or version that is not there,
        AdapterError if ``folder`` exists.
        """
        target = Path(folder)
        pick_version(RunFolder(self.folder), self.config, str(version), adapter).export(target)
        return target

    def report(self) -> Path:
        """Write ``report.html`` from the present state; returns its path."""
        return write_report(self.folder)


def load_run(folder: Path | str) -> Run:
    """The run in ``folder``; reads nothing yet. Raises ConfigError for a folder without a started run."""
    path = Path(folder).expanduser().absolute()
    if not RunFolder(path).config.is_file():
        reason = "it is not a run folder: no config.json" if path.exists() else "there is no such folder"
        raise ConfigError(str(path), reason, "name a run folder, such as runs/NAME")
    return Run(path)

"""A run as its folder records it, for scripts and notebooks."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.checkpoint.recover import pick_version
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_named, read_config_here
from areal_lora.errors import ConfigError, ExitCode, RunFailed, RunInterrupted
from areal_lora.launcher.run import prepare, start
from areal_lora.launcher.supervise import Interrupts
from areal_lora.library import objects as own
from areal_lora.obs.console import run_console
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
        """The same of ``adapter``; of the only one without a name."""
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
    path = Path(os.path.expanduser(folder)).absolute()
    if not RunFolder(path).config.is_file():
        reason = "it is not a run folder: no config.json" if path.exists() else "there is no such folder"
        raise ConfigError(str(path), reason, "name a run folder, such as runs/NAME")
    return Run(path)


Part = Path | str | Mapping[str, Any]


def train(
    config: Config | Part | Sequence[Part],
    *,
    overrides: Sequence[str] = (),
    reward: Callable[..., Any] | None = None,
    environment: Callable[..., Any] | None = None,
    agent: Callable[..., Any] | None = None,
    workflow: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    advantage: Callable[..., Any] | None = None,
    fresh: bool = False,
) -> Run:
    """Train on this machine until the last step; resume the run in its folder unless ``fresh`` moves it aside.

    ``config`` is a file, a mapping of the same shape, several of them to merge in order, or a Config. ``reward`` is a
    reward function, ``environment`` a class or factory for `multi_turn`, ``agent`` an agent's function, ``workflow`` a
    workflow's factory, ``loss`` and ``advantage`` functions as in `algorithms.registry`; each takes the place of
    the configured one. Call it in the main thread.

    Raises ConfigError or ConfigErrors for what cannot start, RunInterrupted after Ctrl-C, RunFailed for a run that
    ended before its last step. No process remains in any case, and the handlers of signals are those from before.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("train", "it handles signals, which only the main thread can", "call it in the main thread")
    objects = {own.REWARD: reward, own.LOSS: loss, own.ADVANTAGE: advantage}
    objects |= {own.ENVIRONMENT: environment, own.AGENT: agent, own.WORKFLOW: workflow}
    wanted = _config(config, overrides, objects)
    if wanted.cluster.kind != "local":
        fix = "submit it with areal-lora train, then load_run its folder"
        raise ConfigError("cluster.kind", f"train waits for runs of this machine, not for {wanted.cluster.kind}", fix)
    code = own.user_code(wanted, objects)
    out, err = run_console(), Console(stderr=True, highlight=False)
    with TemporaryDirectory(prefix="areal-lora-") as staged:
        code.write(Path(staged))
        prepared = prepare(code.put_into(wanted, Path(staged)), err, fresh=fresh)
    folder = prepared.plan.run_folder
    with _handlers_kept():
        final = code.put_into(prepared.config, folder.code)
        end = start(final, prepared.plan, out, fresh, prepared.download, code.files)
    if end.code == ExitCode.INTERRUPTED:
        raise RunInterrupted(folder.path, end.code, end.why)
    if end.code != ExitCode.DONE:
        raise RunFailed(folder.path, end.code, end.why)
    return load_run(folder.path)


def _config(config: Config | Part | Sequence[Part], overrides: Sequence[str], objects: Mapping[str, object]) -> Config:
    if isinstance(config, Config):
        return load_config([config.model_dump(mode="json")], overrides) if overrides else config
    parts = [config] if isinstance(config, Path | str | Mapping) else config
    return load_config(parts, overrides, given=own.given_sections(objects))


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers: after an interrupted run the launcher ignores signals, as its process is ending."""
    before = {number: signal.getsignal(number) for number in Interrupts.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

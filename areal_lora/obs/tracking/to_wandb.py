"""Weights & Biases, and two SDKs of its form: Trackio and SwanLab.

W&B: a record is one row of the history, at the step that is its line in ``metrics.jsonl``.

Lines only ascend, as W&B demands of steps: its own step is the last line it holds, and a row sent twice is ignored.
The x axis of an adapter's curves is ``NAME/step``, the position that TensorBoard has.

Offline, W&B knows nothing of earlier processes: each start writes the whole run again and removes unfinished ones.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from areal_lora.obs.metrics.records import EvalRecord, position, scalars
from areal_lora.obs.tracking.tracker import Ending, MetricsRow, TrackedRun, require, speaking_to

if TYPE_CHECKING:
    from wandb import Run

NAME = "Weights & Biases"
COLUMNS = ["prompt", "completion", "gold", "reward", "correct"]
ID = 64
"""Characters of the id of a run of SwanLab."""


def remove_others(current: Path, pattern: str) -> None:
    """Remove the folders of earlier processes beside ``current``."""
    for other in current.parent.glob(pattern):
        if other.resolve() != current.resolve():
            shutil.rmtree(other, ignore_errors=True)


class WandbTracker:
    """A run of W&B. The first process makes it, later ones continue it."""

    def __init__(self, run: TrackedRun, project: str, entity: str | None = None) -> None:
        require("wandb", "wandb", "wandb")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # to its makers
        folder = run.folder.tracking
        with speaking_to(NAME):
            import wandb

            self._sdk: ModuleType = wandb
            settings = wandb.Settings(
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                disable_job_creation=True,
                x_disable_machine_info=True,  # of a machine that need not be one of the run
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            )
            wandb.setup(settings=settings)  # silent before the login, too
            self._run: Run = wandb.init(
                project=project,
                entity=entity,
                id=run.key,
                name=run.name,
                resume="allow",
                dir=str(folder) if os.access(folder, os.W_OK) else None,
                settings=settings,
            )
            self._run.config.update(dict(run.config), allow_val_change=True)
        if self._run.offline:  # all that earlier processes have put down is sent again
            remove_others(Path(self._run.dir).parent, f"offline-run-*-{run.key}")
        self._axes: set[str] = set()
        self._page = run.folder.report.name

    @property
    def where(self) -> str:
        return str(Path(self._run.dir).parent) if self._run.offline else str(self._run.url)

    def held(self) -> int:
        return max(0, int(self._run.starting_step) - 1)

    def send(self, rows: Sequence[MetricsRow]) -> None:
        with speaking_to(NAME):
            for row in rows:
                values: dict[str, Any] = dict(scalars(row.record))
                prefix = f"{row.record.adapter}/" if row.record.adapter else ""
                if isinstance(row.record, EvalRecord) and row.record.samples:
                    data = [[s.prompt, s.completion, s.gold, s.reward, s.correct] for s in row.record.samples]
                    values[f"{prefix}samples/{row.record.name}"] = self._sdk.Table(columns=COLUMNS, data=data)
                if values:
                    if prefix not in self._axes:
                        self._axes.add(prefix)
                        self._run.define_metric(f"{prefix}step", hidden=True)
                        self._run.define_metric(f"{prefix}*", step_metric=f"{prefix}step")
                    self._run.log({**values, f"{prefix}step": position(row.record)}, step=row.line, commit=True)

    def end(self, ending: Ending | None) -> None:
        with speaking_to(NAME):
            if ending is None:
                self._run.finish()
                return
            self._run.summary.update({"state": ending.state, **{f"summary/{k}": v for k, v in ending.summary.items()}})
            page = Path(self._run.dir) / self._page
            page.write_text(ending.report, encoding="utf-8")
            self._run.save(str(page), base_path=self._run.dir, policy="now")
            self._run.finish(exit_code=0 if ending.state == "done" else 1)


class TrackioTracker:
    """A run of Trackio in the user's folder, a Space or a server, by its variables. A row's step is its line.

    The SDK prints to standard output, which here belongs to the command.
    """

    def __init__(self, run: TrackedRun, project: str, within: str | None = None) -> None:
        require("trackio", "trackio", "trackio")
        with speaking_to("Trackio"), redirect_stdout(sys.stderr):
            import trackio

            self._run: Any = trackio.init(
                project=project,
                name=run.key,
                resume="allow",
                config=dict(run.config),
                embed=False,
                auto_log_cpu=False,  # of a machine that need not be one of the run
                auto_log_gpu=False,
            )
            self.where = f"{self._run.url or trackio.TRACKIO_DIR}, project {project}, run {run.key}"

    def held(self) -> int:
        with speaking_to("Trackio"):
            return max(0, int(self._run._next_step) - 1)  # one above the last that is stored; nothing public has it

    def send(self, rows: Sequence[MetricsRow]) -> None:
        with speaking_to("Trackio"):
            for row in rows:
                if values := scalars(row.record):
                    prefix = f"{row.record.adapter}/" if row.record.adapter else ""
                    self._run.log({**values, f"{prefix}step": position(row.record)}, step=row.line)

    def end(self, ending: Ending | None) -> None:
        with speaking_to("Trackio"), redirect_stdout(sys.stderr):
            self._run.finish()


class SwanlabTracker:
    """A run of SwanLab; its variables choose cloud, server or ``SWANLAB_MODE=offline``.

    A value's step is its position. The SDK leaves out steps that a tag holds: each start sends all, offline as for W&B.
    """

    def __init__(self, run: TrackedRun, project: str, within: str | None = None) -> None:
        require("swanlab", "swanlab", "swanlab")
        with speaking_to("SwanLab"):
            import swanlab

            probe = swanlab.Settings.Probe(hardware=False, runtime=False, requirements=False, monitor=False)
            terminal = swanlab.Settings.Terminal(proxy_type="none")
            self._run: Any = swanlab.init(
                project=project,
                name=run.name,
                id=run.key[-ID:],
                resume="allow",
                config=dict(run.config),
                log_dir=str(run.folder.tracking) if os.access(run.folder.tracking, os.W_OK) else None,
                settings=swanlab.Settings(interactive=False, probe=probe, terminal=terminal),
            )
            if self._run.mode == "offline":
                current = Path(self._run.dir)
                remove_others(current, f"run-*-{current.name.split('-', 2)[2]}")

    @property
    def where(self) -> str:
        return str(self._run.url if self._run.mode == "online" else self._run.dir)

    def held(self) -> int:
        return 0

    def send(self, rows: Sequence[MetricsRow]) -> None:
        with speaking_to("SwanLab"):
            for row in rows:
                if values := scalars(row.record):
                    self._run.log(values, step=position(row.record))

    def end(self, ending: Ending | None) -> None:
        with speaking_to("SwanLab"):
            self._run.finish(state="success" if ending is not None and ending.state == "done" else "aborted")

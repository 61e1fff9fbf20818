"""The SDKs of trackers: Weights & Biases, two of its form (Trackio and SwanLab), and MLflow.

W&B: a record is one row of the history, at the step that is its line in ``metrics.jsonl``. Lines only ascend, as W&B
demands of steps: its own step is the last line it holds, and a row sent twice is ignored. The x axis of an adapter's
curves is ``NAME/step``, the position that TensorBoard has; ``train/step`` in a run of one, as Trackio keeps ``step`` to
itself. Offline, W&B knows nothing of earlier processes: each start writes the whole run again and removes unfinished
ones.

MLflow: a record is a set of metrics at its position, at a time that is made from the record alone. A run is found by a
tag with its key. Another tag has the last line that was sent, and is written after its metrics. A process that is
killed in between sends them again: a store keeps equal step, time and value once.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.records import EvalRecord, Record, position, scalars
from areal_lora.obs.tracking.tracker import Ending, MetricsRow, TrackedRun, flat, masked_text, require, speaking_to

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun
    from wandb import Run

WANDB = "Weights & Biases"
COLUMNS = ["prompt", "completion", "gold", "reward", "correct"]
ID = 64
"""Characters of the id of a run of SwanLab."""


def axis_of(record: Record) -> str:
    return f"{record.adapter or 'train'}/step"


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
        with speaking_to(WANDB):
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
        with speaking_to(WANDB):
            for row in rows:
                values: dict[str, Any] = dict(scalars(row.record))
                prefix = f"{row.record.adapter}/" if row.record.adapter else ""
                if isinstance(row.record, EvalRecord) and row.record.samples:
                    data = [[s.prompt, s.completion, s.gold, s.reward, s.correct] for s in row.record.samples]
                    values[f"{prefix}samples/{row.record.name}"] = self._sdk.Table(columns=COLUMNS, data=data)
                if values:
                    axis = axis_of(row.record)
                    if axis not in self._axes:
                        self._axes.add(axis)
                        self._run.define_metric(axis, hidden=True)
                        self._run.define_metric(f"{prefix}*", step_metric=axis)
                    self._run.log({**values, axis: position(row.record)}, step=row.line, commit=True)

    def end(self, ending: Ending | None) -> None:
        with speaking_to(WANDB):
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
                    self._run.log({**values, axis_of(row.record): position(row.record)}, step=row.line)

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


KEY, LINE = "areal_lora.run", "areal_lora.line"
METRICS, PARAMETERS, LONGEST = 1000, 100, 6000
"""Most metrics and parameters of a request, and the longest parameter, as MLflow limits them."""
STATUS = {"done": "FINISHED", "stopped": "KILLED"}
_REFUSED = re.compile(r"[^\w/. -]")


class MlflowTracker:
    """A run of MLflow. The first process makes it, later ones continue it."""

    def __init__(self, run: TrackedRun, uri: str, experiment: str | None = None) -> None:
        if masked_text(uri) != uri:
            fix = "give them as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            raise ConfigError("mlflow", "the address has credentials", fix)
        require("mlflow", "mlflow-skinny", "mlflow")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # else it reports its use, and waits for that at exit
        self._folder, self._config, self._uri = run.folder, run.config, uri
        with speaking_to("MLflow"):
            from mlflow import MlflowClient

            logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports how it makes a store
            self._client = MlflowClient(tracking_uri=uri)
            self._run = self._find(run, experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "areal_lora"))
            self._client.update_run(self._run.info.run_id, status="RUNNING", name=run.name)
            self._log_parameters()

    @property
    def _id(self) -> str:
        return str(self._run.info.run_id)

    def _find(self, run: TrackedRun, experiment: str) -> MlflowRun:
        found = self._client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else self._client.create_experiment(experiment)
        runs = self._client.search_runs([experiment_id], f"tags.`{KEY}` = '{run.key}'", max_results=1)
        started = datetime.fromisoformat(run.started_at).timestamp() if run.started_at else time.time()
        tags = {KEY: run.key}
        return runs[0] if runs else self._client.create_run(experiment_id, int(1000 * started), tags, run.name)

    def _log_parameters(self) -> None:
        """The configuration. A parameter cannot change: it keeps the value of the first start."""
        from mlflow.entities import Param

        known = self._run.data.params
        values = {_accepted(key): str(value)[:LONGEST] for key, value in flat(self._config).items()}
        new = [Param(key, value) for key, value in values.items() if key not in known]
        for start in range(0, len(new), PARAMETERS):
            self._client.log_batch(self._id, params=new[start : start + PARAMETERS])

    @property
    def where(self) -> str:
        if self._uri.startswith("http"):
            return f"{self._uri.rstrip('/')}/#/experiments/{self._run.info.experiment_id}/runs/{self._id}"
        return f"{self._uri}, run {self._id}"

    def held(self) -> int:
        return int(self._run.data.tags.get(LINE, 0))

    def send(self, rows: Sequence[MetricsRow]) -> None:
        values = [
            (tag, value, self._time_ms(row.time_s), position(row.record))
            for row in rows
            for tag, value in scalars(row.record).items()
        ]
        with speaking_to("MLflow"):
            self._log(values)
            self._client.set_tag(self._id, LINE, rows[-1].line)

    def _log(self, values: Sequence[tuple[str, float, int, int]]) -> None:
        """Of each value its tag, itself, its time in ms and its step."""
        from mlflow.entities import Metric

        metrics = [Metric(_accepted(tag), value, time_ms, step) for tag, value, time_ms, step in values]
        for start in range(0, len(metrics), METRICS):
            self._client.log_batch(self._id, metrics[start : start + METRICS])

    def _time_ms(self, time_s: float) -> int:
        return int(self._run.info.start_time + 1000 * time_s)

    def end(self, ending: Ending | None) -> None:
        if ending is None:
            return  # the run continues, and so does that of MLflow
        figures = {name: value for name, value in flat(ending.summary).items() if isinstance(value, int | float)}
        at_ms, step = self._time_ms(figures.get("wall_s", 0.0)), int(figures.get("steps", 0))
        with speaking_to("MLflow"):
            self._log([(f"summary/{name}", value, at_ms, step) for name, value in figures.items()])
            self._client.set_tag(self._id, "areal_lora.state", ending.state)
            self._client.set_terminated(self._id, STATUS[ending.state])
            self._client.log_dict(self._id, dict(self._config), self._folder.config.name)
            self._client.log_text(self._id, ending.report, self._folder.report.name)


def _accepted(tag: str) -> str:
    """``tag`` as MLflow accepts it: ``eval/hard/pass@4`` is ``eval/hard/pass_at_4``."""
    return _REFUSED.sub("_", tag.replace("@", "_at_"))

"""MLflow: a record is a set of metrics at its position, at a time that is made from the record alone.

A run of MLflow is found by a tag with the key of the run. Another tag has the last line that was sent, and is written
after its metrics. A process that is killed in between sends them again: a store keeps equal step, time and value once.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.records import position, scalars
from areal_lora.obs.tracking.tracker import Ending, MetricsRow, TrackedRun, flat, masked_text, require, speaking_to

if TYPE_CHECKING:
    from mlflow.entities import Run

NAME = "MLflow"
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
        with speaking_to(NAME):
            from mlflow import MlflowClient

            logging.getLogger("mlflow").setLevel(logging.WARNING)  # it reports how it makes a store
            self._client = MlflowClient(tracking_uri=uri)
            self._run = self._find(run, experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "areal_lora"))
            self._client.update_run(self._run.info.run_id, status="RUNNING", name=run.name)
            self._log_parameters()

    @property
    def _id(self) -> str:
        return str(self._run.info.run_id)

    def _find(self, run: TrackedRun, experiment: str) -> Run:
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
        values = {_name(key): str(value)[:LONGEST] for key, value in flat(self._config).items()}
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
        with speaking_to(NAME):
            self._log(values)
            self._client.set_tag(self._id, LINE, rows[-1].line)

    def _log(self, values: Sequence[tuple[str, float, int, int]]) -> None:
        """Of each value its tag, itself, its time in ms and its step."""
        from mlflow.entities import Metric

        metrics = [Metric(_name(tag), value, time_ms, step) for tag, value, time_ms, step in values]
        for start in range(0, len(metrics), METRICS):
            self._client.log_batch(self._id, metrics[start : start + METRICS])

    def _time_ms(self, time_s: float) -> int:
        return int(self._run.info.start_time + 1000 * time_s)

    def end(self, ending: Ending | None) -> None:
        if ending is None:
            return  # the run continues, and so does that of MLflow
        figures = {name: value for name, value in flat(ending.summary).items() if isinstance(value, int | float)}
        at_ms, step = self._time_ms(figures.get("wall_s", 0.0)), int(figures.get("steps", 0))
        with speaking_to(NAME):
            self._log([(f"summary/{name}", value, at_ms, step) for name, value in figures.items()])
            self._client.set_tag(self._id, "areal_lora.state", ending.state)
            self._client.set_terminated(self._id, STATUS[ending.state])
            self._client.log_dict(self._id, dict(self._config), self._folder.config.name)
            self._client.log_text(self._id, ending.report, self._folder.report.name)


def _name(tag: str) -> str:
    """``tag`` as MLflow accepts it: ``eval/hard/pass@4`` is ``eval/hard/pass_at_4``."""
    return _REFUSED.sub("_", tag.replace("@", "_at_"))

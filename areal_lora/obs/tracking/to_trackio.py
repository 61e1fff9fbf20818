"""Trackio: a record is one row at the step that is its line in ``metrics.jsonl``; its store keeps the last one.

The SDK prints to standard output, which here belongs to the command.
"""

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from areal_lora.obs.metrics.records import position, scalars
from areal_lora.obs.tracking.tracker import Ending, MetricsRow, TrackedRun, require, speaking_to

if TYPE_CHECKING:
    from trackio import Run

NAME = "Trackio"


class TrackioTracker:
    """A run of Trackio under the key of the run: in the user's folder, a Space or a server, as its variables say."""

    def __init__(self, run: TrackedRun, project: str, within: str | None = None) -> None:
        require("trackio", "trackio", "trackio")
        with speaking_to(NAME), redirect_stdout(sys.stderr):
            import trackio

            self._run: Run = trackio.init(
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
        with speaking_to(NAME):
            return max(0, int(self._run._next_step) - 1)  # one above the last that is stored; nothing public has it

    def send(self, rows: Sequence[MetricsRow]) -> None:
        with speaking_to(NAME):
            for row in rows:
                if values := scalars(row.record):
                    prefix = f"{row.record.adapter}/" if row.record.adapter else ""
                    self._run.log({**values, f"{prefix}step": position(row.record)}, step=row.line)

    def end(self, ending: Ending | None) -> None:
        with speaking_to(NAME), redirect_stdout(sys.stderr):
            self._run.finish()

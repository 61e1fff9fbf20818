"""SwanLab: a record is a value of each tag at its position. The SDK leaves out positions that a tag holds.

So each start sends the whole run. Offline, it writes one new folder and removes the unfinished ones, as for W&B.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from areal_lora.obs.metrics.records import position, scalars
from areal_lora.obs.tracking.tracker import Ending, MetricsRow, TrackedRun, require, speaking_to

if TYPE_CHECKING:
    from swanlab import Run

NAME = "SwanLab"
LONGEST = 64
"""Characters of the id of a run."""


class SwanlabTracker:
    """A run of SwanLab; its variables choose cloud, server or ``SWANLAB_MODE=offline``."""

    def __init__(self, run: TrackedRun, project: str, within: str | None = None) -> None:
        require("swanlab", "swanlab", "swanlab")
        with speaking_to(NAME):
            import swanlab

            probe = swanlab.Settings.Probe(hardware=False, runtime=False, requirements=False, monitor=False)
            terminal = swanlab.Settings.Terminal(proxy_type="none")
            self._run: Run = swanlab.init(
                project=project,
                name=run.name,
                id=run.key[-LONGEST:],
                resume="allow",
                config=dict(run.config),
                log_dir=str(run.folder.tracking) if os.access(run.folder.tracking, os.W_OK) else None,
                settings=swanlab.Settings(interactive=False, probe=probe, terminal=terminal),
            )
            if self._run.mode == "offline":
                current = Path(self._run.dir)
                for other in current.parent.glob(f"run-*-{current.name.split('-', 2)[2]}"):
                    if other != current:
                        shutil.rmtree(other, ignore_errors=True)

    @property
    def where(self) -> str:
        return str(self._run.url if self._run.mode == "online" else self._run.dir)

    def held(self) -> int:
        return 0

    def send(self, rows: Sequence[MetricsRow]) -> None:
        with speaking_to(NAME):
            for row in rows:
                if values := scalars(row.record):
                    self._run.log(values, step=position(row.record))

    def end(self, ending: Ending | None) -> None:
        with speaking_to(NAME):
            self._run.finish(state="success" if ending is not None and ending.state == "done" else "aborted")

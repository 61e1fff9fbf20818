"""Curriculum by stages: the values of a column have weights, which change at configured steps.

Position p draws a value by a hash of seed and p, then the row at place p of a shuffled order of that value's rows (as
`data.prompts` for the whole set). So nothing is drawn again or skipped however small a weight is, and a row comes at
most once in as many positions as its value has rows.

A position belongs to the stage of the step that its group is for, when it is issued for the first time. The positions
at which stages start are in the ledger file, and in its snapshots.
"""

import json
import random
from collections.abc import Sequence

from areal_lora.config.sections.adapter import StagedDifficulty
from areal_lora.data.prompts import locate
from areal_lora.rollout.ledger.ledger import LedgerFile
from areal_lora.tasks.stored_samples import indices_by_value
from areal_lora.types import Sample

TABLE = """CREATE TABLE IF NOT EXISTS stages (
    adapter TEXT NOT NULL, stage INTEGER NOT NULL, position INTEGER NOT NULL,
    PRIMARY KEY (adapter, stage)) WITHOUT ROWID"""


class Curriculum:
    """Order of one adapter's prompts. ``starts`` has the positions at which the stages after the first one start."""

    def __init__(self, chosen: StagedDifficulty, samples: Sequence[Sample], seed: int) -> None:
        """Raises ConfigError for what `indices_by_value` refuses."""
        self._seed, self._stages, self._rows = seed, chosen.stages, indices_by_value(samples, chosen)
        drawn = {value for _, weights in chosen.stages for value, weight in weights.items() if weight}
        self.sets: Sequence[Sequence[int]] = [self._rows[value] for value in sorted(drawn)]
        self.key = json.dumps([chosen.column, chosen.stages])
        self.starts = list[int]()
        self._file: LedgerFile | None = None
        self._adapter = ""

    def attach(self, file: LedgerFile, adapter: str) -> None:
        """Read the stages' starts from ``file``, and keep them there."""
        self._file, self._adapter = file, adapter
        file.execute(TABLE)
        rows = file.execute("SELECT position FROM stages WHERE adapter = ? ORDER BY stage", (adapter,))
        self.starts = [position for (position,) in rows]

    def place(self, position: int) -> tuple[int, int]:
        """Epoch of the row among those of its value, and its index in the data set."""
        _, weights = self._stages[sum(start <= position for start in self.starts)]
        chance = random.Random(f"curriculum {self._seed} {position}")
        rows = self._rows[chance.choices(list(weights), list(weights.values()))[0]]
        epoch, index = locate(position, len(rows), self._seed)
        return epoch, rows[index]

    def issue(self, position: int, step: int) -> None:
        """``position``, the largest so far, is issued for ``step``. Until the ledger's next flush in memory only."""
        for first, _ in self._stages[len(self.starts) + 1 :]:
            if step >= first:
                self.restore([*self.starts, position])

    def restore(self, starts: Sequence[int]) -> None:
        """Those of a snapshot, in place of all."""
        self.starts = list(starts)
        assert self._file is not None
        self._file.execute("DELETE FROM stages WHERE adapter = ?", (self._adapter,))
        for stage, position in enumerate(starts, start=1):
            self._file.execute("INSERT INTO stages VALUES (?, ?, ?)", (self._adapter, stage, position))

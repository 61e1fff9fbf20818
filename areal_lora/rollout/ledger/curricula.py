"""Curriculum by stages: the values of a column have weights, which change at configured steps.

Position p draws a value by a hash of seed and p, then the row at place p of a shuffled order of that value's rows (as
`data.prompts` for the whole set). So nothing is drawn again or skipped however small a weight is, and a row comes at
most once in as many positions as its value has rows.

A position belongs to the stage of the step that its group is for, when it is issued for the first time. The positions
at which stages start are in the head of the ledger, and in its snapshots.

Curriculum by difficulty: prompts that the adapter solves always or never are drawn less often.

The weight of a prompt is 4 p (1 - p), the variance of its correctness over the largest one; Foster et al., "Learning to
Reason at the Frontier of Learnability" (arXiv 2502.12272), sample by p (1 - p). With ``c`` correct of ``n`` answers in
the prompt's last group p = (c + 1) / (n + 2), Laplace's rule of succession: no weight is 0. A prompt without answers
has weight 1.

In each epoch a prompt is drawn with the probability of its weight, by a hash of seed and position: what was skipped
needs no record, and what was issued has its row. The counts are in the ledger file, and in its snapshots.
"""

import json
import random
from collections.abc import Sequence
from hashlib import blake2b

from areal_lora.config.sections.adapter import StagedDifficulty
from areal_lora.data.prompts import PromptStream, locate
from areal_lora.processes.log import get_logger
from areal_lora.rollout.ledger.ledger import LedgerFile
from areal_lora.tasks.stored_samples import indices_by_value
from areal_lora.types import Sample, TrajectoryGroup


class Curriculum:
    """Order of one adapter's prompts. ``starts`` has the positions at which the stages after the first one start."""

    def __init__(self, chosen: StagedDifficulty, samples: Sequence[Sample], seed: int) -> None:
        """Raises ConfigError for what `indices_by_value` refuses."""
        self._seed, self._stages, self._rows = seed, chosen.stages, indices_by_value(samples, chosen)
        drawn = {value for _, weights in chosen.stages for value, weight in weights.items() if weight}
        self.sets: Sequence[Sequence[int]] = [self._rows[value] for value in sorted(drawn)]
        self.key = json.dumps([chosen.column, chosen.stages])
        self.starts = list[int]()

    def place(self, position: int) -> tuple[int, int]:
        """Epoch of the row among those of its value, and its index in the data set."""
        _, weights = self._stages[sum(start <= position for start in self.starts)]
        chance = random.Random(f"curriculum {self._seed} {position}")
        rows = self._rows[chance.choices(list(weights), list(weights.values()))[0]]
        epoch, index = locate(position, len(rows), self._seed)
        return epoch, rows[index]

    def issue(self, position: int, step: int) -> None:
        """``position``, the largest so far, is issued for ``step``."""
        for first, _ in self._stages[len(self.starts) + 1 :]:
            if step >= first:
                self.starts.append(position)


log = get_logger(__name__)

SOLVED = """CREATE TABLE IF NOT EXISTS solved (
    adapter TEXT NOT NULL, sample INTEGER NOT NULL, correct INTEGER NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (adapter, sample)) WITHOUT ROWID"""
Counts = dict[int, tuple[int, int]]
"""By the index of a sample in its data set: correct answers of its last group, and all of them."""


class SolvedShares:
    """Counts of one adapter. A group without a statement of what is correct leaves them as they are."""

    def __init__(self, file: LedgerFile, adapter: str, prompts: PromptStream, seed: int) -> None:
        self._file, self._adapter, self._prompts, self._seed = file, adapter, prompts, seed
        self._warned = False
        file.execute(SOLVED)
        rows = file.execute("SELECT sample, correct, n FROM solved WHERE adapter = ?", (adapter,))
        self.counts: Counts = {sample: (correct, n) for sample, correct, n in rows}

    def draws(self, position: int) -> bool:
        """Whether the prompt at this position of the stream is issued."""
        correct, n = self.counts.get(self._prompts.index(position), (0, 0))
        p = (correct + 1) / (n + 2)
        digest = blake2b(f"{self._seed}:{position}".encode(), digest_size=8, person=b"difficulty").digest()
        return int.from_bytes(digest, "little") < 4 * p * (1 - p) * 2**64

    def put(self, position: int, group: TrajectoryGroup) -> None:
        """Keep the counts of an answered group, until the next flush of the ledger in memory only."""
        stated = {t.sample: t.correct for t in group.trajectories if t.correct is not None and not t.given}
        if stated:
            self._write({self._prompts.index(position): (sum(stated.values()), len(stated))})
        elif not self._warned and not any(t.given for t in group.trajectories):
            self._warned = True
            log.warning(
                "%s: sampling.difficulty has no effect on prompts such as %s: no answer states whether it is correct "
                "(fix: let the reward or the workflow return `correct`)",
                self._adapter,
                group.uid,
            )

    def restore(self, counts: Counts) -> None:
        """Those of a snapshot, in place of all."""
        self._file.execute("DELETE FROM solved WHERE adapter = ?", (self._adapter,))
        self.counts.clear()
        self._write(counts)

    def _write(self, counts: Counts) -> None:
        self.counts |= counts
        for sample, (correct, n) in counts.items():
            row = (self._adapter, sample, correct, n)
            self._file.execute("INSERT OR REPLACE INTO solved VALUES (?, ?, ?, ?)", row)

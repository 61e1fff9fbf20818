"""Curriculum by difficulty: prompts that the adapter solves always or never are drawn less often.

The weight of a prompt is 4 p (1 - p), the variance of its correctness over the largest one; Foster et al., "Learning to
Reason at the Frontier of Learnability" (arXiv 2502.12272), sample by p (1 - p). With ``c`` correct of ``n`` answers in
the prompt's last group p = (c + 1) / (n + 2), Laplace's rule of succession: no weight is 0. A prompt without answers
has weight 1.

In each epoch a prompt is drawn with the probability of its weight, by a hash of seed and position: what was skipped
needs no record, and what was issued has its row. The counts are in the ledger file, and in its snapshots.
"""

from hashlib import blake2b

from areal_lora.data.prompts import PromptStream
from areal_lora.processes.log import get_logger
from areal_lora.rollout.ledger.ledger import LedgerFile
from areal_lora.types import TrajectoryGroup

log = get_logger(__name__)

TABLE = """CREATE TABLE IF NOT EXISTS solved (
    adapter TEXT NOT NULL, sample INTEGER NOT NULL, correct INTEGER NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (adapter, sample)) WITHOUT ROWID"""
Counts = dict[int, tuple[int, int]]
"""By the index of a sample in its data set: correct answers of its last group, and all of them."""


class SolvedShares:
    """Counts of one adapter. A group without a statement of what is correct leaves them as they are."""

    def __init__(self, file: LedgerFile, adapter: str, prompts: PromptStream, seed: int) -> None:
        self._file, self._adapter, self._prompts, self._seed = file, adapter, prompts, seed
        self._warned = False
        file.execute(TABLE)
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

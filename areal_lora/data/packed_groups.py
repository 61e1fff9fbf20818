"""A step's groups as they travel between trainer ranks: a row per trajectory, and the columns of all in one array."""

from collections.abc import Sequence

import msgspec
import numpy as np

from areal_lora.types import TrajectoryGroup


class TrajectoryRow(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory of group number ``group``, without its columns of ``n_tokens`` tokens and ``n_runs`` runs."""

    uid: str
    n_tokens: int
    n_runs: int
    group: int
    sample: int
    reward: float
    given: bool
    adapter: str
    baseline: float | None


class PackedGroups(msgspec.Struct, frozen=True, eq=False):
    """Trajectories with T tokens and R runs of versions in all (`types.TokenColumns`).

    ``columns`` are, one after the other, all token ids [T], log-probabilities [T] (the bits of float32) and runs
    [R, 2]. A message has their size alone: they follow it (`trainer.work.share`).
    """

    rows: list[TrajectoryRow]
    columns: np.ndarray  # [2 T + 2 R] int32

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup]) -> "PackedGroups":
        each = [(g, group, t) for g, group in enumerate(groups) for t in group.trajectories]
        rows = [
            TrajectoryRow(
                uid=t.uid,
                n_tokens=len(t.columns),
                n_runs=len(t.columns.runs),
                group=g,
                sample=t.sample,
                reward=t.reward,
                given=t.given,
                adapter=t.adapter.name,
                baseline=group.baseline,
            )
            for g, group, t in each
        ]
        columns = [t.columns for _, _, t in each]
        parts = [c.token_ids for c in columns] + [c.logprobs for c in columns] + [c.versions for c in columns]
        return cls(rows, np.frombuffer(bytearray().join(parts), "<i4"))

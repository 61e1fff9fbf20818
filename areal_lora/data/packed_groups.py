"""A step's groups as they travel between trainer ranks: a row per trajectory, and the columns of all in one array.

And checks of trajectories before that (contract C10). No torch: the rollout controller uses them.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from areal_lora.errors import AlignmentError
from areal_lora.types import Trajectory, TrajectoryGroup


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


def check_alignment(trajectory: Trajectory) -> None:
    """Check contract C10 for one trajectory: nothing predicts token 0. Raises AlignmentError."""
    if not len(trajectory.columns) or trajectory.columns.runs[0, 0] >= 0:
        raise AlignmentError(f"trajectory {trajectory.uid}: entry 0 must exist and be masked")


def check_rewards(rows: Sequence[tuple[int, Trajectory | TrajectoryRow]]) -> None:
    """Check that trajectories of one sample have one reward; ``rows`` are pairs (group number, trajectory).

    Raises AlignmentError.
    """
    rewards: dict[tuple[int, int], float] = {}
    for g, trajectory in rows:
        if rewards.setdefault((g, trajectory.sample), trajectory.reward) != trajectory.reward:
            raise AlignmentError(
                f"trajectory {trajectory.uid}: reward {trajectory.reward}, another one of its sample has "
                f"{rewards[g, trajectory.sample]}"
            )

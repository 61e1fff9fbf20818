"""Checks of trajectories before they are packed (contract C10). No torch: the rollout controller uses them."""

from collections.abc import Sequence

from areal_lora.data.packed_groups import TrajectoryRow
from areal_lora.errors import AlignmentError
from areal_lora.types import Trajectory


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

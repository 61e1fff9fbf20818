"""Checks of trajectories before they are packed (contract C10). No torch: the rollout controller uses them."""

from collections.abc import Sequence

from areal_lora.errors import AlignmentError
from areal_lora.types import Trajectory


def check_alignment(trajectory: Trajectory) -> None:
    """Check contract C10 for one trajectory. Raises AlignmentError."""
    lengths = {
        "token_ids": len(trajectory.token_ids),
        "loss_mask": len(trajectory.loss_mask),
        "rollout_logprobs": len(trajectory.rollout_logprobs),
        "versions": len(trajectory.versions),
    }
    if len(set(lengths.values())) != 1:
        raise AlignmentError(f"trajectory {trajectory.uid}: per-token arrays differ in length: {lengths}")
    if not lengths["token_ids"] or trajectory.loss_mask[0]:
        raise AlignmentError(f"trajectory {trajectory.uid}: entry 0 must exist and be masked")
    if any((v >= 0) != bool(m) for v, m in zip(trajectory.versions, trajectory.loss_mask, strict=True)):
        raise AlignmentError(f"trajectory {trajectory.uid}: versions and loss_mask disagree about the model's tokens")


def check_rewards(rows: Sequence[tuple[int, Trajectory]]) -> None:
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

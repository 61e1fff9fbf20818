from __future__ import annotations

from dataclasses import replace

from areal_lora.trainer.group_figures import GroupFigures, group_figures
from areal_lora.types import TrajectoryGroup
from tests.support.rollout.helpers import stream, trajectory


def group(*answers: tuple[float, bool | None], given: bool = False) -> TrajectoryGroup:
    prompt = stream().at(0)
    made = (replace(trajectory(prompt, 0, reward=reward), correct=right, given=given) for reward, right in answers)
    return TrajectoryGroup(uid=prompt.uid, trajectories=tuple(made))


def test_shares_count_sampled_groups_and_correctness_where_it_is_known() -> None:
    right, wrong = group((0.9, True), (1.0, True)), group((0.0, False), (0.0, False))
    mixed, unknown = group((1.0, True), (0.0, False)), group((0.5, None), (0.5, True))
    imitated = group((1.0, True), given=True)
    found = group_figures([right, wrong, mixed, unknown, imitated])
    assert found == GroupFigures(equal=2 / 4, all_right=1 / 3, all_wrong=1 / 3)
    assert group_figures([imitated]) == GroupFigures()
    assert group_figures([unknown]) == GroupFigures(equal=1.0)

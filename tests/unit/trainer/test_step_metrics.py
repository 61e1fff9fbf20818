"""The metrics of steps, against figures made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_lora.operations.protocol import Loss, OptimStep, Pass, PassResult, StepResult
from areal_lora.trainer.step_metrics import Window, measured, of_client, of_groups
from areal_lora.types import TrajectoryGroup
from tests.support.operations.client import datum
from tests.support.rollout.helpers import stream, trajectory

DATA = (datum([1, 2, 3], [0.0, 2.0]), datum([4, 5], [-1.0]))


def test_a_window_sums_its_passes_with_gradients() -> None:
    window = Window()
    for loss, backward in ((3.0, True), (9.0, False), (1.0, True)):
        request = Pass(data=DATA, loss=Loss.CROSS_ENTROPY, backward=backward)
        window.add(request, PassResult(logprobs=(), loss=loss))
    assert window == Window(tokens=10, sequences=4, targets=4, loss=4.0)


def test_what_is_measured_of_a_clients_step_is_in_its_metrics() -> None:
    stepped = StepResult(step=3, grad_norm=1.5, skipped=False)
    found = measured(of_client(Window(tokens=10, sequences=4, targets=8, loss=4.0), OptimStep(lr=0.01), stepped))
    assert (found["train/loss"], found["train/grad_norm"], found["train/lr"]) == (0.5, 1.5, 0.01)
    assert (found["train/n_tokens"], found["train/n_sequences"]) == (10, 4)


@pytest.mark.parametrize("targets", [0, 2])
def test_a_skipped_step_has_no_norm_and_a_window_without_targets_no_loss(targets: int) -> None:
    stepped = StepResult(step=3, grad_norm=0.0, skipped=True)
    found = measured(of_client(Window(targets=targets, loss=4.0), OptimStep(lr=0.01), stepped))
    assert "train/grad_norm" not in found
    assert found.get("train/loss") == (2.0 if targets else None)


def group(*answers: tuple[float, bool | None], given: bool = False) -> TrajectoryGroup:
    prompt = stream().at(0)
    made = (replace(trajectory(prompt, 0, reward=reward), correct=right, given=given) for reward, right in answers)
    return TrajectoryGroup(uid=prompt.uid, trajectories=tuple(made))


def test_shares_count_sampled_groups_and_correctness_where_it_is_known() -> None:
    right, wrong = group((0.9, True), (1.0, True)), group((0.0, False), (0.0, False))
    mixed, unknown = group((1.0, True), (0.0, False)), group((0.5, None), (0.5, True))
    imitated = group((1.0, True), given=True)
    found = of_groups([right, wrong, mixed, unknown, imitated])
    assert found == {"train/groups_equal": 2 / 4, "train/groups_all_right": 1 / 3, "train/groups_all_wrong": 1 / 3}
    assert measured(of_groups([imitated])) == {}
    assert measured(of_groups([unknown])) == {"train/groups_equal": 1.0}

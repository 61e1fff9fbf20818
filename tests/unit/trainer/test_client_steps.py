"""Sums of a window and the record of its step."""

from __future__ import annotations

import pytest

from areal_lora.obs.trace import Spans
from areal_lora.operations.messages import Loss, OptimStep, Pass, Scored, Stepped
from areal_lora.trainer.client_steps import Window, step_record
from areal_lora.types import AdapterRef
from tests.support.clocks import Clock
from tests.support.operations.client import datum

DATA = (datum([1, 2, 3], [0.0, 2.0]), datum([4, 5], [-1.0]))
BEFORE = AdapterRef(name="a.1", version=7)


def test_a_window_sums_its_passes_with_gradients() -> None:
    window = Window()
    for loss, backward in ((3.0, True), (9.0, False), (1.0, True)):
        asked = Pass(data=DATA, loss=Loss.CROSS_ENTROPY, backward=backward)
        window.add(asked, Scored(logprobs=(), loss=loss))
    assert window == Window(tokens=10, sequences=4, targets=4, loss=4.0)


def test_the_record_says_what_is_known() -> None:
    clock = Clock()
    spans = Spans(lambda: clock.now)
    spans.add("train", 0.5)
    spans.add("publish_pack", 0.25)
    clock.now += 4.0
    stepped = Stepped(step=3, grad_norm=1.5, skipped=False)
    window = Window(tokens=10, sequences=4, targets=8, loss=4.0)
    found = step_record(BEFORE, window, OptimStep(lr=0.01), stepped, spans, 60.0)
    assert (found.adapter, found.version, found.step, found.time_s) == ("a.1", 7, 2, 60.0)
    assert (found.loss, found.grad_norm, found.lr, found.trained_tokens) == (0.5, 1.5, 0.01, 8)
    assert (found.step_s, found.train_s, found.publish_pack_s) == (4.0, 0.5, 0.25)
    assert (found.reward_mean, found.kl, found.mean_lag, found.trainer_idle) == (None,) * 4


@pytest.mark.parametrize("targets", [0, 2])
def test_a_skipped_step_does_not_count_and_a_window_without_targets_has_no_loss(targets: int) -> None:
    stepped = Stepped(step=3, grad_norm=0.0, skipped=True)
    found = step_record(BEFORE, Window(targets=targets, loss=4.0), OptimStep(lr=0.01), stepped, Spans(), 1.0)
    assert (found.step, found.taken, found.grad_norm) == (3, False, None)
    assert found.loss == (2.0 if targets else None)

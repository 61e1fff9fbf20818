"""How long staging may take: half of the shortest step, at most a second, less what follows staging."""

from __future__ import annotations

import pytest

from areal_lora.weight_sync.trainer.spare_time import KEPT, SpareTime, Timing


def after(*timings: tuple[float, float]) -> float:
    spare = SpareTime()
    for free_s, after_s in timings:
        spare.add(Timing(free_s=free_s, after_s=after_s))
    return spare.pace_s()


def test_nothing_is_known_before_the_first_step() -> None:
    assert after() == 0.0


def test_a_publish_takes_half_a_step_or_a_second_as_a_whole() -> None:
    assert after((1.2, 0.1)) == pytest.approx(0.5)
    assert after((60.0, 0.1)) == pytest.approx(0.9)


def test_the_shortest_step_and_the_median_end_count() -> None:
    assert after((2.0, 0.1), (0.8, 0.05), (2.0, 4.3)) == pytest.approx(0.3), "the first publish may take seconds"


def test_a_publish_that_was_waited_for_at_once_leaves_no_time() -> None:
    assert after((0.0, 0.01)) == 0.0
    assert after((-0.3, 0.01)) == 0.0, "the trainer waited before the gate opened"
    assert after((0.4, 0.5)) == 0.0, "what follows takes longer than half a step"


def test_old_steps_are_forgotten() -> None:
    assert after((0.0, 0.01), *[(2.0, 0.1)] * KEPT) == pytest.approx(0.9)

"""Planted troubles: each has its warning within five steps, with the key that helps; a healthy run has none."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from areal_lora.obs.metrics.records import CheckpointRecord, StepRecord
from areal_lora.obs.run_view import RunView
from areal_lora.obs.warnings import NEEDED
from tests.support.obs.troubles import BEFORE, RECORDS, STEPS, healthy, run_of


def warnings_of(records: Iterator[StepRecord]) -> dict[int, list[str]]:
    view = RunView({"toy": 100})
    return {record.step: found for record in records if (found := view.add(record))}


@pytest.mark.parametrize("name", STEPS)
def test_a_trouble_is_named_within_five_steps_and_not_before(name: str) -> None:
    trouble, words = STEPS[name]
    found = warnings_of(run_of(random.Random(7), trouble))
    assert found
    assert min(found) >= BEFORE
    assert any(words in text for texts in found.values() for text in texts), found


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_a_trouble_is_named(name: str) -> None:
    record, words = RECORDS[name]
    view = RunView({"toy": 100})
    assert [text for text in view.add(record) if words in text]
    if not isinstance(record, CheckpointRecord):
        assert not [text for text in view.add(record) if words in text], "a publish and its members lose one server"


def test_healthy_runs_have_no_warning() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    for i in range(50):
        assert warnings_of(run_of(random.Random(seed + i), steps=60)) == {}


def test_without_a_gradient_rewards_are_not_blamed_for_dropped_tokens() -> None:
    found = warnings_of(run_of(random.Random(7), STEPS["tokens outside of the bounds of w"][0]))
    assert not [text for texts in found.values() for text in texts if "no gradient" in text]


def test_one_bad_step_is_not_a_trouble() -> None:
    rng = random.Random(7)
    records = [healthy(rng, step, **({"truncated": 0.9} if step % NEEDED else {})) for step in range(30)]
    assert warnings_of(iter(records)) == {}


@pytest.mark.parametrize("name", sorted(STEPS.keys() - {"a reward that raises"}))
def test_a_warning_that_lasts_and_returns_is_shown_once(name: str) -> None:
    trouble, words = STEPS[name]
    rng = random.Random(7)
    records = [*run_of(rng, trouble, steps=BEFORE + 12)]
    records += [healthy(rng, len(records) + i, **(trouble(12 + i) if i > 5 else {})) for i in range(12)]
    found = [text for texts in warnings_of(iter(records)).values() for text in texts]
    assert sum(words in text for text in found) == 1, found


def test_before_three_steps_nothing_is_known() -> None:
    assert warnings_of(run_of(random.Random(7), steps=2)) == {}

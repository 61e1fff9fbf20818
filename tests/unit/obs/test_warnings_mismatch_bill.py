"""The table of the mismatch's causes, from records of steps."""

from __future__ import annotations

import pytest

from areal_lora.obs.warnings import CAUSES, GAP, KL, RECENT, bill, bill_lines
from tests.support.obs.records import step_record


def of(step: int, **parts: float) -> dict[str, float]:
    return {
        prefix + cause: factor * part for cause, part in parts.items() for prefix, factor in ((GAP, 1.0), (KL, 0.1))
    }


def test_the_bill_is_the_mean_of_what_the_newest_steps_have_measured() -> None:
    old = [step_record(step=i, version=i, time_s=0.0, metrics=of(i, staleness=9.0, numerics=0.5)) for i in range(9)]
    new = [
        step_record(step=i, version=i, time_s=0.0, metrics=of(i, record=0.0, staleness=0.2 + 0.2 * (i % 2)))
        for i in range(RECENT)
    ]
    found = bill([*old, step_record(step=0, version=0, time_s=0.0), *new])
    assert list(found) == ["record", "staleness", "numerics"], "in the order of the chain"
    gap, kl = found["staleness"]
    assert abs(gap - 0.3) < 1e-12
    assert abs(kl - 0.03) < 1e-12
    assert bill([]) == {}


def test_the_numerics_of_a_bill_are_without_the_adapter_where_it_is_measured() -> None:
    parts = [of(0, numerics=0.5), of(1, numerics=0.1, adapter=0.4, flips=0.2), of(2, numerics=0.6)]
    found = bill([step_record(step=i, version=i, time_s=0.0, metrics=part) for i, part in enumerate(parts)])
    assert {cause: gap for cause, (gap, _) in found.items()} == {"flips": 0.2, "adapter": 0.4, "numerics": 0.1}
    assert list(found) == ["flips", "adapter", "numerics"]


def test_the_numerics_of_a_bill_are_without_the_weights_where_they_are_measured() -> None:
    parts = [of(0, numerics=0.5), of(1, numerics=0.3, adapter=0.4), of(2, numerics=0.1, adapter=0.2, weights=0.2)]
    found = bill([step_record(step=i, version=i, time_s=0.0, metrics=part) for i, part in enumerate(parts)])
    assert {cause: gap for cause, (gap, _) in found.items()} == pytest.approx(
        {"adapter": 0.3, "weights": 0.2, "numerics": 0.1}
    )


def test_each_part_is_shown_with_its_share_and_the_key_that_removes_it() -> None:
    first, *rest = bill_lines("math", {"record": (0.0, 0.0), "staleness": (0.3, 0.02), "numerics": (0.1, 0.03)})
    assert first == "mismatch of math: 0.4 nats a token, KL 0.05"
    assert [line.split()[:5] for line in rest] == [
        ["record", "0.00e+00", "0.00e+00", "0%", "0%"],
        ["staleness", "3.00e-01", "2.00e-02", "75%", "40%"],
        ["numerics", "1.00e-01", "3.00e-02", "25%", "60%"],
    ]
    assert all(CAUSES[line.split()[0]].fix in line for line in rest)
    assert "0%" in bill_lines("math", {"record": (0.0, 0.0)})[1], "no mismatch at all"

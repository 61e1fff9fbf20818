"""The budget's arithmetic; the property it exists for is in test_exactly_once."""

from __future__ import annotations

import pytest

from areal_lora.rollout.controller.pacing import STALE, StalenessBudget
from areal_lora.rollout.ledger.reconcile import ROLLED_BACK


@pytest.mark.parametrize(
    ("eta", "newest", "next_version", "live", "expected"),
    [
        (0, 0, 0, 0, 4),
        (0, 0, 1, 0, 0),  # synchronous: nothing while step 0 trains
        (0, 1, 1, 3, 1),
        (2, 0, 0, 0, 12),
        (2, 0, 1, 4, 4),
        (2, 0, 1, 12, 0),
        (8, 95, 95, 0, 20),  # only five steps are left
        (2, 100, 100, 0, 0),
    ],
)
def test_capacity(eta: int, newest: int, next_version: int, live: int, expected: int) -> None:
    budget = StalenessBudget(max_staleness=eta, prompts_per_step=4, last_version=99)
    assert budget.capacity(newest=newest, next_version=next_version, live=live) == expected


def test_freshness() -> None:
    budget = StalenessBudget(max_staleness=2, prompts_per_step=4, last_version=99)
    judged = [budget.refusal(oldest, newest, 5) for oldest, newest in ((2, 3), (3, 4), (5, 5), (4, 6), (6, 6))]
    assert judged == [STALE, "", "", ROLLED_BACK, ROLLED_BACK]

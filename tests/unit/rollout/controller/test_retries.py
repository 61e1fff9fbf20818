from __future__ import annotations

import pytest

from areal_lora.errors import RolloutError
from areal_lora.rollout.client import FaultKind, GenerationFault
from areal_lora.rollout.controller.retries import (
    MAX_BACK_OFF_S,
    MAX_TRIES,
    MIN_LOST_IN_A_ROW,
    UNSERVED_S,
    UNSERVED_WAIT_S,
    FailureStreak,
    RequestFailure,
    Retry,
    back_off_s,
    decide,
    generation_failure,
    scoring_failure,
)
from areal_lora.types import Outcome
from tests.support.rollout.helpers import stream, trajectory

K = FaultKind


@pytest.mark.parametrize(
    ("kinds", "retryable", "served", "resample"),
    [
        ((K.CONNECTION,), True, False, False),
        ((K.RETIRED, K.SERVER_ERROR, K.ABORTED), True, True, False),
        ((K.TIMEOUT, K.PROTOCOL, K.SCORER, K.ENVIRONMENT, K.AGENT, K.WORKFLOW), True, True, True),
        ((K.REJECTED,), False, True, True),
    ],
)
def test_every_fault_has_its_policy(
    kinds: tuple[FaultKind, ...], retryable: bool, served: bool, resample: bool
) -> None:
    for kind in kinds:
        expected = RequestFailure(kind, "why", retryable=retryable, served=served, resample=resample)
        assert generation_failure(GenerationFault(kind, "why")) == expected


def test_an_answer_that_could_not_be_scored_is_sampled_again() -> None:
    prompt = stream().at(0)
    failed = trajectory(prompt, 0)
    object.__setattr__(failed, "outcome", Outcome.TIMEOUT)
    assert scoring_failure(failed) == RequestFailure("scorer", "timeout: ", resample=True)


@pytest.mark.parametrize(
    ("failure", "failed", "unserved_s", "expected"),
    [
        (RequestFailure("server_error", ""), 0, 0.0, Retry(failed=1, wait_s=0.1)),
        (RequestFailure("server_error", ""), 1, 0.0, Retry(failed=2, wait_s=0.2)),
        (RequestFailure("server_error", ""), MAX_TRIES - 1, 0.0, Retry(failed=MAX_TRIES, wait_s=None)),
        (RequestFailure("rejected", "", retryable=False), 0, 0.0, Retry(failed=1, wait_s=None)),
        (RequestFailure("connection", "", served=False), 3, 0.0, Retry(failed=3, wait_s=UNSERVED_WAIT_S)),
        (RequestFailure("connection", "", served=False), 3, UNSERVED_S, Retry(failed=3, wait_s=UNSERVED_WAIT_S)),
        (RequestFailure("connection", "", served=False), 3, UNSERVED_S + 1, Retry(failed=4, wait_s=0.8)),
        (RequestFailure("connection", "", served=False), 7, UNSERVED_S + 1, Retry(failed=8, wait_s=None)),
    ],
)
def test_what_is_retried_and_when(failure: RequestFailure, failed: int, unserved_s: float, expected: Retry) -> None:
    assert decide(failure, failed=failed, unserved_s=unserved_s) == expected


def test_back_off_doubles_up_to_a_bound() -> None:
    assert [back_off_s(failed) for failed in (1, 2, 3, 6)] == [0.1, 0.2, 0.4, 3.2]
    assert back_off_s(7) == back_off_s(100) == MAX_BACK_OFF_S


def test_an_outage_ends_with_an_answer_or_an_error_of_a_server() -> None:
    streak, gone = FailureStreak(), RequestFailure("connection", "refused", served=False)
    assert [streak.failed(gone, now) for now in (5.0, 7.0)] == [0.0, 2.0]
    assert streak.failed(RequestFailure("server_error", "HTTP 503"), 8.0) == 0.0
    assert [streak.failed(gone, now) for now in (9.0, 10.0)] == [0.0, 1.0]
    streak.answered()
    assert streak.failed(gone, 20.0) == 0.0
    assert streak.last == "connection: refused"


@pytest.mark.parametrize(("prompts_per_step", "most"), [(4, MIN_LOST_IN_A_ROW), (100, 200)])
def test_groups_lost_in_a_row_end_the_run(prompts_per_step: int, most: int) -> None:
    streak = FailureStreak()
    for _ in range(most - 1):
        streak.lost("math", prompts_per_step)
    streak.answered()
    for _ in range(most - 1):
        streak.lost("math", prompts_per_step)
    with pytest.raises(RolloutError, match=f"math: {most} groups in a row"):
        streak.lost("math", prompts_per_step)

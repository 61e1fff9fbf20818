from __future__ import annotations

import re

import pytest

from areal_lora.errors import RolloutError, UserCodeError
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.groups import (
    CODE_TRIES,
    MAX_BACK_OFF_S,
    MAX_TRIES,
    MIN_LOST_IN_A_ROW,
    UNSERVED_S,
    UNSERVED_WAIT_S,
    FailureStreak,
    back_off_s,
    decide,
)
from areal_lora.types import Cause

K = FaultKind
FAULT = GenerationFault(K.SERVER_ERROR, "HTTP 500")


@pytest.mark.parametrize(
    ("kinds", "retryable", "served", "resample"),
    [
        ((K.CONNECTION, K.RETIRED, K.TEACHER), True, False, False),
        ((K.SERVER_ERROR, K.ABORTED, K.LEASE), True, True, False),
        ((K.PROTOCOL, K.TIMEOUT, K.SCORER, K.ENVIRONMENT, K.AGENT, K.WORKFLOW), True, True, True),
        ((K.REJECTED,), False, True, True),
    ],
)
def test_every_fault_has_its_policy(
    kinds: tuple[FaultKind, ...], retryable: bool, served: bool, resample: bool
) -> None:
    for kind in kinds:
        fault = GenerationFault(kind, "why")
        assert (fault.retryable, not fault.unserved, fault.resample) == (retryable, served, resample)


@pytest.mark.parametrize(
    ("failure", "failed", "unserved_s", "expected"),
    [
        (GenerationFault(K.SERVER_ERROR, ""), 0, 0.0, (1, 0.1)),
        (GenerationFault(K.SERVER_ERROR, ""), 1, 0.0, (2, 0.2)),
        (GenerationFault(K.SERVER_ERROR, ""), MAX_TRIES - 1, 0.0, (MAX_TRIES, None)),
        (GenerationFault(K.REJECTED, ""), 0, 0.0, (1, None)),
        (GenerationFault(K.CONNECTION, ""), 3, 0.0, (3, UNSERVED_WAIT_S)),
        (GenerationFault(K.CONNECTION, ""), 7, 3.0, (7, 1.5)),
        (GenerationFault(K.RETIRED, ""), 7, 7200.0, (7, MAX_BACK_OFF_S)),
        (GenerationFault(K.TEACHER, ""), 7, 7200.0, (7, MAX_BACK_OFF_S)),
        (GenerationFault(K.SCORER, "", cause=Cause.CODE), 0, 0.0, (1, 0.1)),
        (GenerationFault(K.SCORER, "", cause=Cause.CODE), CODE_TRIES - 2, 0.0, (CODE_TRIES - 1, 0.1)),
        (GenerationFault(K.SCORER, "", cause=Cause.CODE), CODE_TRIES - 1, 0.0, (CODE_TRIES, None)),
        (GenerationFault(K.AGENT, "", cause=Cause.UNREACHABLE), 5, 0.0, (5, UNSERVED_WAIT_S)),
        (GenerationFault(K.AGENT, "", cause=Cause.UNREACHABLE), 5, 25.0, (5, MAX_BACK_OFF_S)),
        (GenerationFault(K.AGENT, "", cause=Cause.UNREACHABLE), 0, UNSERVED_S + 1, (1, 0.1)),
    ],
)
def test_what_is_retried_and_when(
    failure: GenerationFault, failed: int, unserved_s: float, expected: tuple[int, float | None]
) -> None:
    assert decide(failure, failed=failed, unserved_s=unserved_s) == expected


def test_back_off_doubles_up_to_a_bound() -> None:
    assert [back_off_s(failed) for failed in (1, 2, 3, 6)] == [0.1, 0.2, 0.4, 3.2]
    assert back_off_s(7) == back_off_s(100) == MAX_BACK_OFF_S


def test_an_outage_ends_with_an_answer_or_an_error_of_a_server() -> None:
    streak, gone = FailureStreak(), GenerationFault(K.CONNECTION, "refused")
    assert [streak.failed(gone, now) for now in (5.0, 7.0)] == [0.0, 2.0]
    assert streak.failed(GenerationFault(K.SERVER_ERROR, "HTTP 503"), 8.0) == 0.0
    assert [streak.failed(gone, now) for now in (9.0, 10.0)] == [0.0, 1.0]
    streak.answered()
    assert streak.failed(gone, 20.0) == 0.0
    assert streak.details == {"connection": "refused", "server_error": "HTTP 503"}


@pytest.mark.parametrize(("prompts_per_step", "most"), [(4, MIN_LOST_IN_A_ROW), (100, 200)])
def test_groups_lost_in_a_row_end_the_run(prompts_per_step: int, most: int) -> None:
    streak = FailureStreak()
    for _ in range(most - 1):
        streak.lost(FAULT, "math", prompts_per_step)
    streak.answered()
    for _ in range(most - 1):
        streak.lost(FAULT, "math", prompts_per_step)
    with pytest.raises(RolloutError, match=f"math: {most} groups in a row"):
        streak.lost(FAULT, "math", prompts_per_step)


@pytest.mark.parametrize(
    ("kind", "cause", "error", "fix"),
    [
        (K.SCORER, Cause.CODE, UserCodeError, "correct the code"),
        (K.AGENT, Cause.UNREACHABLE, RolloutError, "start what the code connects to"),
        (K.SCORER, Cause.OTHER, RolloutError, "controller's log"),
        (K.SERVER_ERROR, Cause.OTHER, RolloutError, "rollout servers' logs"),
    ],
)
def test_the_end_names_what_to_correct(kind: FaultKind, cause: Cause, error: type[RolloutError], fix: str) -> None:
    streak, fault = FailureStreak(), GenerationFault(kind, "KeyError: 'b' (mine.py:9)", cause)
    for _ in range(MIN_LOST_IN_A_ROW - 1):
        streak.lost(fault, "math", 4)
    with pytest.raises(RolloutError, match=re.escape("last: " + kind + ": KeyError: 'b' (mine.py:9)")) as raised:
        streak.lost(fault, "math", 4)
    assert type(raised.value) is error
    assert fix in str(raised.value)

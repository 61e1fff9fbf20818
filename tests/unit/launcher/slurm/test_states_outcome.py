"""What becomes of the job, as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import ProcessExit
from areal_lora.launcher.slurm.states import REPLACED, outcome


def failed(code: int = -9, lost: bool = False, never_started: bool = False) -> ProcessExit:
    spec = ProcessSpec(role="trainer", index=1, argv=("x",), env={})
    return ProcessExit(spec=spec, code=code, log=Path("log"), node="n2", lost=lost, never_started=never_started)


def test_done() -> None:
    assert outcome(None, "", "").code == 0


@pytest.mark.parametrize("word", ["USR1", "TERM"])
def test_a_signal_of_a_running_job_requeues_it(word: str) -> None:
    assert outcome(None, word, "RUNNING").requeue == f"{word} arrived"


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING", "CANCELLED", ""])
@pytest.mark.parametrize("failure", [None, failed(), failed(65)], ids=["none", "killed", "65"])
def test_a_job_that_slurm_ends_or_requeues_is_not_requeued_once_more(failure: ProcessExit | None, state: str) -> None:
    found = outcome(failure, "TERM", state)
    assert (found.code, found.requeue) == (143, "")
    assert f"The job is {state or 'unknown to Slurm'} and is not requeued by itself" in found.text


@pytest.mark.parametrize("code", [64, 65, 69, 74])
def test_a_code_that_would_come_again_is_kept(code: int) -> None:
    found = outcome(failed(code), "", "RUNNING")
    assert (found.code, found.requeue) == (code, "")


@pytest.mark.parametrize("failure", [failed(), failed(1), failed(75), failed(64, never_started=True)])
def test_no_restarts_left_ends_the_job_with_70(failure: ProcessExit) -> None:
    found = outcome(failure, "", "RUNNING")
    assert (found.code, found.requeue) == (70, "")
    assert found.text.startswith("trainer-1 ")


def test_a_lost_node_that_is_needed_requeues_the_job() -> None:
    assert outcome(failed(1, lost=True), "", "RUNNING").requeue.startswith("trainer-1 was lost with node n2")


def test_a_job_that_was_replaced_ends_without_a_requeue() -> None:
    assert outcome(None, REPLACED, "RUNNING").requeue == ""

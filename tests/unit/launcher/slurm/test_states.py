"""Each of Slurm's states: its phase, what it means, and a next step where there is one."""

from __future__ import annotations

import pytest

from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.slurm.states import CODES, PHASES, REASONS, STATES, JobRecord, Phase, explain
from tests.support.paths import ROOT


def job(state: str, reason: str = "", code: int = 0, **more: object) -> JobRecord:
    return JobRecord(id="42", state=state, reason=reason, code=code, **more)


CASES = [
    (job("COMPLETED"), Phase.OVER, "ended well", ""),
    (job("FAILED", code=64), Phase.OVER, "refused the configuration", "correct the key"),
    (job("FAILED", code=65), Phase.OVER, "violated a contract", "areal-lora doctor --run RUN"),
    (job("FAILED", code=69), Phase.OVER, "missing on a node", "areal-lora doctor --run RUN"),
    (job("FAILED", code=70), Phase.OVER, "budget", "areal-lora resume RUN"),
    (job("FAILED", code=74), Phase.OVER, "could not be written or read", "make room"),
    (job("FAILED", code=75), Phase.OVER, "for a moment", "areal-lora resume RUN"),
    (job("FAILED", code=127), Phase.OVER, "did not find a program", "cluster.slurm.setup"),
    (job("FAILED", code=9), Phase.OVER, "exit code 9", "areal-lora logs RUN"),
    (job("FAILED", number=11), Phase.OVER, "signal 11", "areal-lora logs RUN"),
    (job("CANCELLED"), Phase.OVER, "was cancelled", "areal-lora resume RUN"),
    (job("CANCELLED", by="1000"), Phase.OVER, "by the user with id 1000", "areal-lora resume RUN"),
    (job("TIMEOUT"), Phase.OVER, "time limit", "cluster.slurm.time_limit"),
    (job("NODE_FAIL"), Phase.OVER, "node of the job failed", "--exclude (cluster.slurm.extra)"),
    (job("PREEMPTED"), Phase.OVER, "higher priority took the nodes", "PreemptMode=REQUEUE"),
    (job("OUT_OF_MEMORY"), Phase.OVER, "exceeded the memory", "cluster.slurm.mem"),
    (job("BOOT_FAIL"), Phase.OVER, "the state BOOT_FAIL", "areal-lora resume RUN"),
    (job("DEADLINE"), Phase.OVER, "the state DEADLINE", "areal-lora resume RUN"),
    (job("REVOKED"), Phase.OVER, "another cluster", "squeue --federation"),
    (job("SUSPENDED"), Phase.RUNNING, "is suspended", "wait"),
    (job("STOPPED"), Phase.RUNNING, "SIGSTOP", "scontrol resume 42"),
    (job("RUNNING"), Phase.RUNNING, "the job runs", ""),
    (job("CONFIGURING"), Phase.RUNNING, "the state CONFIGURING", ""),
    (job("COMPLETING"), Phase.ENDING, "are awaited", ""),
    (job("REQUEUED"), Phase.WAITING, "resumes by itself", ""),
    (job("REQUEUE_HOLD"), Phase.WAITING, "on hold", "scontrol release 42"),
    (job("SPECIAL_EXIT"), Phase.WAITING, "on hold", "scontrol release 42"),
    (job("PENDING"), Phase.WAITING, "has not looked at it yet", ""),
    (job("PENDING", "None"), Phase.WAITING, "has not looked at it yet", ""),
    (job("PENDING", "Resources"), Phase.WAITING, "the job waits: Resources", ""),
    (job("PENDING", "Priority", start="2026-01-01T10:00:00"), Phase.WAITING, "start at 2026-01-01T10:00:00", ""),
    (job("PENDING", "QOSMaxJobsPerUserLimit"), Phase.WAITING, "limit of its QOS", "--qos (cluster.slurm.extra)"),
    (job("PENDING", "AssocGrpGRES"), Phase.WAITING, "limit of its account", "wait"),
    (job("PENDING", "BeginTime", restarts=1), Phase.WAITING, "resumes by itself (start 2)", ""),
    (job("PENDING", "Dependency"), Phase.WAITING, "the job waits: Dependency", ""),
    (job("PENDING", "DependencyNeverSatisfied"), Phase.WAITING, "never starts it", "another --dependency"),
    (
        job("PENDING", "ReqNodeNotAvail,_UnavailableNodes:n4"),
        Phase.WAITING,
        "down, drained or reserved",
        "scontrol show node",
    ),
    (job("PENDING", "launch_failed_requeued_held"), Phase.WAITING, "start failed", "scontrol release 42"),
    (job("PENDING", "JobHeldUser"), Phase.WAITING, "on hold by its user", "scontrol release 42"),
    (job("PENDING", "JobHeldAdmin"), Phase.WAITING, "an admin holds it", "contact"),
    (job("PENDING", "PartitionTimeLimit"), Phase.WAITING, "its partition", "time_limit"),
    (job("PENDING", "SomethingNew"), Phase.WAITING, "the job waits: SomethingNew", ""),
    (job("NEW_STATE"), Phase.UNKNOWN, "NEW_STATE, which is not known here", "scontrol show job 42"),
    (
        JobRecord(id="42", why="scontrol is not on this machine"),
        Phase.UNKNOWN,
        "not on this machine",
        "logs/job-42.log",
    ),
]


@pytest.mark.parametrize(
    ("record", "phase", "what", "do"),
    CASES,
    ids=lambda v: f"{v.state}{v.reason}{v.code}" if isinstance(v, JobRecord) else "",
)
def test_a_state_is_explained(record: JobRecord, phase: Phase, what: str, do: str) -> None:
    text = explain(record)
    assert text.phase is phase
    assert what in text.what
    assert do in text.do
    assert bool(do) == bool(text.do)
    assert "JOB" not in str(text)


def test_every_state_and_final_exit_code_has_an_entry() -> None:
    seen = {record.state for record, *_ in CASES}
    assert len(seen) >= 14
    assert set(CODES) >= {*NON_RETRYABLE, ExitCode.COMPONENT_FAILED, ExitCode.TEMPORARY}
    ended = ("COMPLETED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
    assert all(PHASES[state] is Phase.OVER for state in ended)
    assert STATES.keys() < PHASES.keys()


def test_a_longer_reason_is_not_taken_for_its_beginning() -> None:
    prefixes = [*REASONS]
    for i, prefix in enumerate(prefixes):
        assert not any(prefix.startswith(earlier) for earlier in prefixes[:i] if earlier), prefix


def test_the_page_on_clusters_has_a_row_for_every_state_and_reason() -> None:
    page = (ROOT / "docs" / "en" / "cluster.md").read_text(encoding="utf-8")
    assert [name for name in (*STATES, *REASONS) if f"`{name}" not in page] == []
    assert [code for code in CODES if f"`FAILED` {code}" not in page] == []

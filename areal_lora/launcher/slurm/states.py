"""The phase of a Slurm job and what to do; how the processes of a step ended; what follows for the job.

``explain`` takes what ``job_query.look`` gets from Slurm. The tables add to Slurm's words what follows for a run.
"""

import contextlib
import os
import select
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import ProcessExit
from areal_lora.run_folder.paths import RunFolder


class Phase(StrEnum):
    """Where a job is in its lifetime. A ``WAITING`` or ``ENDING`` job may run (again) without a further command."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """One job as Slurm shows it. ``state`` and ``reason`` are Slurm's words; times are Slurm's text.

    ``code`` and ``number`` are exit code and signal of the batch script, ``by`` the user id that cancelled the job.
    ``why`` states why nothing is known (``state`` is empty); ``forgotten``: Slurm does not know the job: it is over.
    """

    id: str
    state: str = ""
    reason: str = ""
    code: int = 0
    number: int = 0
    restarts: int = 0
    nodes: str = ""
    start: str = ""
    end: str = ""
    by: str = ""
    why: str = ""
    forgotten: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``what`` has happened, ``do``: the next step; empty where nothing is to be done."""

    phase: Phase
    what: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.what} (fix: {self.do})" if self.do else self.what


RESUME = "areal-lora resume RUN"
LOGS = "areal-lora logs RUN"

PHASES: dict[str, Phase] = {
    state: phase
    for phase, states in {
        Phase.OVER: "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL PREEMPTED OUT_OF_MEMORY BOOT_FAIL DEADLINE REVOKED",
        Phase.ENDING: "COMPLETING STAGE_OUT",
        Phase.RUNNING: "RUNNING CONFIGURING RESIZING SIGNALING STOPPED SUSPENDED",
        Phase.WAITING: "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT",
    }.items()
    for state in states.split()
}
"""By Slurm's state; any other is ``UNKNOWN``."""

STATES: dict[str, tuple[str, str]] = {
    "COMPLETED": ("the job ended well", ""),
    "CANCELLED": ("the job was cancelled", RESUME),
    "TIMEOUT": ("the time limit ended the job before its requeue", f"{RESUME}; a longer cluster.slurm.time_limit"),
    "NODE_FAIL": ("a node of the job failed", f"{RESUME}; --exclude (cluster.slurm.extra) keeps off a bad node"),
    "PREEMPTED": (
        "a job of higher priority took the nodes, and Slurm did not requeue this one (PreemptMode=CANCEL)",
        f"{RESUME}; a QOS or partition with PreemptMode=REQUEUE resumes by itself",
    ),
    "OUT_OF_MEMORY": (
        "a process exceeded the memory of the job on its node",
        f"raise cluster.slurm.mem, or lower rollout.kv_cache_gib or max_tokens_per_microbatch; then {RESUME}",
    ),
    "REVOKED": ("another cluster of the federation runs the job", "squeue --federation shows where"),
    "RUNNING": ("the job runs", ""),
    "COMPLETING": ("the job ends: its last processes and epilogs are awaited", ""),
    "STOPPED": ("the processes of the job are stopped (SIGSTOP) and keep their nodes", "scontrol resume JOB"),
    "SUSPENDED": ("the job is suspended and keeps its nodes; nothing of it runs", "wait, or contact the admins"),
    "REQUEUED": ("the job is being requeued; it resumes by itself", ""),
    "REQUEUE_HOLD": ("the job was requeued on hold", "scontrol release JOB"),
    "SPECIAL_EXIT": ("the job was requeued on hold with a special exit code", "scontrol release JOB"),
}
"""What has happened, and what to do; other states are shown in Slurm's word."""

CODES: dict[int, tuple[str, str]] = {
    ExitCode.FAILED: ("an unexpected error ended the run", f"{LOGS}; {RESUME}"),
    ExitCode.WRONG_INPUT: ("a process refused the configuration", f"correct the key that {LOGS} names"),
    ExitCode.CONTRADICTION: ("the run's data violated a contract", f"{LOGS}; areal-lora doctor --run RUN"),
    ExitCode.MISSING: ("a program, package, device or file was missing on a node", "areal-lora doctor --run RUN"),
    ExitCode.COMPONENT_FAILED: (
        "a process failed more often than its budget of restarts allows, or the budget of requeues is spent",
        f"{LOGS}; {RESUME} starts with a full budget",
    ),
    ExitCode.DISK: (
        "a checkpoint or record could not be written or read",
        f"make room on the disk of the run folder, or restore the file that the log names; then {RESUME}",
    ),
    ExitCode.TEMPORARY: ("another process or the network failed for a moment", RESUME),
    127: ("the batch script did not find a program", "check cluster.slurm.setup and the roles' python on the nodes"),
    137: ("the batch script was killed, often for want of memory", f"raise cluster.slurm.mem; {RESUME}"),
}
"""What the exit code of a FAILED job means."""

REASONS: dict[str, tuple[str, str]] = {
    "DependencyNeverSatisfied": (
        "the job it depends on ended in a way that never starts it",
        "areal-lora stop RUN, then areal-lora resume RUN with another --dependency (cluster.slurm.extra)",
    ),
    "ReqNodeNotAvail": ("a required node is down, drained or reserved", "scontrol show node names the reason"),
    "launch failed requeued held": ("its start failed on a node, and Slurm holds it", "scontrol release JOB"),
    "JobHeldAdmin": ("an admin holds it", "contact the admins"),
    "JobH": ("it is on hold by its user, or was requeued too often", "scontrol release JOB"),
    "QOS": ("a limit of its QOS is reached", "wait, or set another --qos (cluster.slurm.extra)"),
    "Assoc": ("a limit of its account or user is reached", "wait for other jobs of the account"),
    "Partition": ("its partition does not run it", "wait, or resume with a shorter time_limit or another partition"),
}
"""Why a PENDING job waits, by the prefix of Slurm's reason (the first that fits). Others are shown as they are."""


def is_active(job: JobRecord) -> bool:
    return explain(job).phase in (Phase.WAITING, Phase.RUNNING, Phase.ENDING)


def explain(job: JobRecord) -> Explanation:
    """What has happened to ``job``, and what to do. ``JOB`` in the text is its number."""
    phase = PHASES.get(job.state, Phase.UNKNOWN)
    if not job.state:
        what = f"Slurm does not know job {job.id}: {job.why}" if job.why else f"Slurm does not know job {job.id}"
        do = "the last lines of logs/job-JOB.log state how it ended"
    elif phase is Phase.UNKNOWN:
        what, do = f"Slurm reports the state {job.state}, which is not known here", "scontrol show job JOB"
    elif job.state == "PENDING":
        what, do = _waiting(job)
    elif job.state == "FAILED":
        what, do = _failed(job)
    elif job.state == "CANCELLED" and job.by:
        what, do = f"the job was cancelled by the user with id {job.by}", RESUME
    else:
        over = RESUME if phase is Phase.OVER else ""
        what, do = STATES.get(job.state, (f"Slurm reports the state {job.state}", over))
    return Explanation(phase=phase, what=what.replace("JOB", job.id), do=do.replace("JOB", job.id))


def _waiting(job: JobRecord) -> tuple[str, str]:
    reason = job.reason.replace("_", " ")
    shown = "the scheduler has not looked at it yet" if reason in ("", "None", "(null)") else reason
    found = (row for prefix, row in REASONS.items() if reason.lower().startswith(prefix.lower()))
    what, do = next(found, (shown, ""))
    again = f"; it ran before and resumes by itself (start {job.restarts + 1})" if job.restarts else ""
    soon = f"; expected to start at {job.start}" if job.start not in ("", "Unknown") else ""
    return f"the job waits: {what}{again}{soon}", do


def _failed(job: JobRecord) -> tuple[str, str]:
    if job.number:
        return f"signal {job.number} ended the batch script", f"{LOGS}; {RESUME}"
    if job.code not in CODES:
        return f"the job failed with exit code {job.code}", f"{LOGS}; {RESUME}"
    what, do = CODES[job.code]
    return f"{what} (exit code {job.code})", do


_SIGNALS = range(129, 193)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecords:
    """What the tasks of a step have written. ``first`` names the first process that failed."""

    codes: Mapping[str, int]
    started: frozenset[str]
    first: str | None = None


def causes(
    specs: Sequence[ProcessSpec],
    hosts: Mapping[str, str],
    records: TaskRecords,
    srun_code: int,
    lost: Collection[str],
    logs: Mapping[str, Path],
    srun_log: Path,
) -> list[ProcessExit]:
    """How each process of a step ended. The first cause has no ``why``.

    Args:
        hosts: Node of each process, by name.
        srun_code: srun's own code, where a task could not record its own. It is 0 also if the step's only node is lost.
        lost: Nodes that Slurm has lost.
        logs: Log of each process, by name; ``srun_log`` holds the output of srun.
    """
    started = records.started or frozenset(records.codes)
    lost_here = [
        spec.name for spec in specs if hosts[spec.name] in lost and records.codes.get(spec.name) != ExitCode.DONE
    ]
    first = lost_here[0] if lost_here else records.first
    silent = [spec.name for spec in specs if spec.name not in records.codes]
    if first is None and silent:
        first = silent[0]
    codes = {spec.name: records.codes.get(spec.name, srun_code or ExitCode.FAILED) for spec in specs}
    return [
        ProcessExit(
            spec=spec,
            code=128 - codes[spec.name] if codes[spec.name] in _SIGNALS else codes[spec.name],
            log=logs[spec.name] if spec.name in started else srun_log,
            node=hosts[spec.name],
            lost=spec.name == first and bool(lost_here),
            never_started=spec.name == first and not started,
            why="" if spec.name == first or records.codes.get(spec.name) == ExitCode.DONE else "was ended",
        )
        for spec in specs
    ]


SIGNALLED = 143
RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The batch script's exit code, a reason to ``requeue`` or none, a line, and the ``failure`` that ended the run."""

    code: int
    requeue: str = ""
    text: str = ""
    failure: ProcessExit | None = None


def outcome(failure: ProcessExit | None, word: str, state: str) -> JobOutcome:
    """Decide about the job.

    Args:
        failure: The process that ended the run; None where it is done or stopped on request.
        word: The request from outside; empty for none.
        state: The job's state. RUNNING also after USR1 and before a preemption with a grace time.
            COMPLETING or PENDING: Slurm ends or requeues the job by itself, after scancel or a preemption.
    """
    if word == REPLACED:
        return JobOutcome(code=SIGNALLED, text="The run folder belongs to a later session: this one ends")
    if not word and failure is None:
        return JobOutcome(code=ExitCode.DONE)
    if state != RUNNING:
        return JobOutcome(
            code=SIGNALLED, text=f"The job is {state or 'unknown to Slurm'} and is not requeued by itself"
        )
    if word:
        return JobOutcome(code=SIGNALLED, requeue=f"{word} arrived")
    assert failure is not None
    name = failure.spec.name
    if failure.lost:
        return JobOutcome(code=SIGNALLED, requeue=f"{name} {failure.how()}, and the job cannot do without it")
    if failure.code in NON_RETRYABLE and not failure.never_started:
        text = f"{name} {failure.how()}, which would happen again: no requeue"
        return JobOutcome(code=failure.code, text=text, failure=failure)
    text = f"{name} {failure.how()} and has no restarts left: the job ends as failed"
    return JobOutcome(code=ExitCode.COMPONENT_FAILED, text=text, failure=failure)


USR1, TERM = "USR1", "TERM"
REPLACED = "another session"
LOOK_S = 2.0


class Words:
    """``first`` is the first request, empty before.

    The batch script writes a line for each signal to the pipe ``fd``, whose end means that the script is over. A task
    creates ``RunFolder.requeue_request`` for a USR1 to the steps. A session that the run folder no longer names was
    replaced: this job was cut off, and Slurm has started it elsewhere.
    """

    def __init__(self, fd: int, run_folder: RunFolder) -> None:
        self.first = ""
        self._fd, self._folder = fd, run_folder
        self._next_look = 0.0

    def any(self) -> bool:
        """Whether there was a request; never waits."""
        now = time.monotonic()
        if not self.first and select.select([self._fd], [], [], 0)[0]:
            words = os.read(self._fd, 4096).decode("ascii", "replace").split()
            self.first = words[0] if words else TERM
        if not self.first and now >= self._next_look:
            self._next_look = now + LOOK_S
            with contextlib.suppress(OSError):  # looked at again soon
                if self._folder.session_name.read_text(encoding="ascii").strip() != self._folder.session:
                    self.first = REPLACED
                elif self._folder.requeue_request.exists():
                    self.first = USR1
        return bool(self.first)

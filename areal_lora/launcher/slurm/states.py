"""What Slurm reports about a job: what has happened, and what to do about it. Pure tables.

``explain`` takes a ``JobRecord``, which ``queue.look`` gets from Slurm. docs/en/cluster.md shows the tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_lora.errors import ExitCode


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

    ``code`` and ``number`` are exit code and signal of the batch script. ``by`` is the user id that cancelled the job
    where accounting knows it. ``why`` states why nothing is known (``state`` is empty then); ``forgotten``: Slurm has
    answered that it does not know the job, so the job is over.
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

_OVER, _ENDING, _RUNNING, _WAITING = Phase.OVER, Phase.ENDING, Phase.RUNNING, Phase.WAITING
STATES: dict[str, Explanation] = {
    "COMPLETED": Explanation(phase=_OVER, what="the job ended well"),
    "CANCELLED": Explanation(phase=_OVER, what="the job was cancelled", do=RESUME),
    "TIMEOUT": Explanation(
        phase=_OVER,
        what="the time limit ended the job before it could requeue itself",
        do=f"{RESUME}; give more time with cluster.slurm.time_limit",
    ),
    "NODE_FAIL": Explanation(
        phase=_OVER,
        what="a node of the job failed",
        do=f"{RESUME}; --exclude (cluster.slurm.extra) keeps off a bad node",
    ),
    "PREEMPTED": Explanation(
        phase=_OVER,
        what="a job of higher priority took the nodes, and Slurm did not requeue this one (PreemptMode=CANCEL)",
        do=f"{RESUME}; a QOS or partition with PreemptMode=REQUEUE resumes by itself",
    ),
    "OUT_OF_MEMORY": Explanation(
        phase=_OVER,
        what="a process exceeded the memory of the job on its node",
        do=f"raise cluster.slurm.mem, or lower rollout.kv_cache_gib or max_tokens_per_microbatch; then {RESUME}",
    ),
    "BOOT_FAIL": Explanation(
        phase=_OVER, what="a node did not boot, the job never began", do=f"{RESUME}; report the node to the admins"
    ),
    "DEADLINE": Explanation(
        phase=_OVER,
        what="the job could not end before its --deadline",
        do=f"remove or move the deadline in cluster.slurm.extra; then {RESUME}",
    ),
    "REVOKED": Explanation(
        phase=_OVER,
        what="another cluster of the federation runs the job",
        do="squeue --federation shows where; use the commands there",
    ),
    "SPECIAL_EXIT": Explanation(
        phase=_WAITING, what="the job was requeued on hold with a special exit code", do="scontrol release JOB"
    ),
    "RUNNING": Explanation(phase=_RUNNING, what="the job runs"),
    "CONFIGURING": Explanation(phase=_RUNNING, what="the nodes of the job boot or are prepared"),
    "RESIZING": Explanation(phase=_RUNNING, what="the job changes its size"),
    "SIGNALING": Explanation(phase=_RUNNING, what="the job is being signalled"),
    "COMPLETING": Explanation(phase=_ENDING, what="the job ends: its last processes and epilogs are awaited"),
    "STAGE_OUT": Explanation(phase=_ENDING, what="the job ended and its burst buffer is being staged out"),
    "STOPPED": Explanation(
        phase=_RUNNING,
        what="the processes of the job are stopped (SIGSTOP) and keep their nodes",
        do="scontrol resume JOB, or scancel --signal=CONT JOB",
    ),
    "SUSPENDED": Explanation(
        phase=_RUNNING,
        what="an admin or gang scheduling suspended the job; nothing of it runs",
        do="wait, or ask the admins; silences while it is suspended are no stalls",
    ),
    "REQUEUED": Explanation(phase=_WAITING, what="the job is being requeued; it resumes by itself"),
    "REQUEUE_FED": Explanation(phase=_WAITING, what="the federation requeues the job; it resumes by itself"),
    "REQUEUE_HOLD": Explanation(
        phase=_WAITING, what="the job was requeued on hold", do="scontrol release JOB when the cause is mended"
    ),
    "RESV_DEL_HOLD": Explanation(
        phase=_WAITING,
        what="the job is on hold because its reservation was deleted",
        do="areal-lora stop RUN, then areal-lora resume RUN 'cluster.slurm.extra=[--reservation=NAME]'",
    ),
}
"""By Slurm's state, without the details of FAILED (``CODES``) and PENDING (``REASONS``)."""

CODES: dict[int, Explanation] = {
    ExitCode.FAILED: Explanation(phase=_OVER, what="an unexpected error ended the run", do=f"{LOGS}; {RESUME}"),
    ExitCode.WRONG_INPUT: Explanation(
        phase=_OVER, what="a process refused the configuration", do=f"correct the key that {LOGS} names"
    ),
    ExitCode.CONTRADICTION: Explanation(
        phase=_OVER,
        what="the run's data violated a contract (parity, staleness, alignment, a broken adapter)",
        do=f"{LOGS}; areal-lora doctor --run RUN",
    ),
    ExitCode.MISSING: Explanation(
        phase=_OVER, what="a program, package, device or file was missing on a node", do="areal-lora doctor --run RUN"
    ),
    ExitCode.COMPONENT_FAILED: Explanation(
        phase=_OVER,
        what="a process failed more often than its budget of restarts allows, or the budget of requeues is spent",
        do=f"{LOGS}; {RESUME} begins with a full budget",
    ),
    ExitCode.DISK: Explanation(
        phase=_OVER,
        what="a checkpoint or record could not be written or read",
        do=f"make room on the disk of the run folder, or restore the file that the log names; then {RESUME}",
    ),
    ExitCode.TEMPORARY: Explanation(phase=_OVER, what="another process or the network failed for a moment", do=RESUME),
    126: Explanation(
        phase=_OVER, what="the batch script could not run a program", do="check modes and mounts of the interpreter"
    ),
    127: Explanation(
        phase=_OVER,
        what="the batch script did not find a program",
        do="check cluster.slurm.setup, trainer.python and rollout.python on the nodes",
    ),
    130: Explanation(phase=_OVER, what="the job was interrupted", do=RESUME),
    137: Explanation(
        phase=_OVER,
        what="the batch script was killed, often for want of memory",
        do=f"raise cluster.slurm.mem; {RESUME}",
    ),
    143: Explanation(phase=_OVER, what="the batch script was ended by SIGTERM", do=RESUME),
}
"""What the exit code of a FAILED job means: ``errors.ExitCode`` and the shell's own."""

REASONS: tuple[tuple[str, Explanation], ...] = tuple(
    (prefix, Explanation(phase=_WAITING, what=f"the job waits: {what}", do=do))
    for prefix, what, do in (
        ("Resources", "the nodes it needs are in use", ""),
        ("Priority", "jobs of higher priority are before it", ""),
        ("BeginTime", "its begin time has not come; a requeued job waits about two minutes", ""),
        (
            "DependencyNeverSatisfied",
            "the job it depends on ended in a way that never starts it",
            "areal-lora stop RUN, then areal-lora resume RUN with another --dependency in cluster.slurm.extra",
        ),
        ("Dependency", "another job has to end first (--dependency)", ""),
        (
            "ReqNodeNotAvail",
            "a node that it requires is down, drained or reserved",
            "scontrol show node names the reason; relax constraint, nodelist or exclude",
        ),
        ("launch failed requeued held", "its start failed on a node, and Slurm holds it", "scontrol release JOB"),
        ("JobHeldUser", "it is on hold by its user", "scontrol release JOB"),
        ("JobHeldAdmin", "an admin holds it", "ask the admins why"),
        ("JobHoldMaxRequeue", "Slurm requeued it as often as MaxBatchRequeue allows", "scontrol release JOB"),
        ("QOS", "a limit of its QOS is reached", "wait, or set another --qos (cluster.slurm.extra)"),
        ("MaxCpuPerAccount", "a limit of its account is reached", "wait for other jobs of the account"),
        ("Assoc", "a limit of its account or user is reached", "wait for other jobs of the account"),
        ("InvalidAccount", "its account is not valid (any more)", "resume with another cluster.slurm.account"),
        ("InvalidQOS", "its QOS is not valid (any more)", "resume with another --qos of cluster.slurm.extra"),
        (
            "PartitionTimeLimit",
            "its time limit is above that of the partition",
            "resume with a shorter cluster.slurm.time_limit or another partition",
        ),
        (
            "PartitionNodeLimit",
            "it needs more nodes than the partition allows or has",
            "resume with fewer cluster.nodes or another partition",
        ),
        ("PartitionDown", "its partition is down", "wait, or resume with another cluster.slurm.partition"),
        ("PartitionInactive", "its partition is inactive", "wait, or resume with another cluster.slurm.partition"),
        ("NodeDown", "a node that it requires is down", "wait, or relax constraint and nodelist"),
        (
            "BadConstraints",
            "no node satisfies its constraints",
            "resume with another --constraint (cluster.slurm.extra)",
        ),
        (
            "ReservationDeleted",
            "its reservation was deleted",
            "resume with another --reservation (cluster.slurm.extra)",
        ),
        ("Reservation", "its reservation has not begun", ""),
        ("Licenses", "a license that it asks for is in use", ""),
        ("MaxMemPerLimit", "it asks for more memory than a job may have", "resume with a smaller cluster.slurm.mem"),
        ("Cleaning", "its previous session is being cleaned up", ""),
        ("JobLaunchFailure", "its start failed on a node", "look at slurmd's log on that node; scontrol release JOB"),
        ("NonZeroExitCode", "it ended with an error and was requeued on hold", "scontrol release JOB"),
        ("SystemFailure", "Slurm, the file system or the network failed", "wait, or ask the admins"),
        ("FedJobLock", "the federation decides which cluster runs it", ""),
        ("None", "the scheduler has not looked at it yet", ""),
        ("", "the scheduler has not looked at it yet", ""),
    )
)
"""Why a PENDING job waits, by the beginning of Slurm's reason; the first that fits counts."""


def explain(job: JobRecord) -> Explanation:
    """What has happened to ``job``, and what to do. ``JOB`` in the text is its number."""
    return _named(_explained(job), job.id)


def is_active(job: JobRecord) -> bool:
    """Whether ``job`` waits, runs or is ending."""
    return explain(job).phase in (Phase.WAITING, Phase.RUNNING, Phase.ENDING)


def _explained(job: JobRecord) -> Explanation:
    if not job.state:
        return Explanation(
            phase=Phase.UNKNOWN,
            what=f"Slurm does not know job {job.id}: {job.why}" if job.why else f"Slurm does not know job {job.id}",
            do="the last lines of logs/job-JOB.log state how it ended",
        )
    if job.state == "PENDING":
        return _waiting(job)
    if job.state == "FAILED":
        return _failed(job)
    if job.state == "CANCELLED" and job.by:
        return Explanation(phase=_OVER, what=f"the job was cancelled by the user with id {job.by}", do=RESUME)
    if job.state not in STATES:
        what = f"Slurm reports the state {job.state}, which is not known here"
        return Explanation(phase=Phase.UNKNOWN, what=what, do="scontrol show job JOB")
    return STATES[job.state]


def _waiting(job: JobRecord) -> Explanation:
    reason = job.reason.replace("_", " ")
    text = next((text for prefix, text in REASONS if prefix and reason.lower().startswith(prefix.lower())), None)
    if text is None:
        unknown = reason not in ("", "(null)")
        text = REASONS[-1][1] if not unknown else Explanation(phase=_WAITING, what=f"the job waits: {reason}")
    again = f"; it ran before and resumes by itself (start {job.restarts + 1})" if job.restarts else ""
    soon = f"; expected to begin at {job.start}" if job.start not in ("", "Unknown") else ""
    return Explanation(phase=text.phase, what=text.what + again + soon, do=text.do)


def _failed(job: JobRecord) -> Explanation:
    if job.number:
        return Explanation(phase=_OVER, what=f"signal {job.number} ended the batch script", do=f"{LOGS}; {RESUME}")
    known = CODES.get(job.code)
    if known is None:
        return Explanation(phase=_OVER, what=f"the job failed with exit code {job.code}", do=f"{LOGS}; {RESUME}")
    return Explanation(phase=known.phase, what=f"{known.what} (exit code {job.code})", do=known.do)


def _named(explanation: Explanation, job: str) -> Explanation:
    what, do = (text.replace("JOB", job) for text in (explanation.what, explanation.do))
    return Explanation(phase=explanation.phase, what=what, do=do)

"""What becomes of the job when its processes are watched no more. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.ended import Ended
from areal_lora.launcher.slurm.words import REPLACED

SIGNALLED = 143
RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The batch script's exit code. ``requeue`` is the reason to requeue the job, empty for none; ``text`` a line.

    ``failure`` is the process that has ended the run for good.
    """

    code: int
    requeue: str = ""
    text: str = ""
    failure: Ended | None = None


def outcome(failure: Ended | None, word: str, state: str) -> Outcome:
    """Decide about the job.

    Args:
        failure: The process that ended the run; None where it is done or was asked to stop.
        word: What the job was asked to do from outside; empty for nothing.
        state: The job's state. RUNNING also after USR1 and before a preemption with a grace time.
            COMPLETING or PENDING: Slurm ends or requeues the job by itself, after scancel or a preemption.
    """
    if word == REPLACED:
        return Outcome(code=SIGNALLED, text="The run folder belongs to a later session: this one ends")
    if not word and failure is None:
        return Outcome(code=ExitCode.DONE)
    if state != RUNNING:
        return Outcome(code=SIGNALLED, text=f"The job is {state or 'unknown to Slurm'} and is not requeued by itself")
    if word:
        return Outcome(code=SIGNALLED, requeue=f"{word} arrived")
    assert failure is not None
    name = failure.spec.name
    if failure.lost:
        return Outcome(code=SIGNALLED, requeue=f"{name} {failure.how()}, and the job cannot do without it")
    if failure.code in NON_RETRYABLE and not failure.never_began:
        text = f"{name} {failure.how()}, which would happen again: no requeue"
        return Outcome(code=failure.code, text=text, failure=failure)
    text = f"{name} {failure.how()} and has no restarts left: the job ends as failed"
    return Outcome(code=ExitCode.COMPONENT_FAILED, text=text, failure=failure)

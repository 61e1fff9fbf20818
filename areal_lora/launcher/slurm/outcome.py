"""What ends the job: requests from outside (signals of the batch script and of users), or its processes."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass

from areal_lora.errors import NON_RETRYABLE, ExitCode
from areal_lora.launcher.ended import ProcessExit
from areal_lora.run_folder.paths import RunFolder

SIGNALLED = 143
RUNNING = "RUNNING"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """The batch script's exit code. ``requeue`` is the reason to requeue the job, empty for none; ``text`` a line.

    ``failure`` is the process that has ended the run for good.
    """

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
        if not self.first:
            self._read()
        if not self.first and now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look()
        return bool(self.first)

    def _read(self) -> None:
        if select.select([self._fd], [], [], 0)[0]:
            words = os.read(self._fd, 4096).decode("ascii", "replace").split()
            self.first = words[0] if words else TERM

    def _look(self) -> None:
        try:
            if self._folder.session_name.read_text(encoding="ascii").strip() != self._folder.session:
                self.first = REPLACED
            elif self._folder.requeue_request.exists():
                self.first = USR1
        except OSError:
            return  # looked at again soon

"""The publishes of one trainer rank that have not ended, in the order in which its main thread started them.

    rank 0    A (no slot) -> yields to B -> B ends -> A again -> A ends
    rank 1    A           -> yields to B, which it waits for if its main thread is late -> ...

All ranks start publishes in the same order, so numbers name the same publish on all ranks. The oldest one goes
first; rank 0 alone decides that another one goes ahead of it.
"""

from __future__ import annotations

import threading

from areal_lora.errors import PublishError
from areal_lora.weight_sync.trainer.job import Job


class JobQueue:
    """The main thread puts jobs, the publisher thread takes them and marks those that have ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[int, Job] = {}  # by number, in order
        self._begun, self._closed = 0, False

    def put(self, job: Job) -> None:
        """Give ``job`` the next number."""
        with self._changed:
            job.number = self._begun
            self._begun += 1
            self._waiting[job.number] = job
            self._changed.notify_all()

    def close(self) -> None:
        """No ``put`` may follow; the jobs that are there still run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def oldest(self) -> Job | None:
        """Wait for a job and return the oldest one; None if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return next(iter(self._waiting.values()), None)

    def take(self, number: int, timeout_s: float) -> Job:
        """Return job ``number``, which rank 0 has started already. Raises PublishError if this rank does not."""
        with self._changed:
            self._changed.wait_for(lambda: number in self._waiting or self._closed, timeout_s)
            if number not in self._waiting:
                raise PublishError(f"rank 0 started publish {number}, this rank did not; see its log")
            return self._waiting[number]

    def after(self, job: Job) -> int | None:
        """Return the number of the job whose turn is after ``job``; None if it is the only one."""
        with self._changed:
            others = [number for number in self._waiting if number != job.number]
        return next((number for number in others if number > job.number), next(iter(others), None))

    def end(self, job: Job) -> None:
        with self._changed:
            del self._waiting[job.number]

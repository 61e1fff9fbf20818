"""Write checkpoints in the background of training, one ``Saver`` per trainer rank.

main thread                     saver thread of every rank
copy the state
save ------------------------>  files -> fsync -> manifest -> rename -> fsync      `CheckpointStore`
publish ...                     durable: the publish of this version may start
next batch ...                  rank 0: commit the step, delete old checkpoints
join before the next learn <--  ended

What a client saves (``label``) is written in the same way and in the same order, and is no checkpoint.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from areal_lora.checkpoint.checkpoint_store import CheckpointStore, Snapshot
from areal_lora.config.models import CheckpointConfig
from areal_lora.errors import CheckpointError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef

WAIT_LINE_S = 10.0
MAX_FAILURES = 3
"""Failed checkpoints of an adapter in a row that a run survives: a full or absent disk for some steps."""

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class CheckpointSave:
    """One checkpoint in progress at one rank, of the adapter after ``step`` optimizer steps.

    ``label`` is that of a client's saved state, empty for a checkpoint. ``reason`` is that of a ``failed`` one.
    ``ended_s`` is time.monotonic.
    """

    ref: AdapterRef
    step: int = 0
    label: str = ""
    settled: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    failed: bool = False
    reason: str = ""
    ended_s: float = 0.0
    in_doubt: bool = False  # an error ended it, so it is unknown whether it is durable
    write_s: float = 0.0
    nbytes: int = 0
    error: BaseException | None = None

    def wait_settled(self) -> None:
        """Wait until the checkpoint is durable or has failed; only then may the version be published.

        Raises PublishError if it is unknown whether it is durable, because the run is ending (see `Saver.join`).
        """
        _wait(self.settled, f"the checkpoint of {self.ref} to be on the disk")
        if self.in_doubt:
            raise PublishError(f"{self.ref} is not sent, its checkpoint ended with: {self.error}") from self.error


class Saver:
    """Write one checkpoint at a time. Rank 0 passes ``committed``, which is called once a checkpoint is durable.

    ``kept``, of rank 0 as well, is called when a client's saved state is durable or has failed.

    Only the saver's thread uses the exchange of ``store``.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        config: CheckpointConfig,
        committed: Callable[[AdapterRef], None] | None,
        kept: Callable[[CheckpointSave], None] | None = None,
    ) -> None:
        self._store, self._config, self._committed, self._kept = store, config, committed, kept
        self._failures: dict[str, int] = {}
        self._pending: dict[str, CheckpointSave] = {}
        self._jobs: queue.SimpleQueue[tuple[CheckpointSave, Snapshot] | None] = queue.SimpleQueue()
        self._thread = watched_thread("saver", self._work)

    def save(self, snapshot: Snapshot, label: str = "") -> CheckpointSave:
        """Start a save. At most one per adapter is in progress: call ``join`` first. Collective."""
        assert snapshot.ref.name not in self._pending, "join the save before"
        job = self._pending[snapshot.ref.name] = CheckpointSave(ref=snapshot.ref, step=snapshot.state.step, label=label)
        self._jobs.put((job, snapshot))
        return job

    def pending(self, adapter: str) -> CheckpointSave | None:
        """The adapter's save that was not joined yet (not collective)."""
        return self._pending.get(adapter)

    def join(self, adapter: str) -> CheckpointSave | None:
        """Wait for the adapter's save in progress, if any, and return it.

        Raises CheckpointError on every rank when more than `MAX_FAILURES` saves in a row have failed. Raises the
        error of the saver thread otherwise: PublishError (a rank is lost), RolloutError (the controller is lost).
        """
        job = self._pending.pop(adapter, None)
        if job is None:
            return None
        _wait(job.ended, f"the checkpoint of {job.ref} to be written and committed")
        if job.error is not None:
            raise job.error
        if job.label:
            return job
        self._failures[adapter] = self._failures.get(adapter, 0) + 1 if job.failed else 0
        if self._failures[adapter] > MAX_FAILURES:
            raise CheckpointError(
                f"{self._failures[adapter]} checkpoints of {adapter!r} in a row could not be written, "
                f"at most {MAX_FAILURES} may fail; the log has path and reason of each "
                "(fix: free disk space or repair the disk, then start the run again)"
            )
        return job

    def close(self) -> None:
        """End the thread after the save in progress."""
        self._jobs.put(None)
        self._thread.join()

    # ------------------------------------------------------------ saver thread

    def _work(self) -> None:
        while (next_one := self._jobs.get()) is not None:
            job, snapshot = next_one
            try:
                self._run(job, snapshot)
            except Exception as e:  # fault boundary: `join` raises it in the main thread  # noqa: BLE001
                job.error, job.in_doubt = e, not job.settled.is_set()
            job.ended_s = time.monotonic()
            job.settled.set()
            job.ended.set()
            del next_one, snapshot  # free the memory of an adapter state while the thread waits

    def _run(self, job: CheckpointSave, snapshot: Snapshot) -> None:
        adapter = job.ref.name
        began_s = time.monotonic()
        try:
            job.nbytes = self._store.write(snapshot, job.label)
        except CheckpointError as e:
            job.failed, job.reason = True, str(e)
            what = f"state {job.label!r}" if job.label else "checkpoint"
            log.warning("the %s of %s could not be written: %s; older ones are kept", what, job.ref, e)
        finally:
            job.write_s = time.monotonic() - began_s
        if job.label:
            if self._kept is not None:
                self._kept(job)
            return
        if job.failed:
            return
        job.settled.set()
        if self._committed is None:
            return
        self._committed(job.ref)
        try:
            deleted = self._store.delete_old(snapshot, self._config)
        except OSError as e:
            log.warning("old checkpoints of %s could not be deleted: %s: %s", adapter, e.filename, e.strerror)
        else:
            if deleted:
                log.debug("deleted checkpoints of %s: %s", adapter, deleted)


def _wait(event: threading.Event, what: str) -> None:
    waited_s = 0.0
    while not event.wait(WAIT_LINE_S):
        waited_s += WAIT_LINE_S
        log.info("waiting for %s since %.0f s", what, waited_s)

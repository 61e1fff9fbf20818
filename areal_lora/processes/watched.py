"""Start long-lived threads and tasks whose failure ends the process, and inject faults at named points, for tests.

A dead thread would leave the rest of the process waiting for work that no thread does. An exception is logged with the
name and the traceback, and the process ends with the exit code of the error, even if its main thread is blocked in a
wait, a collective or zmq. docs/en/design/running.md lists all threads and tasks.

``reached(name)`` costs one comparison unless the variable ``AREAL_LORA_FAULT`` is set. The value is a list of
``point:n:action``, separated by commas. When this process reaches ``point`` for the ``n``-th time (from 1), the action
runs: ``kill`` sends SIGKILL to the process, ``hang`` blocks the thread, an errno name such as ``ENOSPC`` raises that
OSError. ``wrong_prefix`` and ``other_layer`` alter the names that pass their point (``renamed``). With the prefix
``once=FOLDER:`` each fault happens in one process only, which leaves a mark in the folder.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from areal_lora.errors import BackgroundFailed
from areal_lora.processes.log import get_logger

FINAL_LOG_TIMEOUT_S = 5.0
"""Time limit for writing the log before the process ends: standard error may be a pipe without a reader."""

OnDeath = Callable[[BackgroundFailed], None]

log = get_logger(__name__)
_tasks: set[asyncio.Task[None]] = set()  # an event loop holds its tasks by weak references only


def end_process(failed: BackgroundFailed) -> None:
    """Log the reason, then end this process immediately, regardless of its other threads."""
    force = threading.Timer(FINAL_LOG_TIMEOUT_S, os._exit, [failed.exit_code])
    force.daemon = True
    force.start()
    try:
        log.critical("%s", failed, exc_info=failed.__cause__)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(failed.exit_code)


def watched_thread(name: str, target: Callable[[], object], on_death: OnDeath = end_process) -> threading.Thread:
    """Start ``target`` in a daemon thread. A return ends the thread; an exception calls ``on_death`` in the thread."""

    def run() -> None:
        try:
            target()
        except BaseException as error:  # fault boundary: the end of the thread  # noqa: BLE001
            if not sys.is_finalizing():
                on_death(_failed(f"thread {name}", error))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def watched_task(
    name: str,
    target: Callable[[], Awaitable[object]],
    group: asyncio.TaskGroup | None = None,
    on_death: OnDeath = end_process,
) -> asyncio.Task[None]:
    """Start ``target`` as a task of the running loop, in ``group`` if given.

    A return or a requested cancellation ends the task. An exception, including a CancelledError that was not
    requested, calls ``on_death`` in the event loop.
    """

    async def run() -> None:
        try:
            await target()
        except BaseException as error:  # fault boundary: the end of the task
            task = asyncio.current_task()
            if not (isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()):
                on_death(_failed(f"task {name}", error))
            raise

    task = asyncio.create_task(run(), name=name) if group is None else group.create_task(run(), name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def _failed(name: str, error: BaseException) -> BackgroundFailed:
    failed = BackgroundFailed(name, error)
    failed.__cause__ = error
    return failed


VARIABLE = "AREAL_LORA_FAULT"
WRONG_PREFIX, OTHER_LAYER = RENAMES = ("wrong_prefix", "other_layer")


@dataclass(slots=True)
class _Plan:
    """``faults[point] = (n, action)``; ``counts`` are per process."""

    faults: dict[str, tuple[int, str]]
    marks: Path | None
    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, point: str) -> None:
        with self.lock:
            self.counts[point] = self.counts.get(point, 0) + 1
            n, action = self.faults.get(point, (0, ""))
            due = self.counts[point] == n
        if not due:
            return
        if self.marks is not None:
            try:
                os.close(os.open(self.marks / point, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return  # another process had the fault
        print(f"fault: {action} at {point} ({n})", file=sys.stderr, flush=True)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "hang":
            threading.Event().wait()
        code = getattr(errno, action)
        raise OSError(code, f"{os.strerror(code)} (injected)", point)


def parse(text: str) -> _Plan:
    """Parse the variable. Raises ValueError for a value that is not a list of ``point:n:action``."""
    marks = None
    if text.startswith("once="):
        folder, _, text = text.removeprefix("once=").partition(":")
        marks = Path(folder)
    faults = {}
    for part in text.split(","):
        point, n, action = part.split(":")
        if action not in ("kill", "hang", *RENAMES) and action not in errno.errorcode.values():
            raise ValueError(f"{VARIABLE}: {action!r} is neither kill, hang, a renaming nor the name of an errno")
        faults[point] = (int(n), action)
    return _Plan(faults, marks)


_plan = parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def reached(point: str) -> None:
    """Mark ``point`` as reached by this process and run its fault, if any."""
    if _plan is not None:
        _plan.reached(point)


def renamed(point: str, name: str) -> str:
    """Return ``name`` as a faulty conversion at ``point`` would have it; unchanged without a fault there.

    ``wrong_prefix`` adds a prefix, as of a wrapped model; ``other_layer`` swaps layers 0 and 1, which have equal
    shapes, so that no check of names or shapes can notice.
    """
    _, action = _plan.faults.get(point, (0, "")) if _plan is not None else (0, "")
    if action == WRONG_PREFIX:
        return f"base_model.{name}"
    if action == OTHER_LAYER:
        swap = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
        return next((name.replace(old, new) for old, new in swap.items() if old in name), name)
    return name

"""Start long-lived threads and tasks whose failure ends the process.

A dead thread would leave the rest of the process waiting for work that no thread does. So every long-lived thread or
task of the package starts here. An exception is logged with the name and the traceback, and the process ends with the
exit code of the error, even if its main thread is blocked in a wait, a collective or zmq.
docs/en/design/running.md lists all threads and tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable

from areal_lora.errors import BackgroundFailed
from areal_lora.processes.log import get_logger

FINAL_LOG_TIMEOUT_S = 5.0
"""Time limit for writing the log before the process ends: standard error may be a pipe without a reader."""

OnDeath = Callable[[BackgroundFailed], None]

log = get_logger(__name__)
_tasks: set[asyncio.Task[None]] = set()  # an event loop holds its tasks by weak references only


def end_process(failed: BackgroundFailed) -> None:
    """Log the reason, then end this process immediately, regardless of its other threads."""
    threading.Thread(target=_force_exit, args=(failed.exit_code,), name="force-exit", daemon=True).start()
    try:
        log.critical("%s", failed, exc_info=failed.__cause__)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(failed.exit_code)


def _force_exit(exit_code: int) -> None:
    time.sleep(FINAL_LOG_TIMEOUT_S)
    os._exit(exit_code)


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

"""Long-lived threads and tasks whose death ends their process.

A thread that dies leaves the rest of the process waiting for what it will never do: nobody looks for servers, nobody
answers. So every long-lived thread or task of the package is started here. What it raises is logged with its name
and the traceback, and the process ends with the exit code of the error, also while its main thread is blocked in a
wait, a collective or zmq. docs/en/threads.md lists them all.
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

LAST_WORDS_S = 5.0
"""How long writing the log may take before the process ends without it: standard error may be a pipe nobody reads."""

OnDeath = Callable[[BackgroundFailed], None]

log = get_logger(__name__)
_tasks: set[asyncio.Task[None]] = set()  # an event loop holds its tasks by weak references only


def end_process(failed: BackgroundFailed) -> None:
    """Log why, then end this process at once, whatever its other threads are doing."""
    threading.Thread(target=_end_anyway, args=(failed.exit_code,), name="last-words", daemon=True).start()
    try:
        log.critical("%s", failed, exc_info=failed.__cause__)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(failed.exit_code)


def _end_anyway(exit_code: int) -> None:
    time.sleep(LAST_WORDS_S)
    os._exit(exit_code)


def watched_thread(name: str, target: Callable[[], object], on_death: OnDeath = end_process) -> threading.Thread:
    """Start ``target`` in a daemon thread. Returning is its ordinary end; an exception calls ``on_death`` there."""

    def run() -> None:
        try:
            target()
        except BaseException as error:  # fault boundary: nobody else would hear of it  # noqa: BLE001
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

    Returning and being cancelled are its ordinary ends; an exception calls ``on_death`` in the event loop, and so
    does a CancelledError that nobody asked for.
    """

    async def run() -> None:
        try:
            await target()
        except BaseException as error:  # fault boundary: nobody else would hear of it
            task = asyncio.current_task()
            if not (isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()):
                on_death(_failed(f"task {name}", error))
            raise

    task = asyncio.create_task(run(), name=name) if group is None else group.create_task(run(), name=name)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


def _failed(who: str, error: BaseException) -> BackgroundFailed:
    failed = BackgroundFailed(who, error)
    failed.__cause__ = error
    return failed

"""Bring a run to a tracker: all that is recorded, then what is new, until the run has ended."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from areal_lora.errors import ConfigError
from areal_lora.obs.report.page import report_page
from areal_lora.obs.report.summary import read_summary
from areal_lora.obs.tracking.follower import Follower
from areal_lora.obs.tracking.public_config import public_json
from areal_lora.obs.tracking.tracker import Ending, Tracker
from areal_lora.run_folder.paths import RunFolder

POLL_S = 1.0
ROWS = 200
"""Rows that a tracker gets at a time."""


def follow(
    folder: RunFolder,
    tracker: Tracker,
    ended: Callable[[], str | None],
    *,
    wait: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Send what ``tracker`` does not hold. ``ended`` says how the run has ended, None: it has not.

    Returns that at the end. Without ``wait`` it sends what is there once. The tracker learns of an interrupt, too.
    """
    follower = Follower(folder, tracker.held())
    try:
        while True:
            state = ended()  # before reading: nothing is written after the end
            rows = follower.read_new(everything=state is not None)
            while some := list(islice(rows, ROWS)):
                tracker.send(some)
            if state is not None or not wait:
                break
            sleep(POLL_S)
    except KeyboardInterrupt:
        tracker.end(None)
        raise
    tracker.end(None if state is None else ending(folder, state))
    return state


def ending(folder: RunFolder, state: str) -> Ending:
    summary: dict[str, Any] = read_summary(folder).values() if folder.summary.is_file() else {}
    return Ending(state=state, summary=summary, report=report_page(folder, public_json))


@contextmanager
def only_one(folder: RunFolder, tracker: str) -> Iterator[None]:
    """Raise ConfigError where another process sends the run to ``tracker``.

    Where the folder cannot be written or locked, it is not found out.
    """
    try:
        folder.tracking.mkdir(exist_ok=True)
        file = (folder.tracking / f"{tracker}.lock").open("ab")
    except OSError:
        yield
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fix = "leave it to the other one, or stop that one first"
            raise ConfigError(str(folder), f"another process sends this run to {tracker}", fix) from None
        except OSError:
            pass  # no flock on this file system
        yield

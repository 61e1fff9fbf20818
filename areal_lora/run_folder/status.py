"""Statuses: what each process does or waits for, one line in ``status/<role>-<index>.txt``.

The console shows them, and a stall report quotes them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder

LOADING = "loading the model"
RENEW_S = 5.0
STALE_S = 150.0  # a network file system may show a new time of a file a minute later

log = get_logger(__name__)


def set_status(run_folder: RunFolder, role: str, index: int, text: str) -> None:
    """Replace the status line of ``role-index``: what it does or waits for, in a few words.

    A disk error is logged as a warning: no process fails for want of a status.
    """
    target = run_folder.status(f"{role}-{index}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, " ".join(text.split()) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", target, error.strerror)


def read_statuses(run_folder: RunFolder) -> dict[str, str]:
    """``{"trainer-0": "loading the base model", ...}`` in name order; empty before the first report.

    Unreadable files are omitted: callers read statuses again, and no process depends on one.
    """
    statuses = {}
    with contextlib.suppress(OSError):
        for path in sorted(run_folder.statuses.glob("[!.]*.txt")):
            with contextlib.suppress(OSError):
                statuses[path.stem] = path.read_text(encoding="utf-8").strip()
    return statuses


@contextlib.contextmanager
def renewed_status(run_folder: RunFolder, role: str, index: int, text: str) -> Iterator[None]:
    """Write the status every ``RENEW_S`` during the block: others see that the process is alive."""
    ended = threading.Event()

    def renew() -> None:
        set_status(run_folder, role, index, text)
        while not ended.wait(RENEW_S):
            set_status(run_folder, role, index, text)

    thread = watched_thread("status", renew)
    try:
        yield
    finally:
        ended.set()
        thread.join()


class LoadingServers:
    """The rollout servers that load their model: their status is ``LOADING``, and was renewed within ``STALE_S``.

    Times of files are compared with earlier ones only, as of heartbeats.
    """

    def __init__(self, run_folder: RunFolder, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_folder, self._clock = run_folder, clock
        self._renewed: dict[str, tuple[int, float]] = {}  # time of the file, when it was first seen

    def names(self) -> tuple[str, ...]:
        now, found = self._clock(), []
        for name, text in read_statuses(self._run_folder).items():
            if name.startswith("server-") and text == LOADING:
                with contextlib.suppress(OSError):
                    written = self._run_folder.status(name).stat().st_mtime_ns
                    if self._renewed.get(name, (None, 0.0))[0] != written:
                        self._renewed[name] = written, now
                    if now < self._renewed[name][1] + STALE_S:
                        found.append(name)
        return tuple(found)

"""Statuses and heartbeats of the processes of a run; the main function of those that there is one of.

- ``status/<role>-<index>.txt``: what a process does or waits for, one line. Console and stall reports show it.
- ``heartbeats/<role>-<index>``: touched while the process makes progress. Trainer rank 0 beats in its loop and in its
  waits: ``beat``. Controller and servers have a ``Heart``, a thread that stops when a part of the process makes no
  progress within its limit. The launcher compares each heartbeat with the previous one, so no two clocks are compared.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from areal_lora.errors import ArealLoraError, exit_code_of
from areal_lora.processes import stacks
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import die_with_parent, raise_open_files
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.run_folder.rendezvous import create_secret

LOADING = "loading the model"
RENEW_S = 5.0
STALE_S = 150.0  # a network file system may show a new time of a file a minute later

log = get_logger(__name__)


def set_status(run_folder: RunFolder, role: str, index: int, text: str) -> None:
    """Replace the status line of ``role-index``: what it does or waits for. A disk error is logged as a warning."""
    target = run_folder.status(f"{role}-{index}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, " ".join(text.split()) + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", target, error.strerror)


def read_statuses(run_folder: RunFolder) -> dict[str, str]:
    """``{"trainer-0": "loading the base model", ...}`` in name order, without files that cannot be read now."""
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


EVERY_S = 1.0
HEARTBEAT_TIMEOUT_S = 45.0
"""Silence after which a controller or server is restarted: some beats are late on a busy machine or a slow disk."""
SLOW_S = 10.0
"""Parts without progress for so long are named in the log."""
EVENT_LOOP = "event loop"

_last: dict[Path, float] = {}


def beat(run_folder: RunFolder, role: str, index: int) -> None:
    """Record progress of ``role-index``, at most once a second. A disk error is logged as a warning."""
    path = run_folder.heartbeat(f"{role}-{index}")
    now = time.monotonic()
    if now - _last.get(path, -EVERY_S) < EVERY_S:
        return
    _last[path] = now
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        log.warning("the heartbeat cannot be written: %s", error)


def beat_on(run_folder: RunFolder, role: str, index: int) -> None:
    """``beat``, but never the first: for waits that may come before ``role-index`` has started its work."""
    if run_folder.heartbeat(f"{role}-{index}") in _last:
        beat(run_folder, role, index)


class Heart:
    """Beats from a thread of its own, once a second, from now until ``stop``.

    ``limits`` are the parts of the process and how many seconds each may go without ``progress``; while one is
    beyond its limit there is no beat. A stopped process does not beat either, nor one with a thread that holds
    the GIL. Call it in the main thread, which is what ``EVENT_LOOP`` runs in.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        role: str,
        index: int,
        limits: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_folder, self._role, self._index = run_folder, role, index
        self._limits, self._clock = dict(limits), clock
        self._progress = dict.fromkeys(limits, clock())
        self._slow: set[str] = set()
        self._main = threading.get_ident()
        self._stop = threading.Event()
        beat(run_folder, role, index)
        self._thread = watched_thread("heart", self._run)

    def progress(self, part: str) -> None:
        """Record progress of ``part``. Callable from any thread."""
        self._progress[part] = self._clock()

    async def tick(self) -> None:
        """Record progress of the event loop for as long as it runs."""
        while True:
            self.progress(EVENT_LOOP)
            await asyncio.sleep(EVERY_S)

    def stop(self) -> None:
        """Stop beating: the remaining work must not take longer than the launcher waits."""
        self._stop.set()

    def late(self) -> dict[str, float]:
        """Seconds without progress of the parts that are beyond their limits."""
        now = self._clock()
        ages = {part: now - at for part, at in self._progress.items()}
        for part, age in ages.items():
            if age < min(SLOW_S, self._limits[part]):
                self._slow.discard(part)
            elif part not in self._slow:
                self._slow.add(part)
                log.warning("%s: no progress for %.0f s%s", part, age, self._where() if part == EVENT_LOOP else "")
        return {part: age for part, age in ages.items() if age > self._limits[part]}

    def _where(self) -> str:
        """Describe the position of the main thread, innermost call last."""
        frame = sys._current_frames().get(self._main)
        calls = traceback.extract_stack(frame)[-3:] if frame is not None else []
        return ", it is at " + " > ".join(f"{c.name} ({c.filename}:{c.lineno})" for c in calls) if calls else ""

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            if not self.late():
                beat(self._run_folder, self._role, self._index)


def last_beats(run_folder: RunFolder) -> dict[str, int]:
    """``{"trainer-0": time of the last beat in ns}`` by the file system's clock; processes that never beat are absent.

    To be compared with an earlier answer only. What cannot be read now is absent too. A network file system may answer
    from a cache of attributes.
    """
    beats = {}
    try:
        for path in list(run_folder.heartbeats.glob("*-*")):
            with contextlib.suppress(OSError):
                beats[path.name] = path.stat().st_mtime_ns
    except OSError as error:
        log.warning("heartbeats cannot be read: %s", error)
    return beats


def revalidated_beats(run_folder: RunFolder, names: Iterable[str]) -> dict[str, int]:
    """``last_beats`` of ``names``, from files that are opened for it: on NFS that is a request to the server."""
    beats = {}
    for name in names:
        with contextlib.suppress(OSError), run_folder.heartbeat(name).open("rb") as file:
            beats[name] = os.fstat(file.fileno()).st_mtime_ns
    return beats


def forget_beats(run_folder: RunFolder, role: str, index: int) -> None:
    """Forget the beats of an ended session before ``role-index`` restarts: only those of the next one count."""
    run_folder.heartbeat(f"{role}-{index}").unlink(missing_ok=True)


def begin_session(run_folder: RunFolder) -> None:
    """Make the folders of the session of ``run_folder``, and remove those of all others with endpoints and secret."""
    forget_sessions(run_folder)
    for path in (run_folder.endpoints, run_folder.statuses, run_folder.heartbeats, run_folder.leaves):
        path.mkdir(parents=True)
    create_secret(run_folder)
    if run_folder.session:
        write_file(run_folder.session_name, f"{run_folder.session}\n")


def forget_sessions(run_folder: RunFolder) -> None:
    """Remove what describes the processes of any session, of a job or of a run on this machine."""
    here = RunFolder(run_folder.path, "")
    for path in (here.endpoints, here.statuses, here.heartbeats, here.leaves, here.sessions):
        shutil.rmtree(path, ignore_errors=True)
    for file in (here.secret, here.session_name, here.page, here.restart_request, here.restart_progress):
        file.unlink(missing_ok=True)


def run_role(role: str, serve: Callable[[RunFolder], object], argv: Sequence[str] | None = None) -> int:
    """Main function of the only process of ``role``: its arguments, log, stacks and end with its parent.

    An error of ``serve`` is logged. Returns the exit code.
    """
    parser = argparse.ArgumentParser(description=f"The {role} of a run; started by the launcher.")
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    run_folder: RunFolder = parser.parse_args(argv).run_folder
    raise_open_files()
    setup_logging(role, 0)
    stacks.install(run_folder.stack_dump(f"{role}-0"))
    die_with_parent(signal.SIGTERM)
    try:
        serve(run_folder)
    except (ArealLoraError, OSError) as error:
        log.error("%s: %s", type(error).__name__, error, exc_info=isinstance(error, OSError))
        return exit_code_of(error)
    set_status(run_folder, role, 0, "stopped")
    return 0


def signalled() -> asyncio.Event:
    """Set by SIGTERM and SIGINT. In the running event loop."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop

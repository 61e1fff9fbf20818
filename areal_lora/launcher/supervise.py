"""Start processes, watch them, stop them and all that they started.

Each process gets its own session: a Ctrl-C at the terminal reaches the launcher only, which decides the order of
events. It is the "subreaper" of its descendants (Linux): a grandchild whose parent died is still found and ended.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from uuid import uuid4

import psutil

from areal_lora.errors import EnvironmentError_, ExitCode, ProcessFailed
from areal_lora.launcher import guardian
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import ProcessExit, note_restart
from areal_lora.processes import shared_memory, stacks
from areal_lora.processes.watched import reached

STOP_GRACE_S = 8.0
"""Time between SIGTERM and SIGKILL: a stop takes less than 10 seconds, Slurm's and Kubernetes' usual patience is 30."""
KILL_WAIT_S = 1.5
SHARED_LOOKS = 20
"""Number of checks after which an unclaimed name of shared memory counts as that of another program."""
SESSIONS_S = 5.0
"""Time between two searches for sessions that processes of the run have made: their orphans may have no mark."""
KERNEL_S = 60.0
"""A driver may need so long to take the memory of a killed process apart."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """The processes of one run on this machine. Use as a context manager: leaving it stops everything."""

    def __init__(self, log_folder: Path, grace_s: float) -> None:
        self._logs, self._grace_s = log_folder, grace_s
        self._running: list[tuple[ProcessSpec, subprocess.Popen[bytes]]] = []
        self._sessions: set[int] = set()
        self._shared_before = shared_memory.entries()
        self._shared_ours: set[str] = set()
        self._shared_looks: Counter[str] = Counter()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._mark = uuid4().hex
        self._searched_s = 0.0
        self.code = int(ExitCode.COMPONENT_FAILED)
        """That of the run, for the agents of other nodes."""

    def __enter__(self) -> "Supervisor":
        _adopt_orphans(True)
        self._guardian = subprocess.Popen(
            [sys.executable, "-m", guardian.__name__, self._mark], stdin=subprocess.PIPE, start_new_session=True
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
        # This process continues after the run and must not adopt orphans of other programs.
        _adopt_orphans(False)

    def start(self, specs: Sequence[ProcessSpec]) -> None:
        """Start ``specs`` in order. Raises EnvironmentError_ where a program cannot be started."""
        null = subprocess.DEVNULL
        for spec in specs:
            env = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES} | spec.env
            env[guardian.MARK] = self._mark
            note_restart(log_path := self._logs / f"{spec.name}.log", spec.name)
            with log_path.open("ab") as log:
                try:
                    # No preexec_fn: with one the child runs Python after the fork, and destroys there what other
                    # threads hold (torch keeps process groups so), which does not return.
                    process = subprocess.Popen(
                        spec.argv, env=env, stdin=null, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                except OSError as error:
                    what = f"{spec.name} cannot be started with {spec.argv[0]}: {error.strerror}"
                    raise EnvironmentError_(f"{what} (fix: check {spec.role}'s `python`)") from None
            self._sessions.add(process.pid)
            reached("launcher.process_started")
            self._running.append((spec, process))
            self._tell_guardian(str(process.pid))

    def end(self, specs: Collection[ProcessSpec], grace_s: float = 0.0, why: str = "") -> list[ProcessExit]:
        """As `watch.Processes.end`. Raises ProcessFailed for one that cannot be killed: it would keep its devices."""
        deadline = time.monotonic() + grace_s
        mine = [(spec, process) for spec, process in self._running if spec in specs]
        while any(process.poll() is None for _, process in mine) and time.monotonic() < deadline:
            time.sleep(0.02)
        alive = {process.pid for _, process in mine if process.poll() is None}
        self._descendants()
        kill_sessions({process.pid for _, process in mine})
        deadline = time.monotonic() + KERNEL_S
        for spec, process in mine:
            try:
                process.wait(max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise ProcessFailed(
                    f"{spec.name} is still there {KERNEL_S:g} s after SIGKILL: process {process.pid} is stuck in the "
                    "kernel (fix: see to the device or file system that it waits for, then start the run again)"
                ) from None
        return [replace(e, why=why) if e.pid in alive else e for e in self.poll(specs)]

    def poll(self, only: Collection[ProcessSpec] | None = None) -> list[ProcessExit]:
        """Processes (of ``only``) that ended since the last call, in starting order; what they left is killed."""
        self.look_after()
        if time.monotonic() - self._searched_s > SESSIONS_S:
            self._descendants()
        ended, running = [], []
        for spec, process in self._running:
            code = process.poll() if only is None or spec in only else None
            if code is None:
                running.append((spec, process))
            else:
                ended.append(ProcessExit(spec=spec, pid=process.pid, code=code, log=self._logs / f"{spec.name}.log"))
        self._running = running
        if ended:
            kill_sessions({e.pid for e in ended})
        return ended

    def look_after(self, looks: int = SHARED_LOOKS) -> None:
        """Remember which shared memory our processes use, so that it can be removed if they die without doing so.

        Users of a name are looked up fewer than ``looks`` times: one that stays unclaimed is of another program.
        """
        names = shared_memory.entries() - self._shared_before - self._shared_ours
        if all(self._shared_looks[name] >= looks for name in names):
            return
        self._shared_looks.update(names)
        ours = shared_memory.used_by(process.pid for process in self._descendants()) & names
        self._shared_ours |= ours
        for name in ours:
            self._tell_guardian(guardian.SHARED + name)

    def ask_stacks(self) -> None:
        for process in self._descendants():
            stacks.request(process.pid)

    def running(self) -> list[ProcessSpec]:
        return [spec for spec, _ in self._running]

    def terminate(self) -> None:
        """Send SIGTERM to every process that was started, not to their children, whose order it knows."""
        for _, process in self._running:
            process.terminate()

    def stop(self, grace_s: float | None = None, interrupted: "Interrupts | None" = None) -> None:
        """Have every process end, wait up to ``grace_s``, then kill the remaining ones, grandchildren included.

        A further signal counted by ``interrupted`` ends the waiting at once. Afterwards no process and no shared memory
        of the run remains. May be called twice.
        """
        self.look_after(sys.maxsize)
        self._descendants()  # finds sessions whose processes may become orphans now
        signals_before = interrupted.count if interrupted else 0
        self.terminate()
        deadline = time.monotonic() + (self._grace_s if grace_s is None else grace_s)
        while self._running and time.monotonic() < deadline:
            self.poll()
            if interrupted and interrupted.count > signals_before:
                break
            time.sleep(0.02)
        self.look_after(sys.maxsize)
        deadline = time.monotonic() + KILL_WAIT_S
        while (left := self._descendants()) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=0.2)
        self.poll()
        shared_memory.remove(self._shared_ours)
        if self._guardian is not None and self._guardian.stdin is not None:
            self._tell_guardian(guardian.DONE)
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.close()
            self._guardian.wait()
            self._guardian = None

    def _descendants(self) -> list[psutil.Process]:
        """Living processes of the run. A program that calls `areal_lora.train` has others, and adopts their orphans.

        The run's are children of one of these, or in a session that was started here or found before. An orphan of
        another session has the mark.
        """
        own, found, alive, self._searched_s = os.getpid(), set[int](), [], time.monotonic()
        for process in psutil.Process().children(recursive=True):  # parents come first
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                session, parent = os.getsid(process.pid), process.ppid()
                marked = parent == own and process.environ().get(guardian.MARK) == self._mark
                if not (session in self._sessions or parent in found or marked):
                    continue
                found.add(process.pid)
                self._sessions.add(session)
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def _tell_guardian(self, word: str) -> None:
        if self._guardian is not None and self._guardian.stdin is not None:
            # One killed from outside cannot protect us any more, and must not stop us.
            with contextlib.suppress(BrokenPipeError):
                self._guardian.stdin.write(f"{word}\n".encode())
                self._guardian.stdin.flush()


def kill_sessions(leaders: set[int]) -> None:
    """SIGKILL to every process in the sessions of ``leaders``, also to those whose leader has ended."""
    guardian.signal_all(guardian.members_of(leaders), signal.SIGKILL)


@contextlib.contextmanager
def handled(number: signal.Signals, handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Have ``handler`` handle the signal ``number`` in the block."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Interrupts:
    """Counts Ctrl-C, SIGTERM and SIGHUP instead of letting them end the launcher in the middle of a stop.

    SIGHUP stays ignored where it is (``nohup``).
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        for number in self.SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            # A second signal may come late: the launcher is ending already, and its exit code must stay right.
            signal.signal(number, signal.SIG_IGN if self.count else handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: object) -> None:
        self.count += 1


def _adopt_orphans(adopt: bool) -> None:
    """Make this process the parent of descendants whose own parent ends, or stop that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)

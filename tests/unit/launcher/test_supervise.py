"""Starting processes from a process that has more than the launcher in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from areal_lora.launcher import supervise
from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.supervise import Interrupts, Supervisor, handled
from tests.support.clocks import wait_until


class Holder:
    """What a thread holds, and what must not be destroyed anywhere else: torch keeps process groups like this."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            time.sleep(600)


def test_what_other_threads_hold_does_not_stop_a_start(tmp_path: Path) -> None:
    """``areal_lora.train`` starts processes from a user's process, whose threads may hold anything."""
    held, holds, done, started = threading.local(), threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        held.it = Holder()
        holds.set()
        done.wait(240)

    def start() -> None:
        with Supervisor(tmp_path, grace_s=1.0) as supervisor:
            supervisor.start([spec])
            wait_until(lambda: supervisor.poll() != [])
        started.set()

    argv = (sys.executable, "-c", "print('there')")
    spec = ProcessSpec(role="server", index=0, argv=argv, env={})
    threading.Thread(target=hold, daemon=True).start()
    assert holds.wait(120)
    threading.Thread(target=start, daemon=True).start()
    try:
        assert started.wait(120), "the child is stuck between fork and exec"
    finally:
        done.set()
    assert (tmp_path / "server-0.log").read_text() == "there\n"


@pytest.mark.parametrize(("number", "counted"), [(signal.SIGHUP, 0), (signal.SIGTERM, 1)])
def test_a_run_under_nohup_outlives_its_terminal(number: signal.Signals, counted: int) -> None:
    with handled(number, signal.SIG_IGN), Interrupts() as interrupts:  # type: ignore[arg-type]
        os.kill(os.getpid(), number)
        assert interrupts.count == counted


# Starts a worker that outlives it (daemon) or not, once the file is there; the worker holds shared memory.
SERVER = """
import os, subprocess, sys, time
from multiprocessing.resource_tracker import unregister
from multiprocessing.shared_memory import SharedMemory
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
work = "import mmap, os, sys, time; file = open('/dev/shm/' + sys.argv[2], 'r+b'); held = mmap.mmap(file.fileno(), 0); "
work += "open(sys.argv[1], 'w').write(f'{os.getpid()}.'); time.sleep(600)"
memory = SharedMemory(sys.argv[2], create=True, size=8)
unregister(memory._name, "shared_memory")
subprocess.Popen([sys.executable, "-c", work, sys.argv[3], sys.argv[2]], start_new_session=sys.argv[4] == "orphan")
if sys.argv[4] == "orphan":
    os._exit(0)
time.sleep(600)
"""


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("how", ["child", "orphan"])
def test_the_end_of_a_run_ends_its_own_processes_and_no_others(tmp_path: Path, how: str) -> None:
    """A user's server, started before or during the run, may start workers later, and so may a server of the run."""
    begin = tmp_path / "begin"
    ready = [tmp_path / name for name in ("before", "during", "ours")]
    names = [f"test-supervise-{os.getpid()}-{how}-{path.name}" for path in ready]
    argv = [
        (sys.executable, "-c", SERVER, str(begin), name, str(path), how)
        for name, path in zip(names, ready, strict=True)
    ]
    theirs = [subprocess.Popen(argv[0], start_new_session=True)]
    workers = list[psutil.Process]()
    try:
        with Supervisor(tmp_path, grace_s=1.0) as supervisor:
            supervisor.start([ProcessSpec(role="server", index=0, argv=argv[2], env={})])
            theirs.append(subprocess.Popen(argv[1]))
            begin.touch()
            wait_until(lambda: all(path.exists() and path.read_text().endswith(".") for path in ready))
            supervisor.look_after()
            workers += [psutil.Process(int(path.read_text().rstrip("."))) for path in ready]
        assert [lives(worker) for worker in workers] == [True, True, False]
        assert [(Path("/dev/shm") / name).exists() for name in names] == [True, True, False]
    finally:
        for process in [*theirs, *filter(lives, workers)]:
            process.kill()
        for server in theirs:
            server.wait()
        for name in names:
            (Path("/dev/shm") / name).unlink(missing_ok=True)


def test_a_tool_without_the_runs_environment_does_not_outlive_its_worker_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the MCP SDK starts tools: in a session of their own, with few variables."""
    monkeypatch.setattr(supervise, "SESSIONS_S", 0.0)
    pid, goes = tmp_path / "pid", tmp_path / "goes"
    tool = f"env -i setsid bash -c 'echo $$. > \"{pid}\"; exec sleep 600' & "
    argv = ("bash", "-c", f'{tool} while [ ! -e "{goes}" ]; do sleep 0.02; done')
    with Supervisor(tmp_path, grace_s=1.0) as supervisor:
        supervisor.start([ProcessSpec(role="controller", index=0, argv=argv, env={})])
        wait_until(lambda: pid.exists() and pid.read_text().endswith(".\n"))
        process = psutil.Process(int(pid.read_text().rstrip(".\n")))
        assert not supervisor.poll()
        goes.touch()
        wait_until(lambda: bool(supervisor.poll()))
    assert not lives(process)

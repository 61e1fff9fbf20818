"""Beats are files that change; stacks come from a process that is stuck in a C call."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lora.processes import stacks
from areal_lora.run_folder import status
from areal_lora.run_folder.paths import RunFolder
from tests.support.clocks import wait_until


def test_beats_change_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(status.time, "monotonic", lambda: clock[0])
    status.beat_on(RunFolder(tmp_path), "trainer", 0)
    assert status.last_beats(RunFolder(tmp_path)) == {}, "a wait before the work has begun is no beat"
    status.beat(RunFolder(tmp_path), "trainer", 0)
    path = tmp_path / "heartbeats" / "trainer-0"
    os.utime(path, ns=(5, 5))
    clock[0] += 0.9
    status.beat(RunFolder(tmp_path), "trainer", 0)
    assert status.last_beats(RunFolder(tmp_path)) == {"trainer-0": 5}
    clock[0] += 0.2
    status.beat_on(RunFolder(tmp_path), "trainer", 0)
    assert status.last_beats(RunFolder(tmp_path))["trainer-0"] > 5
    status.forget_beats(RunFolder(tmp_path), "trainer", 0)
    status.forget_beats(RunFolder(tmp_path), "trainer", 1)
    assert status.last_beats(RunFolder(tmp_path)) == {}


def test_beats_are_read_again_from_files_that_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`stat` shows what the client of a network file system has kept."""
    folder = RunFolder(tmp_path)
    for index in range(3):
        status.beat(folder, "server", index)
        os.utime(folder.heartbeat(f"server-{index}"), ns=(5, 5))
    stat, kept = Path.stat, folder.heartbeat("server-0").stat()
    for index in range(3):
        os.utime(folder.heartbeat(f"server-{index}"), ns=(6, 6))
    folder.heartbeat("server-2").unlink()
    monkeypatch.setattr(Path, "stat", lambda path, **_: kept if path.name.startswith("server-") else stat(path))
    assert status.last_beats(folder) == {"server-0": 5, "server-1": 5}
    assert status.revalidated_beats(folder, ["server-1", "server-2"]) == {"server-1": 6}


def test_a_disk_that_fails_is_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(*args: object, **options: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    status.beat(RunFolder(tmp_path), "trainer", 8)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "touch", stale)
        status.beat(RunFolder(tmp_path), "trainer", 9)
    assert status.last_beats(RunFolder(tmp_path)).keys() == {"trainer-8"}
    for method in ("stat", "glob"):
        with monkeypatch.context() as broken:
            broken.setattr(Path, method, stale)
            assert status.last_beats(RunFolder(tmp_path)) == {}


def heart_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **limits: float) -> tuple[status.Heart, list[float]]:
    """A heart whose clock is set by hand and which is not looked at by its own thread."""
    clock = [0.0]
    monkeypatch.setattr(status, "EVERY_S", 3600.0)
    return status.Heart(RunFolder(folder), "server", 3, limits, clock=lambda: clock[0]), clock


def test_each_part_has_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heart, clock = heart_of(tmp_path, monkeypatch, engine=900.0, workers=5.0)
    clock[0] = 5.0
    assert heart.late() == {}
    clock[0] = 5.1
    assert heart.late() == {"workers": 5.1}
    heart.progress("workers")
    assert heart.late() == {}
    clock[0] = 900.5
    heart.progress("workers")
    assert heart.late() == {"engine": 900.5}
    heart.progress("engine")
    assert heart.late() == {}
    heart.stop()


LOOP = """
import asyncio, sys, time
from areal_lora.run_folder import status
from areal_lora.run_folder.status import EVENT_LOOP, Heart
from areal_lora.processes.log import setup_logging
from areal_lora.run_folder.paths import RunFolder
setup_logging("controller", 0)
status.EVERY_S, status.SLOW_S = 0.02, 0.4
folder, now = RunFolder.of(sys.argv[1]), 0.0
def beats(for_s):
    last = status.last_beats(folder)
    time.sleep(for_s)
    return status.last_beats(folder) != last
def users_workflow():
    global now
    now = 1.0
    while not beats(0.05): pass
    print("it looks alive meanwhile", flush=True)
    now = 2.0
    while beats(0.5): pass
    print("but not for ever", flush=True)
async def main():
    heart = Heart(folder, "controller", 0, {EVENT_LOOP: 1.5}, lambda: now)
    users_workflow()
asyncio.run(main())
"""


def test_user_code_that_blocks_the_event_loop_does_not_stop_the_heart_until_its_own_limit(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(tmp_path)], capture_output=True, text=True, check=False, timeout=150
    )
    assert done.stdout.splitlines() == ["it looks alive meanwhile", "but not for ever"], done.stderr
    assert "event loop: no progress for" in done.stderr
    assert "users_workflow" in done.stderr, "it says who blocks"


STUCK = """
import pathlib, sys, threading, time
from areal_lora.processes import stacks
if len(sys.argv) > 1:
    stacks.install(pathlib.Path(sys.argv[1]))
def waits_for_a_peer():
    lock = threading.Lock(); lock.acquire()
    print("ready", flush=True)
    lock.acquire()
waits_for_a_peer()
"""


def stuck(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", STUCK, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_stuck_process_writes_its_stacks_and_lives_on(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).stack_dump("trainer-3")
    process = stuck(str(path))
    try:
        assert path.read_text() == ""
        assert stacks.request(process.pid)
        wait_until(lambda: "waits_for_a_peer" in path.read_text())
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_without_the_handler_is_not_killed_by_asking(tmp_path: Path) -> None:
    process = stuck()
    try:
        assert not stacks.request(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        _, how = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(how), "one that an earlier signal kills does not stop"
        os.kill(process.pid, signal.SIGCONT)
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(120) == -signal.SIGUSR1, "this is what the check prevents"
    finally:
        process.kill()
        process.wait()
    assert not stacks.request(process.pid)

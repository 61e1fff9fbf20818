"""Beats are files that change; stacks come from a process that is stuck in a C call."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.processes import stacks
from areal_lora.run_folder import status
from areal_lora.run_folder.paths import RunFolder


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
status.EVERY_S, status.SLOW_S = 0.1, 0.4
def users_workflow():
    time.sleep(float(sys.argv[2]))
async def main():
    heart = Heart(RunFolder.of(sys.argv[1]), "controller", 0, {EVENT_LOOP: 1.5})
    for _ in range(5):
        heart.progress(EVENT_LOOP)
        await asyncio.sleep(0.1)
    print("blocking", flush=True)
    users_workflow()
asyncio.run(main())
"""


def test_user_code_that_blocks_the_event_loop_does_not_stop_the_heart_until_its_own_limit(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path), "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        blocked_at, last, beats = time.monotonic(), 0, []
        while time.monotonic() < blocked_at + 3.0:
            beat = status.last_beats(RunFolder(tmp_path))["controller-0"]
            if beat != last:
                last = beat
                beats.append(time.monotonic() - blocked_at)
            time.sleep(0.02)
        assert [at for at in beats if 0.3 < at < 1.2], f"it looks alive meanwhile: {beats}"
        assert not [at for at in beats if at > 2.2], f"but not for ever: {beats}"
    finally:
        process.kill()
        _, errors = process.communicate()
    assert "event loop: no progress for" in errors
    assert "users_workflow" in errors, "it says who blocks"


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


def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_stuck_process_writes_its_stacks_and_lives_on(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).stack_dump("trainer-3")
    process = stuck(str(path))
    try:
        assert path.read_text() == ""
        assert stacks.request(process.pid)
        assert until(lambda: "waits_for_a_peer" in path.read_text()), path.read_text()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_without_the_handler_is_not_killed_by_asking(tmp_path: Path) -> None:
    process = stuck()
    try:
        assert not stacks.request(process.pid)
        time.sleep(0.1)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(5) == -signal.SIGUSR1, "this is what the check prevents"
    finally:
        process.kill()
        process.wait()
    assert not stacks.request(process.pid)

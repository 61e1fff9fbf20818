"""Beats are files that change; stacks come from a process that is stuck in a C call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.obs import heartbeat, stacks


def test_beats_change_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock[0])
    heartbeat.beat_on(tmp_path, "trainer", 0)
    assert heartbeat.last_beats(tmp_path) == {}, "a wait before the work has begun is no beat"
    heartbeat.beat(tmp_path, "trainer", 0)
    path = tmp_path / "heartbeats" / "trainer-0"
    os.utime(path, ns=(5, 5))
    clock[0] += 0.9
    heartbeat.beat(tmp_path, "trainer", 0)
    assert heartbeat.last_beats(tmp_path) == {"trainer-0": 5}
    clock[0] += 0.2
    heartbeat.beat_on(tmp_path, "trainer", 0)
    assert heartbeat.last_beats(tmp_path)["trainer-0"] > 5
    heartbeat.forget_beats(tmp_path, "trainer", 0)
    heartbeat.forget_beats(tmp_path, "trainer", 1)
    assert heartbeat.last_beats(tmp_path) == {}


STUCK = """
import sys, threading, time
from areal_lora.obs import stacks
if len(sys.argv) > 1:
    stacks.install(sys.argv[1], "trainer", 3)
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
    process = stuck(str(tmp_path))
    try:
        path = stacks.stack_path(tmp_path, "trainer-3")
        assert path.read_text() == ""
        assert stacks.ask(process.pid)
        assert until(lambda: "waits_for_a_peer" in path.read_text()), path.read_text()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_without_the_handler_is_not_killed_by_asking(tmp_path: Path) -> None:
    process = stuck()
    try:
        assert not stacks.ask(process.pid)
        time.sleep(0.1)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGUSR1)
        assert process.wait(5) == -signal.SIGUSR1, "this is what the check prevents"
    finally:
        process.kill()
        process.wait()
    assert not stacks.ask(process.pid)

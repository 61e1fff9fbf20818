"""Starting processes from a process that has more than the launcher in it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

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
    held, done, started = threading.local(), threading.Event(), threading.Event()

    def hold() -> None:
        held.it = Holder()
        done.wait(240)

    def start() -> None:
        with Supervisor(tmp_path, grace_s=1.0) as supervisor:
            supervisor.start([spec])
            wait_until(lambda: supervisor.poll() != [])
        started.set()

    argv = (sys.executable, "-c", "print('there')")
    spec = ProcessSpec(role="server", index=0, argv=argv, env={})
    threading.Thread(target=hold, daemon=True).start()
    wait_until(lambda: threading.active_count() > 1)
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

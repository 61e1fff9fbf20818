"""A process of its own for each case: what does not end in time is killed by the kernel."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.clocks import seen

HEAD = """
import signal, sys, time
from areal_lora.tasks.sandbox.fence import Deadline
deadline = Deadline()
assert deadline.kept
"""
DEAF = """
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
deadline.start(0.8)
while True:
    pass
"""
ASLEEP = """
deadline.start(0.8)
time.sleep(600)
"""
IN_TIME = """
for _ in range(3):
    deadline.start(0.8)
    time.sleep(0.3)
    deadline.stop()
time.sleep(1.0)
"""
AGAIN = """
deadline.start(0.8)
time.sleep(0.4)
deadline.start(0.8)
time.sleep(0.5)
deadline.stop()
deadline.start(0.8)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "status"),
    [(DEAF, -signal.SIGKILL), (ASLEEP, -signal.SIGKILL), (IN_TIME, 0), (AGAIN, -signal.SIGKILL)],
    ids=["deaf", "asleep", "in time", "again"],
)
def test_what_takes_too_long_ends_and_nothing_else(code: str, status: int) -> None:
    def measure() -> int:
        return subprocess.run([sys.executable, "-c", HEAD + code], timeout=150, check=False).returncode

    assert seen(measure, lambda found: found == status) == status


def test_a_machine_without_such_timers_is_told_from_one_that_has_them() -> None:
    code = (
        "from areal_lora.tasks.sandbox import fence\n"
        "fence._CALLS = {}\n"
        "made = fence.Deadline()\n"
        "assert not made.kept\n"
        "made.start(0.1)\n"
        "made.stop()\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=150, check=True)

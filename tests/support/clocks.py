"""A clock that a test moves, and waiting on the real one."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Seconds, as ``time.monotonic`` gives them; stands still until ``now`` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def wait_until(
    condition: Callable[[], object], timeout_s: float = 150.0, what: str = "the condition", pause_s: float = 0.02
) -> float:
    """Poll ``condition`` until it holds; fails after ``timeout_s``. Seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what} did not happen within {timeout_s} s"
        time.sleep(pause_s)
    return time.monotonic() - began

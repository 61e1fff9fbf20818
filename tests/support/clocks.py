"""A clock that a test moves, and waiting on the real one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


WAIT_S = 120.0
"""For what normally comes at once: any process or thread of a busy machine may be stalled for many seconds."""


class Clock:
    """Seconds, as ``time.monotonic`` gives them; stands still until ``now`` is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, in which only waiting takes time, and that none: for code without threads, sockets and files."""
    from areal_lora.launcher.simulation.cost_model import VirtualLoop

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def wait_until(
    condition: Callable[[], object], timeout_s: float = WAIT_S, what: str = "the condition", pause_s: float = 0.02
) -> float:
    """Poll ``condition`` until it holds; fails after ``timeout_s``. Seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"{what} did not happen within {timeout_s} s"
        time.sleep(pause_s)
    return time.monotonic() - began


def seen(run: Callable[[], T], happened: Callable[[T], object], tries: int = 10) -> T:
    """What the first run gave in which it happened: a process that stands still for seconds misses short deadlines.

    Fails if it happened in none: a fault of the product shows in each.
    """
    for _ in range(tries):
        if happened(found := run()):
            return found
    raise AssertionError(f"in {tries} runs it did not happen, the last gave {found}")

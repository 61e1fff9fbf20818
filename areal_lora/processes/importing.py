"""Import large libraries in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no garbage in the block, which imports large libraries. For the main function of a process.

    Imports make a million objects that stay, and the collector would look through all of them again and again: up to a
    fifth of the CPU time. What exists at the end is never collected (``gc.freeze``).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

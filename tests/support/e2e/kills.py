"""Find a process of a run by its module."""

from __future__ import annotations

import psutil


def runs(process: psutil.Process, module: str) -> bool:
    """Whether ``module`` is a word of its command line; it may end meanwhile, and a zombie has none."""
    try:
        return module in process.cmdline()
    except psutil.NoSuchProcess:
        return False

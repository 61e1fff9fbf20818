"""End with the parent process (Linux)."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent(sig: signal.Signals) -> None:
    """Have the kernel send ``sig`` to this process when its parent ends in any way. A fork does not inherit this."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)

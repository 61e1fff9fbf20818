"""Inject faults at named points of a step, for tests.

``reached(name)`` costs one comparison unless the variable ``AREAL_LORA_FAULT`` is set. The value is a list of
``point:n:action``, separated by commas. When this process reaches ``point`` for the ``n``-th time (from 1), the action
runs: ``kill`` sends SIGKILL to the process, ``hang`` blocks the thread, an errno name such as ``ENOSPC`` raises that
OSError. ``wrong_prefix`` and ``other_layer`` alter the names that pass their point (``renamed``). With the prefix
``once=FOLDER:`` each fault happens in one process only, which leaves a mark in the folder.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "AREAL_LORA_FAULT"
WRONG_PREFIX, OTHER_LAYER = RENAMES = ("wrong_prefix", "other_layer")


@dataclass(slots=True)
class _Plan:
    """``faults[point] = (n, action)``; ``counts`` are per process."""

    faults: dict[str, tuple[int, str]]
    marks: Path | None
    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reached(self, point: str) -> None:
        with self.lock:
            self.counts[point] = self.counts.get(point, 0) + 1
            n, action = self.faults.get(point, (0, ""))
            due = self.counts[point] == n and self._first(point)
        if due:
            print(f"fault: {action} at {point} ({n})", file=sys.stderr, flush=True)
            _act(point, action)

    def _first(self, point: str) -> bool:
        if self.marks is None:
            return True
        try:
            os.close(os.open(self.marks / point, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def _act(point: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "hang":
        threading.Event().wait()
    code = getattr(errno, action)
    raise OSError(code, f"{os.strerror(code)} (injected)", point)


def parse(text: str) -> _Plan:
    """Parse the variable. Raises ValueError for a value that is not a list of ``point:n:action``."""
    marks = None
    if text.startswith("once="):
        folder, _, text = text.removeprefix("once=").partition(":")
        marks = Path(folder)
    faults = {}
    for part in text.split(","):
        point, n, action = part.split(":")
        if action not in ("kill", "hang", *RENAMES) and action not in errno.errorcode.values():
            raise ValueError(f"{VARIABLE}: {action!r} is neither kill, hang, a renaming nor the name of an errno")
        faults[point] = (int(n), action)
    return _Plan(faults, marks)


_plan = parse(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def reached(point: str) -> None:
    """Mark ``point`` as reached by this process and run its fault, if any."""
    if _plan is not None:
        _plan.reached(point)


def renamed(point: str, name: str) -> str:
    """Return ``name`` as a faulty conversion at ``point`` would have it; unchanged without a fault there.

    ``wrong_prefix`` adds a prefix, as of a wrapped model; ``other_layer`` swaps layers 0 and 1, which have equal
    shapes, so that no check of names or shapes can notice.
    """
    _, action = _plan.faults.get(point, (0, "")) if _plan is not None else (0, "")
    if action == WRONG_PREFIX:
        return f"base_model.{name}"
    if action == OTHER_LAYER:
        swap = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
        return next((name.replace(old, new) for old, new in swap.items() if old in name), name)
    return name

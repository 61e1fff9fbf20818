"""Classes with gymnasium's ``reset`` and ``step``, as users write them; they run in a worker's interpreter."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


class Letters:
    """Rewards upper-case letters of two answers; its first text has ``greeting`` and the row's answer."""

    def __init__(self, greeting: str = "") -> None:
        self.greeting, self.turns = greeting, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        return f"{self.greeting}{options['answer']}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return "more", float(sum(map(str.isupper, action))), self.turns == 2, False, {}


class Python(Letters):
    """Its only answer's reward is 3 if it runs in ``python``, and no module of the package can be imported."""

    def __init__(self, python: str) -> None:
        import sys

        import importlib.util

        super().__init__()
        self.right = sys.prefix == python and importlib.util.find_spec("areal_lora") is None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 3.0 * self.right, True, False, {}


class Killed(Letters):
    """Ends its process with the second answer of the first sample, as a fault in C code would; ``marks`` has one file
    for every sample that was started."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.fatal = not any(Path(marks).iterdir())
        (Path(marks) / f"{os.getpid()}-{time.monotonic_ns()}").touch()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.fatal and self.turns == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Hangs(Letters):
    """Its first sample never ends; ``marks`` as of `Killed`."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.hangs = not any(Path(marks).iterdir())
        (Path(marks) / f"{os.getpid()}-{time.monotonic_ns()}").touch()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        while self.hangs:
            time.sleep(1)
        return super().step(action)


class Wrong(Letters):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return None.upper()  # type: ignore[attr-defined]

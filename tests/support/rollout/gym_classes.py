"""Classes with gymnasium's ``reset`` and ``step``, as users write them; they run in a worker's interpreter."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import time
import zlib
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


class Problem(Letters):
    """The row's problem, twice; an answer earns a point for every ``=``."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None
        self.problem = options["prompt"]
        return self.problem, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        return f"\n{self.problem}", float(action.count("=")), False, self.turns == 2, {}


class Elsewhere(Letters):
    """Its only answer's reward is 3 in the virtual environment ``prefix``, where the package cannot be imported."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.right = sys.prefix == prefix and importlib.util.find_spec("areal_lora") is None

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


class Mortal(Problem):
    """Ends its process with the second answer to one problem in eight, the first time; ``marks`` has those problems."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.marks = Path(marks)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turns += 1
        problem = zlib.crc32(self.problem.encode())
        mark = self.marks / str(problem)
        if self.turns == 2 and problem % 8 == 0 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "More?", float(sum(digit in "13579" for digit in action)), False, self.turns == 2, {}


class Grows(Letters):
    """With the second answer of the first sample there are 400 MB, in this process or a ``child``, until they are
    killed; ``marks`` has one file for every sample that was started."""

    def __init__(self, marks: str, child: bool) -> None:
        super().__init__()
        self.grows, self.child = not any(Path(marks).iterdir()), child
        (Path(marks) / f"{os.getpid()}-{time.monotonic_ns()}").touch()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.grows and self.turns == 1:
            if self.child:
                code = "import time; held = b'x' * (400 << 20); time.sleep(86400)"
                subprocess.run([sys.executable, "-c", code], check=False)
            held = b"x" * (400 << 20)
            while held:
                time.sleep(1)
        return super().step(action)


class Hangs(Letters):
    """Its first sample never ends; ``marks`` has one file for every answer."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.marks, self.hangs = Path(marks), not any(Path(marks).iterdir())

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        (self.marks / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        while self.hangs:
            time.sleep(1)
        return super().step(action)


class Beside(Letters):
    """The first sample never ends, the second one when ``marks`` has a file `go`. Each has a file with its process."""

    def __init__(self, marks: str) -> None:
        super().__init__()
        self.marks = Path(marks)
        for self.number in itertools.count():
            with contextlib.suppress(FileExistsError), (self.marks / str(self.number)).open("x") as file:
                file.write(str(os.getpid()))
                break

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        while self.number == 0 or (self.number == 1 and not (self.marks / "go").exists()):
            time.sleep(0.01)
        return super().step(action)


class Wrong(Letters):
    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return None.upper()  # type: ignore[attr-defined]

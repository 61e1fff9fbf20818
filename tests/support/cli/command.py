"""``python -m areal_lora`` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.paths import ROOT

COMMAND = (sys.executable, "-m", "areal_lora")


def areal_lora(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )

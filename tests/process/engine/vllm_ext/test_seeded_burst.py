"""A burst of seeded requests must not end the engine: vLLM cannot rewind a CPU generator."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import EXAMPLES, SUPPORT


@pytest.mark.slow
def test_a_burst_of_seeded_prompts_is_served_whole() -> None:
    script = [sys.executable, str(SUPPORT / "engine" / "vllm_ext" / "seeded_burst.py"), str(EXAMPLES)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-1] == str(32 * 8)

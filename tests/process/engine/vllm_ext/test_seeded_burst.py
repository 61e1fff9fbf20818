"""A burst of seeded requests must not end the engine: vLLM cannot rewind a CPU generator."""

from __future__ import annotations

import pytest

from tests.support.engine.vllm_ext import seeded_burst
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES
from tests.support.paths import EXAMPLES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_burst_of_seeded_prompts_is_served_whole() -> None:
    said = starter_of(ROLES["rollout.python"]).output(seeded_burst.__name__, [str(EXAMPLES)], 560.0)
    assert said.strip().splitlines()[-1] == str(32 * 8)

"""Memory of micro-batches on both engines: a pass has many, and keeps what is in progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.memory_ranks import BUDGET, MICRO_BATCHES, living_plans
from tests.support.distributed.spawn import run_ranks
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CASES = [
    Case(name="megatron", world=1, budget=BUDGET),
    Case(name="megatron, pp 2, selective", world=2, pp=2, budget=BUDGET, recompute="selective"),
    Case(name="fsdp, recompute", world=1, engine="fsdp", budget=BUDGET, recompute="full"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_plans_are_kept_for_micro_batches_in_progress_only(case: Case, tmp_path: Path) -> None:
    """Of a training pass one for each pipeline stage from this one on, of a scoring pass one; none afterwards."""
    ranks = run_ranks(living_plans, case.world, tmp_path, (str(EXAMPLES / "tiny_model"), case), timeout_s=200.0)
    for stage, found in enumerate(ranks):
        assert [len(seen) for seen in found.values()] == [MICRO_BATCHES + 1] * 2
        assert max(found["training"]) == case.pp - stage
        assert max(found["scoring"]) == 1
        assert {seen[-1] for seen in found.values()} == {0}

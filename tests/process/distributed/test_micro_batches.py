"""Memory of micro-batches on both engines: a pass has many, and keeps what is in progress."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.distributed.engine_ranks import Case
from tests.support.distributed.memory_ranks import BUDGET, MICRO_BATCHES, RESULT_BYTES, living
from tests.support.distributed.spawn import run_ranks
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = [
    Case(name="megatron", world=1, budget=BUDGET),
    Case(name="megatron, pp 2, selective", world=2, pp=2, budget=BUDGET, recompute="selective"),
    Case(name="megatron, pp 2, virtual", world=2, pp=2, stages=(1, 1, 1, 1), budget=BUDGET),
    Case(name="fsdp, recompute", world=1, engine="fsdp", budget=BUDGET, recompute="full"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_of_a_micro_batch_lives_longer_than_its_passes(case: Case, tmp_path: Path) -> None:
    """Plans: of training one for each pipeline stage from this one on, of scoring one; with virtual stages those of two
    rounds, or one; none afterwards. Bytes: the last micro-batch is computed with as many as the first round that found
    its stage full, but for results."""
    round_ = case.pp if case.trainer().chunks > 1 else 1
    ranks = run_ranks(living, case.world, tmp_path, (str(EXAMPLES / "tiny_model"), case))
    for stage, found in enumerate(ranks):
        assert [len(seen.plans) for seen in found.values()] == [MICRO_BATCHES + 1] * 2
        assert max(found["training"].plans) == (2 * round_ if round_ > 1 else case.pp - stage)
        assert max(found["scoring"].plans) == round_
        assert {seen.plans[-1] for seen in found.values()} == {0}
        for kind, seen in found.items():
            print(f"{case.name}, stage {stage}, {kind}: bytes alive {seen.nbytes}")
            full, later = max(seen.nbytes[case.pp : case.pp + round_]), seen.nbytes[case.pp + round_ : -1]
            assert max(later) - full <= len(later) * RESULT_BYTES
            assert seen.nbytes[-1] <= full + len(later) * RESULT_BYTES

"""Contract C4 in every parallel layout of up to eight real ranks that Megatron accepts; the suite samples them.

See `matrix_ranks` for what each rank compares. Numbers of a model in such a layout: test_layouts.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from areal_lora.types import ExpertLayout
from tests.support.distributed.matrix_ranks import EXPERTS, KV_HEADS, RANKS, kinds, layouts, matrix
from tests.support.distributed.spawn import run_ranks
from tests.support.sizes import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_layout_loads_and_packs_bit_for_bit(tmp_path: Path) -> None:
    numbered = [each for world in range(8, 0, -1) for each in enumerate(layouts(world))]
    chosen = sample(numbered, 0, kinds)
    ranks = run_ranks(matrix, 8, tmp_path, (str(tmp_path), chosen), timeout_s=560.0)
    digests: dict[str, str] = {}
    for found in ranks:
        for where, digest in found["digests"].items():
            assert digests.setdefault(where, digest) == digest, f"{where}: ranks disagree about the wire layout"
    combinations, refused = ranks[0]["combinations"], ranks[0]["refused"]
    print(f"{len(chosen)} of {len(numbered)} layouts, {combinations} combinations with family, expert layout and rank")
    for why, count in sorted(Counter(refused.values()).items()):
        print(f"refused {count}: {why}")
    for kind in KV_HEADS:
        of_kind = [w for w in digests if w.startswith(f"{kind},")]
        print(f"{kind}: {len(of_kind)}")
    assert len(digests) == combinations
    assert ranks[0]["layouts"] == len(chosen)
    # Powers of two fit every family, so nothing but an odd size may be refused to a model with enough heads.
    for _, sizes in chosen:
        if {sizes.tp, sizes.ep, sizes.etp} <= {1, 2, 4, 8}:
            for experts, rank in product((ExpertLayout.PER_EXPERT, ExpertLayout.SHARED), RANKS):
                assert f"qwen3_moe, {sizes}, {experts}, rank {rank}" in digests
    assert {w.split(",")[0] for w in digests if ExpertLayout.SHARED_OUTER in w} == set(EXPERTS)
    assert {w.split(",")[0] for w in digests} == set(KV_HEADS)
    assert all(any(w.startswith(f"{kind},") and "shared" in w for w in digests) for kind in EXPERTS)

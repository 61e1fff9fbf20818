"""Messages and parts between real trainer ranks over gloo."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from areal_lora.distributed.store import INLINE_BYTES
from tests.support.distributed.exchange_ranks import part, received
from tests.support.distributed.spawn import run_ranks

CASES = [[0, 1, 2, 3], [0, 0, 2, 2], [0, 2, 0, 2], [0, 0, 0, 0], [3, 1, 1, 1]]


@pytest.mark.slow
def test_each_rank_receives_its_part_and_every_message(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(received, 4, tmp_path, (CASES,))):
        want = [part(of_ranks[rank]).tobytes() if rank else b"" for of_ranks in CASES]
        for size in (0, INLINE_BYTES, 3 * INLINE_BYTES + 1):
            want.append(np.random.default_rng(size).bytes(size))
            want.append(b"|".join(bytes([each]) * size * each for each in range(4)))
        assert found == want

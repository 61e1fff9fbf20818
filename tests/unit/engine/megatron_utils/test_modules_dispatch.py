"""Keys and tokens of one routing go to the experts in the same order, and their sizes are counted once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.distributed.dispatch_ranks import dispatch
from tests.support.distributed.spawn import run_ranks


@pytest.mark.slow
def test_a_routing_that_is_dispatched_twice_is_counted_once(tmp_path: Path) -> None:
    for *found, counted in run_ranks(dispatch, 2, tmp_path, (), timeout_s=200.0):
        assert counted[0] == 2, "of two passes"
        for ours, plain in zip(found[::2], found[1::2], strict=True):
            assert len(ours[0]) == len(ours[1]) == ours[2].sum() > 0
            assert all(np.array_equal(one, other) for one, other in zip(ours, plain, strict=True))

"""LoRA takes the normalised input that Transformer Engine's layers return, under tensor and sequence parallelism."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.distributed.spawn import run_ranks
from tests.support.distributed.te_ranks import COLUMN, HIDDEN, RANK, TOKENS, TP, adapted, numbers, whole

pytestmark = pytest.mark.slow

SEED = 11


@pytest.mark.parametrize("overlap", [False, True], ids=["Bridge asks for the whole", "Bridge asks for a part"])
def test_outputs_and_gradients_are_those_of_the_whole_model(overlap: bool, tmp_path: Path) -> None:
    """Bridge wants the normalised input of the whole sequence, but a rank's part where TE overlaps its gathers."""
    values = run_ranks(adapted, TP, tmp_path, (SEED, overlap))
    for v in values:
        shapes = v["kept"].tolist()
        assert [TOKENS // TP, HIDDEN] in shapes
        assert [TOKENS, RANK] in shapes, "gathered after lora_A"
        assert [TOKENS, HIDDEN] not in shapes, "gathered before lora_A"
    want = {name: t.numpy() for name, t in whole(numbers(SEED)).items()}
    for name, expected in want.items():
        found = [v[name] for v in values]
        side, _, layer = name.partition(".")
        if side in ("out", "x") or (side == "b" and layer in COLUMN):
            got = np.concatenate(found)  # pieces along the sequence, or of the outputs
        elif side == "a" and layer not in COLUMN:
            got = np.concatenate(found, axis=1)  # pieces of the inputs
        else:
            got = sum(found)  # replicated: a part on each rank
            assert not np.allclose(found[0], found[1]), f"{name}: the ranks' parts are not all that one rank has"
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(), err_msg=name)

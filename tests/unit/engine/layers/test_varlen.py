"""Attention of runs over runs: blocks of padding, and the plain kernel against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_lora.engine.layers import varlen
from areal_lora.engine.layers.varlen import VarlenRuns

CPU = torch.device("cpu")
LENGTHS = {"queries": np.array([100, 60, 50, 20, 3]), "keys": np.array([4, 9, 4, 1, 2])}


def test_blocks_hold_runs_of_similar_length() -> None:
    """A long answer does not pad the short ones beyond twice their length."""
    blocks = VarlenRuns(LENGTHS["queries"], LENGTHS["keys"], CPU).blocks
    assert [(tuple(b.queries.shape), tuple(b.keys.shape)) for b in blocks] == [
        ((3, 100), (3, 9)),
        ((1, 20), (1, 1)),
        ((1, 3), (1, 2)),
    ]
    assert [b.real.sum(1).tolist() for b in blocks] == [[100, 60, 50], [20], [3]]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 7)])
def test_devices_without_a_kernel_compute_the_same(
    causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    print("seed 5")
    keys = LENGTHS["queries"] + (0 if window is None else 11) if causal else LENGTHS["keys"]
    at = VarlenRuns(LENGTHS["queries"], keys, CPU)
    q = torch.randn(int(LENGTHS["queries"].sum()), 4, 8)
    k, v = (torch.randn(int(keys.sum()), 2, 8) for _ in range(2))
    d_out = torch.randn_like(q)

    def both() -> list[torch.Tensor]:
        out, lse, _ = varlen.forward(at, q, k, v, causal=causal, scale=0.2, window=window)
        more = varlen.backward(at, d_out, q, k, v, out, lse, (), causal=causal, scale=0.2, window=window)
        return [out, lse, *more]

    want = both()
    monkeypatch.setattr(varlen, "_block_forward", varlen._plain_forward)
    monkeypatch.setattr(varlen, "_block_backward", varlen._plain_backward)
    for got, expected in zip(both(), want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)

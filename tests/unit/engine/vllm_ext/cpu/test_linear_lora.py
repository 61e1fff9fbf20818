"""LoRA of linear layers on CPU against a token-by-token float64 loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_lora.engine.vllm_ext.cpu import linear_lora
from areal_lora.engine.vllm_ext.cpu.linear_lora import BatchSlots, add_lora

SLOTS, RANK, IN, WIDTHS = 3, 4, 16, (12, 6, 6)


@pytest.mark.parametrize(
    "slots", [[-1] * 6, [2] * 6, [0, 0, 1, 1, 2, 2], [-1, 2, -1, 0, 2, 0], [2, -1, -1, 2, 2, -1]], ids=str
)
@pytest.mark.parametrize("compiled", [True, False])
def test_matches_float64_loop(monkeypatch: pytest.MonkeyPatch, slots: list[int], compiled: bool) -> None:
    monkeypatch.setattr(linear_lora, "looped", lambda _: compiled)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, IN, generator=g), torch.randn(6, sum(WIDTHS), generator=g)
    lora_a = [torch.randn(SLOTS, 1, RANK, IN, generator=g) for _ in WIDTHS]
    lora_b = [torch.randn(SLOTS, 1, w, RANK, generator=g) for w in WIDTHS]
    want = y.double().clone()
    for t, s in enumerate(slots):
        at = 0
        for a, b, width in zip(lora_a, lora_b, WIDTHS):
            if s >= 0:
                want[t, at : at + width] += b[s, 0].double() @ (a[s, 0].double() @ x[t].double())
            at += width
    untouched = y.clone()
    add_lora(y, x, lora_a, lora_b, WIDTHS, BatchSlots.of(np.array(slots)))
    torch.testing.assert_close(y.double(), want, atol=1e-4, rtol=1e-5)
    base = np.array(slots) < 0
    assert torch.equal(y[base], untouched[base])


def test_runs_are_slices_and_scattered_rows_are_numbers() -> None:
    batch = BatchSlots.of(np.array([1, 1, -1, 0, 2, 0]))
    assert batch.groups.tolist() == [-1, 0, 1, 2]
    assert batch.groups[batch.group_of].tolist() == [1, 1, -1, 0, 2, 0]
    rows = {s.slot: s.rows for s in batch.by_slot}
    assert rows[1] == slice(0, 2)
    assert rows[0].tolist() == [3, 5]

"""LoRA of rows against float64 products, one row at a time: compiled loops in float32, torch's in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from areal_lora.engine.vllm_ext.cpu_lora import BatchSlots, add_lora_rows

T, IN, EXPERTS = 23, 40, 3


def stacks(shared_a: str, rank: int, widths: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    g = torch.Generator().manual_seed(rank)
    lora_a = [torch.randn(2, EXPERTS, rank, IN, generator=g) for _ in widths]
    if shared_a == "one":
        lora_a = [lora_a[0].clone() for _ in widths]
    elif shared_a == "of one slot":
        for a in lora_a[1:]:
            a[1] = lora_a[0][1]
    return lora_a, [torch.randn(2, EXPERTS, width, rank, generator=g) for width in widths]


@pytest.mark.parametrize("rank", [1, 6, 8])
@pytest.mark.parametrize("widths", [(20,), (130, 7, 129)], ids=str)
@pytest.mark.parametrize("shared_a", ["none", "one", "of one slot"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_rows_of_cells(rank: int, widths: tuple[int, ...], shared_a: str, dtype: torch.dtype, tolerance: float) -> None:
    """Cells of no, one, and several rows, in any order; rows of no cell stay as they are."""
    lora_a, lora_b = stacks(shared_a, rank, widths)
    lora_a, lora_b = ([w.to(dtype) for w in stack] for stack in (lora_a, lora_b))
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(T, IN, generator=g).to(dtype), torch.randn(T, sum(widths), generator=g).to(dtype)
    rows = torch.randperm(T, generator=g).numpy()[:19]
    cells = np.array([(1, 0, 0, 1), (0, 2, 1, 8), (1, 2, 8, 8), (0, 0, 8, 10), (1, 1, 10, 19)])
    want = y.double()
    for slot, expert, first, end in cells.tolist():
        for row in rows[first:end].tolist():
            parts = [
                b[slot, expert].double() @ (a[slot, expert].double() @ x[row].double())
                for a, b in zip(lora_a, lora_b, strict=True)
            ]
            want[row] += torch.cat(parts)
    add_lora_rows(y, x, rows, cells, lora_a, lora_b)
    torch.testing.assert_close(y.double(), want, atol=10 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots", [[-1] * 6, [2] * 6, [0, 0, 1, 1, 2, 2], [-1, 2, -1, 0, 2, 0], [2, -1, -1, 2, 2, -1]], ids=str
)
def test_tokens_of_a_batch(slots: list[int], dtype: torch.dtype) -> None:
    """A linear layer has one expert; tokens without an adapter stay as they are."""
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, IN, generator=g).to(dtype), torch.randn(6, 24, generator=g).to(dtype)
    lora_a = [torch.randn(3, 1, 4, IN, generator=g).to(dtype) for _ in (12, 6, 6)]
    lora_b = [torch.randn(3, 1, width, 4, generator=g).to(dtype) for width in (12, 6, 6)]
    want = y.double()
    for t, s in enumerate(slots):
        if s >= 0:
            want[t] += torch.cat(
                [b[s, 0].double() @ (a[s, 0].double() @ x[t].double()) for a, b in zip(lora_a, lora_b)]
            )
    untouched, batch = y.clone(), BatchSlots.of(np.array(slots))
    assert batch.groups[batch.group_of].tolist() == slots
    add_lora_rows(y, x, batch.rows, batch.cells, lora_a, lora_b)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), want, atol=10 * tolerance, rtol=tolerance)
    base = np.array(slots) < 0
    assert torch.equal(y[base], untouched[base])


def test_a_row_does_not_depend_on_the_others_of_its_cell() -> None:
    """Not by a bit: an answer is the same whatever else is in its batch."""
    lora_a, lora_b = stacks("one", 8, (130, 7))
    g = torch.Generator().manual_seed(2)
    x, rows = torch.randn(T, IN, generator=g), np.arange(T)
    together, alone = torch.zeros(T, 137), torch.zeros(T, 137)
    add_lora_rows(together, x, rows, np.array([(0, 1, 0, T)]), lora_a, lora_b)
    for i in range(T):
        add_lora_rows(alone, x, rows, np.array([(0, 1, i, i + 1)]), lora_a, lora_b)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_is_bad_alone(bad: float) -> None:
    lora_a, lora_b = stacks("none", 8, (20,))
    x, y = torch.ones(T, IN), torch.zeros(T, 20)
    x[4, 3] = bad
    add_lora_rows(y, x, np.arange(T), np.array([(0, 0, 0, T)]), lora_a, lora_b)
    assert not y[4].isfinite().any()
    assert y[torch.arange(T) != 4].isfinite().all()

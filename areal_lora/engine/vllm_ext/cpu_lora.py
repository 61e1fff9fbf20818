"""LoRA on CPUs of a batch whose tokens use different adapters: linear layers and mixtures of experts.

vLLM's own path for linear layers gathers the weights of every token and lets tokens without an adapter (index -1)
read the last slot. LoRA matrices are so small that a call of a BLAS costs more than its arithmetic. In float32 the
compiled loops take rows of any number and place: no copies, no padding, no call for every adapter and expert. They
compute one row at a time: what LLVM makes of a block of rows sums in another order than what it makes of one row, on
CPUs without AVX-512, and then an answer would depend on the others of its batch.

A cell is a run of entries of ``rows`` with one adapter slot and one expert: int64 (slot, expert, first, end).

For experts vLLM has GPU kernels only. `moe_lora` serves the batch in one pass. With ``s`` the adapter slot of a
token, ``e`` one of its experts and ``w`` the routing weight::

    h = x W1[e]^T + [ x Ag[s,e]^T Bg[s,e]^T | x Au[s,e]^T Bu[s,e]^T ]
    a = silu(h_gate) * h_up
    y = a W2[e]^T + a Ad[s,e]^T Bd[s,e]^T          out = sum over experts of w * y

The pairs (token, expert) are gathered in rows, those of one expert and one adapter slot (a cell) next
to each other. Base weights are multiplied once per expert that has tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from areal_lora.weight_sync.kernels import compiled

_COLUMNS = 128  # of lora_B that are transposed at a time; they stay in the first-level cache
_MATH = {"reassoc", "contract", "nsz"}  # sums in any order; NaN and infinity stay what they are
_IDS, _ROWS, _STACK = "int64[:, ::1]", "int64[::1]", "float32[:, :, :, ::1]"
_MATRIX = "float32[:, ::1]"


@compiled(fastmath=_MATH)
def _shrink(low: Any, x: Any, rows: Any, first: int, end: int, a: Any) -> None:
    """``low[i] = a x[rows[i]]`` for ``first <= i < end``."""
    rank, width = a.shape
    for i in range(first, end):
        xi = x[rows[i]]
        for j in range(rank):
            aj = a[j]
            total = np.float32(0)
            for h in range(width):
                total += xi[h] * aj[h]
            low[i, j] = total


@compiled(fastmath=_MATH)
def _expand(y: Any, start: int, low: Any, rows: Any, first: int, end: int, bt: Any, n: int) -> None:
    """``y[rows[i], start : start + n] += low[i] bt[:, :n]``; a multiple of four ranks."""
    for i in range(first, end):
        yi, p = y[rows[i], start : start + n], low[i]
        for j in range(0, len(p), 4):
            p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
            b0, b1, b2, b3 = bt[j], bt[j + 1], bt[j + 2], bt[j + 3]
            for o in range(n):
                yi[o] += (p0 * b0[o] + p1 * b1[o]) + (p2 * b2[o] + p3 * b3[o])


@compiled(f"void({_MATRIX}, int64, int64, {_MATRIX}, {_ROWS}, {_IDS}, {_STACK}, {_STACK}, {_MATRIX})", fastmath=_MATH)
def _add_part(y: Any, at: int, width: int, x: Any, rows: Any, cells: Any, a: Any, b: Any, low: Any) -> None:
    """One part of ``add_lora_rows``. ``low`` [rows, ranks, a multiple of four] is for the products with ``a``."""
    bt = np.zeros((low.shape[1], _COLUMNS), np.float32)
    for c in range(len(cells)):
        slot, expert, first, end = cells[c]
        a_cell, b_cell = a[slot, expert if a.shape[1] > 1 else 0], b[slot, expert if b.shape[1] > 1 else 0]
        _shrink(low, x, rows, first, end, a_cell)
        for start in range(0, width, _COLUMNS):
            n = min(_COLUMNS, width - start)
            for o in range(n):
                for j in range(b_cell.shape[1]):
                    bt[j, o] = b_cell[start + o, j]
            _expand(y, at + start, low, rows, first, end, bt, n)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSlots:
    """Adapter slots of the T tokens of a batch: token t uses ``groups[group_of[t]]``, none where that is negative."""

    groups: np.ndarray  # [G] int64, sorted
    group_of: np.ndarray  # [T] int64
    rows: np.ndarray  # [tokens with an adapter] int64, by slot
    cells: np.ndarray  # [slots, 4] int64

    @classmethod
    def of(cls, slots: np.ndarray) -> "BatchSlots":
        """``slots`` [T] int, negative for tokens without an adapter."""
        groups, group_of, counts = np.unique(slots, return_inverse=True, return_counts=True)
        used = groups >= 0
        ends = counts[used].cumsum()
        cells = np.stack([groups[used], np.zeros_like(ends), ends - counts[used], ends], axis=1)
        rows = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
        return cls(groups=groups, group_of=group_of, rows=rows, cells=cells.astype(np.int64))


def add_lora_rows(
    y: torch.Tensor,
    x: torch.Tensor,
    rows: np.ndarray,
    cells: np.ndarray,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
) -> None:
    """``y[row, part] += x[row] A^T B^T`` in place, for every part of a merged projection.

    ``y`` [T, all widths], contiguous, ``x`` [T, in], one type; per part ``lora_a`` [S, E or 1, r, in] and ``lora_b``
    [S, E or 1, width, r]. ``rows`` int64 [n] are different from each other; ``cells`` int64 [C, 4] divide them.
    """
    if not len(cells):
        return
    at = 0
    if y.dtype != torch.float32:  # numba has no type of 16 bits: two products per cell and part
        for a, b in zip(lora_a, lora_b, strict=True):
            part = y[:, at : at + b.shape[2]]
            for slot, expert, first, end in cells.tolist():
                cell = torch.from_numpy(rows[first:end])
                a_cell, b_cell = a[slot, expert if a.shape[1] > 1 else 0], b[slot, expert if b.shape[1] > 1 else 0]
                part.index_add_(0, cell, x[cell] @ a_cell.t() @ b_cell.t())
            at += b.shape[2]
        return
    y_, x_ = y.numpy(), x.contiguous().numpy()
    low = np.zeros((len(rows), -(-lora_a[0].shape[2] // 4) * 4), dtype=np.float32)
    for a, b in zip(lora_a, lora_b, strict=True):
        a_, b_ = a.contiguous().numpy(), b.contiguous().numpy()
        _add_part(y_, at, b_.shape[2], x_, rows, cells, a_, b_, low)
        at += b_.shape[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertAdapters:
    """Stacked LoRA weights of one layer's E experts in S slots, rank r, scale folded into B.

    ``gate_a, up_a`` [S, E, r, H]; ``gate_b, up_b`` [S, E, I, r]; ``down_a`` [S, E, r, I];
    ``down_b`` [S, E, H, r]. An expert dimension of 1 is shared by all experts.
    """

    gate_a: torch.Tensor
    up_a: torch.Tensor
    gate_b: torch.Tensor
    up_b: torch.Tensor
    down_a: torch.Tensor
    down_b: torch.Tensor


Runs = Sequence[tuple[int, slice]]
"""Experts, and the rows that go to each: the rows follow each other."""


ExpertProduct = Callable[[torch.Tensor, Runs], torch.Tensor]
"""Of ``x`` [P, K] and runs: ``x[rows] @ W[expert]^T`` for every run, [P, N], with a W [E, N, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """The P pairs (token, expert) of a batch in rows, by expert, then by adapter slot, then by token."""

    source: np.ndarray  # [P] int64: token of a row
    row_of: np.ndarray  # [T, K] int64: row of a pair; any row for experts of another rank
    runs: Runs
    cells: np.ndarray  # [C, 4] int64, of pairs with an adapter

    @classmethod
    def of(cls, expert_ids: np.ndarray, groups: np.ndarray, group_of: np.ndarray) -> "ExpertPairs":
        """Arguments as for `cpu_lora`."""
        flat = expert_ids.ravel()
        held = np.flatnonzero(flat >= 0)
        tokens = held // expert_ids.shape[1]
        keys = flat[held] * len(groups) + group_of[tokens]
        order = keys.argsort(kind="stable")
        row_of = np.zeros(flat.size, dtype=np.int64)
        row_of[held[order]] = np.arange(len(held))
        used, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
        expert, group = np.divmod(used, len(groups))
        cells = np.stack([groups[group], expert, starts, starts + counts], axis=1)
        experts, firsts = np.unique(expert, return_index=True)
        bounds = [*starts[firsts].tolist(), len(held)]
        return cls(
            source=tokens[order],
            row_of=row_of.reshape(expert_ids.shape),
            runs=[(e, slice(a, b)) for e, a, b in zip(experts.tolist(), bounds, bounds[1:], strict=False)],
            cells=cells[cells[:, 0] >= 0],
        )


def moe_lora(
    x: torch.Tensor,
    w1: ExpertProduct,
    w2: ExpertProduct,
    routing: torch.Tensor,
    expert_ids: np.ndarray,
    adapters: ExpertAdapters | None,
    groups: np.ndarray,
    group_of: np.ndarray,
) -> torch.Tensor:
    """The layer's output for T tokens [T, H].

    ``x`` [T, H]; ``w1`` multiplies by [E, 2I, H] (gate rows, then up rows), ``w2`` by [E, H, I];
    ``routing`` [T, K]; ``expert_ids`` [T, K] int64, negative for experts of another rank; token t uses
    adapter slot ``groups[group_of[t]]``, none if that is negative (``np.unique`` of the slots makes both).
    """
    if expert_ids.max(initial=-1) < 0:
        return torch.zeros_like(x)
    pairs = ExpertPairs.of(expert_ids, groups, group_of)
    rows = np.arange(len(pairs.source))
    block = x.index_select(0, torch.from_numpy(pairs.source))  # [P, H]
    h = w1(block, pairs.runs)
    if adapters is not None:
        gate_up = (adapters.gate_a, adapters.up_a), (adapters.gate_b, adapters.up_b)
        add_lora_rows(h, block, rows, pairs.cells, *gate_up)
    gate, up = h.chunk(2, dim=1)
    a = F.silu(gate).mul_(up)
    y = w2(a, pairs.runs)
    if adapters is not None:
        add_lora_rows(y, a, rows, pairs.cells, (adapters.down_a,), (adapters.down_b,))
    weights = routing.to(y.dtype)
    if expert_ids.min() < 0:
        weights = weights * torch.from_numpy(expert_ids >= 0)
    # A bag is a token: this gathers the rows of its pairs and adds them up, weighted, in one pass.
    return F.embedding_bag(torch.from_numpy(pairs.row_of), y, per_sample_weights=weights, mode="sum")

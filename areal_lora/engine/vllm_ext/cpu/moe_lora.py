"""Compute a mixture-of-experts layer with LoRA on CPUs (vLLM has GPU kernels only).

One pass serves a batch whose tokens use different adapters. With ``s`` the adapter slot of a
token, ``e`` one of its experts and ``w`` the routing weight::

    h = x W1[e]^T + [ x Ag[s,e]^T Bg[s,e]^T | x Au[s,e]^T Bu[s,e]^T ]
    a = silu(h_gate) * h_up
    y = a W2[e]^T + a Ad[s,e]^T Bd[s,e]^T          out = sum over experts of w * y

The pairs (token, expert) are gathered so that each cell, the pairs of one expert and one slot,
is a run of rows. Base weights are multiplied once per expert that has tokens. LoRA matrices are
so small that a call costs more than the arithmetic: cells of up to ``cap`` pairs are in a padded
block, where one ``bmm`` computes all experts; only larger cells take a call each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

# These decide speed only, not results. Measured with one thread of a Zen 5 core; a call in
# bfloat16 goes through oneDNN, which looks its kernel up each time.
CALL_S = {torch.float32: 2e-6, torch.bfloat16: 11e-6}
LORA_FLOPS = {torch.float32: 8e10, torch.bfloat16: 3e11}
BASE_FLOPS = {torch.float32: 2e11, torch.bfloat16: 4e11}
BYTES_PER_S = 4e10


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

    @classmethod
    def none(cls, w2: torch.Tensor) -> ExpertAdapters:
        """Of no slot, for experts whose second weights ``w2`` are [E, H, I]."""
        experts, hidden, inter = w2.shape
        up_a, gate_b = w2.new_empty(0, experts, 1, hidden), w2.new_empty(0, experts, inter, 1)
        down_a, down_b = w2.new_empty(0, experts, 1, inter), w2.new_empty(0, experts, hidden, 1)
        return cls(gate_a=up_a, up_a=up_a, gate_b=gate_b, up_b=gate_b, down_a=down_a, down_b=down_b)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRuns:
    """Runs of rows, ascending and disjoint, each with the expert its rows go to.

    ``sizes`` alternates rows between runs and rows of a run, and begins and ends with the former.
    """

    experts: Sequence[int]
    sizes: Sequence[int]

    @classmethod
    def at(cls, experts: np.ndarray, begins: np.ndarray, ends: np.ndarray, n_rows: int) -> ExpertRuns:
        bounds = np.stack([begins, ends], axis=1).ravel()
        return cls(experts=experts.tolist(), sizes=np.diff(bounds, prepend=0, append=n_rows).tolist())

    def of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = x.split(self.sizes)
        return parts[1::2]


class ExpertProduct(Protocol):
    """``out[run] = x[run] @ W[expert]^T`` for every run; W [E, N, K], ``x`` [P, K], ``out`` [P, N]."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor, expert_runs: ExpertRuns) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCosts:
    """Costs in seconds of the padded block and of a call per cell."""

    call_s: float  # all products of one cell
    row_s: float  # LoRA of one row of the block
    base_s: float  # base product of one row; 0 where padding needs none
    read_s: float  # LoRA weights of one cell

    @classmethod
    def of(cls, dtype: torch.dtype, hidden: int, inter: int, rank: int, n_groups: int) -> CellCosts:
        parameters = 3 * rank * (hidden + inter)
        kind = torch.float32 if dtype == torch.float32 else torch.bfloat16
        moved = (2 * hidden + 5 * inter) * dtype.itemsize  # gather, gate, up, their product
        return cls(
            call_s=6 * CALL_S[kind],
            row_s=2 * parameters / LORA_FLOPS[kind] + moved / BYTES_PER_S,
            # With one cell per expert the padding is at the end, where the base product stops before it.
            base_s=6 * hidden * inter / BASE_FLOPS[kind] if n_groups > 1 else 0.0,
            read_s=parameters * dtype.itemsize / BYTES_PER_S,
        )


def block_cap(counts: np.ndarray, costs: CellCosts) -> int:
    """Choose the rows per cell of the padded block that make the LoRA of cells with ``counts`` pairs cheapest.

    Cells with more pairs are multiplied one by one; 0 means all cells.
    """
    caps, cells = np.unique(np.append(counts, 0), return_counts=True)
    larger = len(counts) + 1 - cells.cumsum()
    larger_rows = counts.sum() - (caps * cells).cumsum()
    # The block's weights are copied first: read, written, read again.
    block = len(counts) * (caps * (costs.row_s + costs.base_s) + (caps > 0) * 2 * costs.read_s)
    return int(caps[(block + larger * (costs.call_s + costs.read_s) + larger_rows * costs.base_s).argmin()])


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRuns:
    """Cells of one adapter slot that are multiplied one by one."""

    slot: int
    expert_runs: ExpertRuns

    def add(self, out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """``out[run] += x[run] A^T B^T``; ``a`` [S, E or 1, r, in], ``b`` [S, E or 1, width, r]."""
        a_t, b_t = a[self.slot].transpose(1, 2), b[self.slot].transpose(1, 2)
        shared_a, shared_b = a.shape[1] == 1, b.shape[1] == 1
        for expert, xs, ys in zip(
            self.expert_runs.experts, self.expert_runs.of(x), self.expert_runs.of(out), strict=True
        ):
            ys.addmm_(xs @ a_t[0 if shared_a else expert], b_t[0 if shared_b else expert])


@dataclass(frozen=True, slots=True, kw_only=True)
class CellBlock:
    """Cells of one adapter slot at the head of the rows: ``view`` [experts, groups, cap], all of ``group``."""

    slot: int
    group: int
    experts: torch.Tensor  # [experts] int64
    view: tuple[int, int, int]

    def add(self, out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """See ``CellRuns``."""
        low = torch.bmm(self._rows(x), self._weights(a))
        self._rows(out).baddbmm_(low, self._weights(b))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        experts, groups, cap = self.view
        return x[: experts * groups * cap].view(*self.view, -1)[:, self.group]

    def _weights(self, w: torch.Tensor) -> torch.Tensor:
        # Reading cold weights in one copy is faster than within bmm, even if every expert is needed.
        held = w[self.slot]
        held = held.index_select(0, self.experts) if w.shape[1] > 1 else held.expand(len(self.experts), -1, -1)
        return held.transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLayout:
    """Rows of the pairs of a batch: first the padded block, then larger cells."""

    source: np.ndarray  # [rows] int64: token of a row; 0 for padding, whose results are never read
    row_of: np.ndarray  # [T, K] int64: row of a pair; any row for experts of another rank
    expert_runs: ExpertRuns
    cells: Sequence[CellRuns | CellBlock]


def lay_out(
    expert_ids: np.ndarray, groups: np.ndarray, group_of: np.ndarray, n_experts: int, costs: CellCosts
) -> CellLayout:
    """Assign rows to all pairs. Arguments as for ``moe_lora``; at least one id is not negative."""
    n_groups, top_k = len(groups), expert_ids.shape[1]
    n_cells = n_experts * n_groups
    # numpy sorts 16-bit integers in linear time.
    key = (expert_ids * n_groups + group_of[:, None]).ravel().astype(np.int16 if n_cells < 2**15 else np.int64)
    order = key.argsort(kind="stable")
    order = order[np.searchsorted(key, 0, sorter=order) :]
    cell_of = key[order]
    counts = np.bincount(cell_of, minlength=n_cells)
    adapted = counts.reshape(n_experts, n_groups)[:, groups >= 0]
    cap = block_cap(adapted[adapted.any(axis=1)].ravel(), costs)
    experts = np.flatnonzero(((adapted > 0) & (adapted <= cap)).any(axis=1))
    place = np.full(n_experts, -1)  # of an expert in the block
    place[experts] = np.arange(len(experts))
    block_begin = (np.repeat(place, n_groups) * n_groups + np.tile(np.arange(n_groups), n_experts)) * cap
    in_block = (block_begin >= 0) & (counts <= cap)
    runs = np.where(in_block, 0, counts)
    n_block = len(experts) * n_groups * cap
    begin = np.where(in_block, block_begin, n_block + runs.cumsum() - runs)

    rows = np.arange(len(order)) + (begin - counts.cumsum() + counts)[cell_of]
    source = np.zeros(n_block + int(runs.sum()), dtype=np.int64)
    source[rows] = order // top_k
    row_of = np.full(expert_ids.shape, rows[0], dtype=np.int64)
    row_of.ravel()[order] = rows

    cells: list[CellRuns | CellBlock] = []
    for group, slot in enumerate(groups.tolist()):
        if slot < 0:
            continue
        if n_block:
            view = (len(experts), n_groups, cap)
            cells.append(CellBlock(slot=slot, group=group, experts=torch.from_numpy(experts), view=view))
        own = np.flatnonzero(runs[group::n_groups])
        if len(own):
            first, n = begin[group::n_groups][own], runs[group::n_groups][own]
            cells.append(CellRuns(slot=slot, expert_runs=ExpertRuns.at(own, first, first + n, len(source))))
    return CellLayout(
        source=source,
        row_of=row_of,
        cells=cells,
        expert_runs=_expert_runs(begin, np.where(in_block, counts, 0), runs, n_groups, len(source)),
    )


def _expert_runs(begin: np.ndarray, in_block: np.ndarray, runs: np.ndarray, n_groups: int, n_rows: int) -> ExpertRuns:
    """One run per expert in the block, padding between its cells included, and one among the larger cells."""
    experts, begins, ends = [], [], []
    for n in (in_block, runs):
        cells = np.flatnonzero(n)
        expert = cells // n_groups
        first = np.flatnonzero(np.diff(expert, prepend=-1))
        last = np.append(first[1:], len(cells))[: len(first)] - 1
        experts.append(expert[first])
        begins.append(begin[cells[first]])
        ends.append(begin[cells[last]] + n[cells[last]])
    return ExpertRuns.at(np.concatenate(experts), np.concatenate(begins), np.concatenate(ends), n_rows)


def moe_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    w1: ExpertProduct,
    w2: ExpertProduct,
    routing: torch.Tensor,
    expert_ids: np.ndarray,
    adapters: ExpertAdapters,
    groups: np.ndarray,
    group_of: np.ndarray,
) -> None:
    """Write the layer's output for T tokens into ``out`` [T, H].

    ``x`` [T, H]; ``w1`` multiplies by [E, 2I, H] (gate rows, then up rows), ``w2`` by [E, H, I];
    ``routing`` [T, K]; ``expert_ids`` [T, K] int, negative for experts of another rank; token t uses
    adapter slot ``groups[group_of[t]]``, none if that is negative (``np.unique`` of the slots makes both).
    """
    _, n_experts, inter, rank = adapters.gate_b.shape
    if expert_ids.max(initial=-1) < 0:
        out.zero_()
        return
    costs = CellCosts.of(x.dtype, x.shape[1], inter, rank, len(groups))
    cell_layout = lay_out(expert_ids, groups, group_of, n_experts, costs)
    block = x.index_select(0, torch.from_numpy(cell_layout.source))  # [rows, H]
    h = block.new_empty(block.shape[0], 2 * inter)
    w1(h, block, cell_layout.expert_runs)
    gate, up = h[:, :inter], h[:, inter:]
    for cells in cell_layout.cells:
        cells.add(gate, block, adapters.gate_a, adapters.gate_b)
        cells.add(up, block, adapters.up_a, adapters.up_b)
    a = F.silu(gate).mul_(up)
    y = block  # no longer needed, reused
    w2(y, a, cell_layout.expert_runs)
    for cells in cell_layout.cells:
        cells.add(y, a, adapters.down_a, adapters.down_b)
    weights = routing.to(y.dtype)
    if expert_ids.min() < 0:
        weights = weights * torch.from_numpy(expert_ids >= 0)
    # A bag is a token: this gathers the rows of its pairs and adds them up, weighted, in one pass.
    out.copy_(F.embedding_bag(torch.from_numpy(cell_layout.row_of), y, per_sample_weights=weights, mode="sum"))

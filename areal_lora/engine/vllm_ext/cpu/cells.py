"""Lay the pairs (token, expert) of a batch out in rows, and add LoRA to them.

A cell is the pairs of one expert and one adapter slot, a run of rows. LoRA matrices are so small that a call costs
more than the arithmetic. In float32 a compiled loop goes over all cells (``loops``). In other types cells of up to
``cap`` pairs are in a padded block, where one ``bmm`` computes all experts; only larger cells take a call each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from areal_lora.engine.vllm_ext.cpu.loops import add_lora_rows, count_pairs, place_pairs

# These decide speed only, not results. Measured in bfloat16 with one thread of a Zen 5 core; a call
# goes through oneDNN, which looks its kernel up each time.
CALL_S = 11e-6
LORA_FLOPS = 3e11
BASE_FLOPS = 4e11
BYTES_PER_S = 4e10


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRuns:
    """Runs of rows, ascending and disjoint, each with the expert its rows go to.

    ``sizes`` are rows of parts one after the other, of which ``runs`` selects the runs.
    """

    experts: Sequence[int]
    sizes: Sequence[int]
    runs: slice

    @classmethod
    def without_gaps(cls, rows: np.ndarray) -> ExpertRuns:
        """``rows`` [E] of each expert; those without any have no run."""
        experts = np.flatnonzero(rows)
        return cls(experts=experts.tolist(), sizes=rows[experts].tolist(), runs=slice(None))

    @classmethod
    def at(cls, experts: np.ndarray, begins: np.ndarray, ends: np.ndarray, n_rows: int) -> ExpertRuns:
        bounds = np.stack([begins, ends], axis=1).ravel()
        sizes = np.diff(bounds, prepend=0, append=n_rows).tolist()  # between runs, of a run, ..., behind the last
        return cls(experts=experts.tolist(), sizes=sizes, runs=slice(1, None, 2))

    def of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        parts: Sequence[torch.Tensor] = x.split(self.sizes)
        return parts[self.runs]


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
        moved = (2 * hidden + 5 * inter) * dtype.itemsize  # gather, gate, up, their product
        return cls(
            call_s=6 * CALL_S,
            row_s=2 * parameters / LORA_FLOPS + moved / BYTES_PER_S,
            # With one cell per expert the padding is at the end, where the base product stops before it.
            base_s=6 * hidden * inter / BASE_FLOPS if n_groups > 1 else 0.0,
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


class Cells(Protocol):
    """Rows with adapters, in one of three forms."""

    def add(
        self, out: torch.Tensor, x: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor]
    ) -> None:
        """``out[row, part] += x[row] A^T B^T`` for every part, which lie side by side in ``out`` [rows, all widths].

        ``lora_a`` [S, E or 1, r, in], ``lora_b`` [S, E or 1, width, r] per part.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLoop:
    """Cells of all slots for the compiled loop; see ``loops``."""

    rows: np.ndarray  # [rows] int64, all in order
    cells: np.ndarray  # [C, 4] int64

    @classmethod
    def of(cls, counts: np.ndarray, begins: np.ndarray, groups: np.ndarray, n_rows: int) -> CellLoop:
        used = np.flatnonzero(counts)
        experts, group = np.divmod(used, len(groups))
        first = begins[used]
        cells = np.stack([groups[group], experts, first, first + counts[used]], axis=1)
        return cls(rows=np.arange(n_rows), cells=cells if groups[0] >= 0 else cells[cells[:, 0] >= 0])

    def add(
        self, out: torch.Tensor, x: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor]
    ) -> None:
        add_lora_rows(out, x, self.rows, self.cells, lora_a, lora_b)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRuns:
    """Cells of one adapter slot that are multiplied one by one."""

    slot: int
    expert_runs: ExpertRuns

    def add(
        self, out: torch.Tensor, x: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor]
    ) -> None:
        for part, a, b in _parts(out, lora_a, lora_b):
            a_t, b_t = a[self.slot].transpose(1, 2), b[self.slot].transpose(1, 2)
            shared_a, shared_b = a.shape[1] == 1, b.shape[1] == 1
            for expert, xs, ys in zip(
                self.expert_runs.experts, self.expert_runs.of(x), self.expert_runs.of(part), strict=True
            ):
                ys.addmm_(xs @ a_t[0 if shared_a else expert], b_t[0 if shared_b else expert])


@dataclass(frozen=True, slots=True, kw_only=True)
class CellBlock:
    """Cells of one adapter slot at the head of the rows: ``view`` [experts, groups, cap], all of ``group``."""

    slot: int
    group: int
    experts: torch.Tensor  # [experts] int64
    view: tuple[int, int, int]

    def add(
        self, out: torch.Tensor, x: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor]
    ) -> None:
        for part, a, b in _parts(out, lora_a, lora_b):
            low = torch.bmm(self._rows(x), self._weights(a))
            self._rows(part).baddbmm_(low, self._weights(b))

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        experts, groups, cap = self.view
        return x[: experts * groups * cap].view(*self.view, -1)[:, self.group]

    def _weights(self, w: torch.Tensor) -> torch.Tensor:
        # Reading cold weights in one copy is faster than within bmm, even if every expert is needed.
        held = w[self.slot]
        held = held.index_select(0, self.experts) if w.shape[1] > 1 else held.expand(len(self.experts), -1, -1)
        return held.transpose(1, 2)


def _parts(
    out: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    yield from zip(out.split([b.shape[2] for b in lora_b], dim=1), lora_a, lora_b, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellLayout:
    """Rows of the pairs of a batch: first the padded block, then larger cells."""

    source: np.ndarray  # [rows] int64: token of a row; 0 for padding, whose results are never read
    row_of: np.ndarray  # [T, K] int64: row of a pair; any row for experts of another rank
    expert_runs: ExpertRuns
    cells: Sequence[Cells]


def lay_out(
    expert_ids: np.ndarray, groups: np.ndarray, group_of: np.ndarray, n_experts: int, costs: CellCosts | None
) -> CellLayout:
    """Assign rows to all pairs; without ``costs`` for the compiled loop.

    ``expert_ids`` int64, otherwise arguments as for ``moe_lora.moe_lora``; at least one id is not negative.
    """
    n_groups = len(groups)
    counts = count_pairs(expert_ids, group_of, n_groups, n_experts)
    if costs is None:
        begins = counts.cumsum() - counts
        n_rows = int(counts.sum())
        source, row_of = place_pairs(expert_ids, group_of, n_groups, begins, n_rows)
        return CellLayout(
            source=source,
            row_of=row_of,
            cells=[CellLoop.of(counts, begins, groups, n_rows)],
            expert_runs=ExpertRuns.without_gaps(counts.reshape(n_experts, n_groups).sum(axis=1)),
        )
    adapted = counts.reshape(n_experts, n_groups)[:, groups >= 0]
    cap = block_cap(adapted[adapted.any(axis=1)].ravel(), costs)
    experts = np.flatnonzero(((adapted > 0) & (adapted <= cap)).any(axis=1))
    place = np.full(n_experts, -1)  # of an expert in the block
    place[experts] = np.arange(len(experts))
    block_begin = (np.repeat(place, n_groups) * n_groups + np.tile(np.arange(n_groups), n_experts)) * cap
    in_block = (block_begin >= 0) & (counts <= cap)
    runs = np.where(in_block, 0, counts)
    n_block = len(experts) * n_groups * cap
    begins = np.where(in_block, block_begin, n_block + runs.cumsum() - runs)
    n_rows = n_block + int(runs.sum())
    source, row_of = place_pairs(expert_ids, group_of, n_groups, begins, n_rows)
    return CellLayout(
        source=source,
        row_of=row_of,
        cells=list(_cells(experts, cap, runs, begins, groups, n_rows)),
        expert_runs=_expert_runs(begins, np.where(in_block, counts, 0), runs, n_groups, n_rows),
    )


def _cells(
    experts: np.ndarray, cap: int, runs: np.ndarray, begins: np.ndarray, groups: np.ndarray, n_rows: int
) -> Iterator[Cells]:
    """The cells of every slot: those of ``experts`` in the block, and the larger ones."""
    n_groups = len(groups)
    for group, slot in enumerate(groups.tolist()):
        if slot < 0:
            continue
        if len(experts):
            view = (len(experts), n_groups, cap)
            yield CellBlock(slot=slot, group=group, experts=torch.from_numpy(experts), view=view)
        own = np.flatnonzero(runs[group::n_groups])
        if len(own):
            first, n = begins[group::n_groups][own], runs[group::n_groups][own]
            yield CellRuns(slot=slot, expert_runs=ExpertRuns.at(own, first, first + n, n_rows))


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

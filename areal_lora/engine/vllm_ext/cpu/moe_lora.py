"""Compute a mixture-of-experts layer with LoRA on CPUs (vLLM has GPU kernels only).

One pass serves a batch whose tokens use different adapters. With ``s`` the adapter slot of a
token, ``e`` one of its experts and ``w`` the routing weight::

    h = x W1[e]^T + [ x Ag[s,e]^T Bg[s,e]^T | x Au[s,e]^T Bu[s,e]^T ]
    a = silu(h_gate) * h_up
    y = a W2[e]^T + a Ad[s,e]^T Bd[s,e]^T          out = sum over experts of w * y

The pairs (token, expert) are gathered in rows, those of one expert and one adapter slot (a cell, see ``loops``) next
to each other. Base weights are multiplied once per expert that has tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from areal_lora.engine.vllm_ext.cpu.loops import add_lora_rows, count_pairs, place_pairs


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
    """Runs of rows, one after the other, each with the expert its rows go to."""

    experts: Sequence[int]
    sizes: Sequence[int]

    def of(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """The rows of ``x`` [rows, ...] by run."""
        parts: Sequence[torch.Tensor] = x.split(self.sizes)
        return parts


class ExpertProduct(Protocol):
    """``out[run] = x[run] @ W[expert]^T`` for every run; W [E, N, K], ``x`` [P, K], ``out`` [P, N]."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor, expert_runs: ExpertRuns) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """The P pairs (token, expert) of a batch in rows, by expert, then by adapter slot, then by token."""

    source: np.ndarray  # [P] int64: token of a row
    row_of: np.ndarray  # [T, K] int64: row of a pair; any row for experts of another rank
    expert_runs: ExpertRuns
    rows: np.ndarray  # [P] int64, all in order
    cells: np.ndarray  # [C, 4] int64, of pairs with an adapter

    @classmethod
    def of(cls, expert_ids: np.ndarray, groups: np.ndarray, group_of: np.ndarray, n_experts: int) -> ExpertPairs:
        """``expert_ids`` int64, otherwise arguments as for `moe_lora`; at least one id is not negative."""
        n_groups = len(groups)
        counts = count_pairs(expert_ids, group_of, n_groups, n_experts)
        starts, n_rows = counts.cumsum() - counts, int(counts.sum())
        source, row_of = place_pairs(expert_ids, group_of, n_groups, starts, n_rows)
        by_expert = counts.reshape(n_experts, n_groups).sum(axis=1)
        experts, used = np.flatnonzero(by_expert), np.flatnonzero(counts)
        expert, group = np.divmod(used, n_groups)
        cells = np.stack([groups[group], expert, starts[used], starts[used] + counts[used]], axis=1)
        return cls(
            source=source,
            row_of=row_of,
            expert_runs=ExpertRuns(experts=experts.tolist(), sizes=by_expert[experts].tolist()),
            rows=np.arange(n_rows),
            cells=cells[cells[:, 0] >= 0],
        )


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
    _, n_experts, inter, _ = adapters.gate_b.shape
    expert_ids = expert_ids.astype(np.int64)
    if expert_ids.max(initial=-1) < 0:
        out.zero_()
        return
    pairs = ExpertPairs.of(expert_ids, groups, group_of, n_experts)
    block = x.index_select(0, torch.from_numpy(pairs.source))  # [P, H]
    h = block.new_empty(block.shape[0], 2 * inter)
    w1(h, block, pairs.expert_runs)
    gate_up = (adapters.gate_a, adapters.up_a), (adapters.gate_b, adapters.up_b)
    add_lora_rows(h, block, pairs.rows, pairs.cells, *gate_up)
    a = F.silu(h[:, :inter]).mul_(h[:, inter:])
    y = block  # no longer needed, reused
    w2(y, a, pairs.expert_runs)
    add_lora_rows(y, a, pairs.rows, pairs.cells, (adapters.down_a,), (adapters.down_b,))
    weights = routing.to(y.dtype)
    if expert_ids.min() < 0:
        weights = weights * torch.from_numpy(expert_ids >= 0)
    # A bag is a token: this gathers the rows of its pairs and adds them up, weighted, in one pass.
    out.copy_(F.embedding_bag(torch.from_numpy(pairs.row_of), y, per_sample_weights=weights, mode="sum"))

"""Compute a mixture-of-experts layer with LoRA on CPUs (vLLM has GPU kernels only).

One pass serves a batch whose tokens use different adapters. With ``s`` the adapter slot of a
token, ``e`` one of its experts and ``w`` the routing weight::

    h = x W1[e]^T + [ x Ag[s,e]^T Bg[s,e]^T | x Au[s,e]^T Bu[s,e]^T ]
    a = silu(h_gate) * h_up
    y = a W2[e]^T + a Ad[s,e]^T Bd[s,e]^T          out = sum over experts of w * y

The pairs (token, expert) are gathered in rows (``cells``). Base weights are multiplied once per
expert that has tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from areal_lora.engine.vllm_ext.cpu.cells import CellCosts, ExpertRuns, lay_out
from areal_lora.engine.vllm_ext.cpu.loops import looped


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


class ExpertProduct(Protocol):
    """``out[run] = x[run] @ W[expert]^T`` for every run; W [E, N, K], ``x`` [P, K], ``out`` [P, N]."""

    def __call__(self, out: torch.Tensor, x: torch.Tensor, expert_runs: ExpertRuns) -> None: ...


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
    expert_ids = expert_ids.astype(np.int64)
    smallest = expert_ids.min(initial=0)
    if smallest < 0 and expert_ids.max(initial=-1) < 0:
        out.zero_()
        return
    costs = None if looped(x.dtype) else CellCosts.of(x.dtype, x.shape[1], inter, rank, len(groups))
    cell_layout = lay_out(expert_ids, groups, group_of, n_experts, costs)
    block = x.index_select(0, torch.from_numpy(cell_layout.source))  # [rows, H]
    h = block.new_empty(block.shape[0], 2 * inter)
    w1(h, block, cell_layout.expert_runs)
    for cells in cell_layout.cells:
        cells.add(h, block, (adapters.gate_a, adapters.up_a), (adapters.gate_b, adapters.up_b))
    a = F.silu(h[:, :inter]).mul_(h[:, inter:])
    y = block  # no longer needed, reused
    w2(y, a, cell_layout.expert_runs)
    for cells in cell_layout.cells:
        cells.add(y, a, (adapters.down_a,), (adapters.down_b,))
    weights = routing.to(y.dtype)
    if smallest < 0:
        weights = weights * torch.from_numpy(expert_ids >= 0)
    # A bag is a token: this gathers the rows of its pairs and adds them up, weighted, in one pass.
    out.copy_(F.embedding_bag(torch.from_numpy(cell_layout.row_of), y, per_sample_weights=weights, mode="sum"))

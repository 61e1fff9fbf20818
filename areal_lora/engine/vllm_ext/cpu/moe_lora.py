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

from areal_lora.engine.vllm_ext.cpu.loops import add_lora_rows


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


class ExpertProduct(Protocol):
    """``x[rows] @ W[expert]^T`` for every run; W [E, N, K], ``x`` [P, K], result [P, N]."""

    def __call__(self, x: torch.Tensor, runs: Runs) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """The P pairs (token, expert) of a batch in rows, by expert, then by adapter slot, then by token."""

    source: np.ndarray  # [P] int64: token of a row
    row_of: np.ndarray  # [T, K] int64: row of a pair; any row for experts of another rank
    runs: Runs
    cells: np.ndarray  # [C, 4] int64, of pairs with an adapter

    @classmethod
    def of(cls, expert_ids: np.ndarray, groups: np.ndarray, group_of: np.ndarray) -> ExpertPairs:
        """Arguments as for `moe_lora`."""
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

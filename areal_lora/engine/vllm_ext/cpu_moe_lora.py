"""Mixture-of-experts layer with LoRA in plain torch, for CPUs (vLLM has GPU kernels only).

One pass serves a batch whose tokens use different adapters. With ``s`` the adapter slot of a
token, ``e`` one of its experts and ``w`` the routing weight::

    h = x W1[e]^T + [ x Ag[s,e]^T Bg[s,e]^T | x Au[s,e]^T Bu[s,e]^T ]
    a = silu(h_gate) * h_up
    y = a W2[e]^T + a Ad[s,e]^T Bd[s,e]^T          out = sum over experts of w * y

Small matrices make dispatch the cost, not arithmetic. So pairs (token, expert) are gathered
into a padded ``[E, groups * cap, H]`` block, where every product is one ``bmm``; only a skewed
routing, which would make the block mostly padding, goes expert by expert instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

MAX_PADDING = 4  # padded rows per real pair beyond which the expert-by-expert loop is faster


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


def moe_lora(
    out: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    routing: torch.Tensor,
    expert_ids: np.ndarray,
    adapters: ExpertAdapters,
    groups: np.ndarray,
    group_of: np.ndarray,
) -> None:
    """Write the layer's output for T tokens into ``out`` [T, H].

    ``x`` [T, H]; ``w1`` [E, 2I, H] (gate rows, then up rows); ``w2`` [E, H, I]; ``routing``
    [T, K]; ``expert_ids`` [T, K] int, negative for experts of another rank; token t uses adapter
    slot ``groups[group_of[t]]``, none if that is negative (``np.unique`` of the slots makes both).
    """
    n_experts = w1.shape[0]
    top_k = expert_ids.shape[1]
    # Pairs sorted by (expert, slot): both forms below see each expert's tokens side by side.
    key = expert_ids.reshape(-1).astype(np.int64) * len(groups) + group_of.repeat(top_k)
    order = key.argsort(kind="stable")
    order = order[np.searchsorted(key[order], 0) :]
    n_pairs = len(order)
    if n_pairs == 0:
        out.zero_()
        return
    counts = np.bincount(key[order], minlength=n_experts * len(groups))  # [E * groups]
    used = groups.tolist()
    cap = int(counts.max())
    tokens = order // top_k
    if counts.size * cap <= MAX_PADDING * n_pairs:
        starts = counts.cumsum() - counts
        rank_in_cell = np.arange(n_pairs) - starts.repeat(counts)
        place = key[order] * cap + rank_in_cell
        source = np.zeros(counts.size * cap, dtype=np.int64)  # padding computes token 0 and is never read
        source[place] = tokens
        block = x[torch.from_numpy(source)].view(n_experts, len(used) * cap, -1)
        y = _padded(block, w1, w2, adapters, used, cap).view(counts.size * cap, -1)
    else:
        place = np.arange(n_pairs)
        y = _by_expert(x[torch.from_numpy(tokens)], w1, w2, adapters, used, counts.reshape(n_experts, -1))
    if n_pairs == expert_ids.size:
        back = np.empty(n_pairs, dtype=np.int64)
        back[order] = place
        pairs = y[torch.from_numpy(back)].view(*expert_ids.shape, -1)  # [T, K, H]
        torch.bmm(routing.to(y.dtype).unsqueeze(1), pairs, out=out.unsqueeze(1))
    else:
        weights = routing.reshape(-1)[torch.from_numpy(order)].to(y.dtype).unsqueeze(1)
        out.zero_().index_add_(0, torch.from_numpy(tokens), y[torch.from_numpy(place)] * weights)


def _padded(
    block: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, adapters: ExpertAdapters, used: list[int], cap: int
) -> torch.Tensor:
    """All pairs at once; ``block`` [E, groups * cap, H] holds group g in rows g*cap..(g+1)*cap."""
    inter = w2.shape[2]
    h = torch.bmm(block, w1.transpose(1, 2))  # [E, groups * cap, 2I]
    lora = [(s, slice(g * cap, (g + 1) * cap)) for g, s in enumerate(used) if s >= 0]
    for slot, rows in lora:
        xs = block[:, rows]
        _add_bmm(h[:, rows, :inter], xs, adapters.gate_a[slot], adapters.gate_b[slot])
        _add_bmm(h[:, rows, inter:], xs, adapters.up_a[slot], adapters.up_b[slot])
    a = F.silu(h[..., :inter]).mul_(h[..., inter:])
    y = torch.bmm(a, w2.transpose(1, 2))  # [E, groups * cap, H]
    for slot, rows in lora:
        _add_bmm(y[:, rows], a[:, rows], adapters.down_a[slot], adapters.down_b[slot])
    return y


def _add_bmm(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    n_experts = x.shape[0]
    low = torch.bmm(x, a.expand(n_experts, -1, -1).transpose(1, 2))
    out.baddbmm_(low, b.expand(n_experts, -1, -1).transpose(1, 2))


def _by_expert(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, adapters: ExpertAdapters, used: list[int],
    counts: np.ndarray,
) -> torch.Tensor:
    """One product per expert and per (expert, slot); ``x`` [P, H] sorted so, ``counts`` [E, groups]."""
    inter = w2.shape[2]
    h = x.new_empty(x.shape[0], w1.shape[1])
    y = torch.empty_like(x)
    cells = []  # (expert, slot, rows) that need LoRA
    spans = []  # (expert, rows) of experts that have tokens
    at = 0
    for expert, row in enumerate(counts.tolist()):
        begin = at
        for slot, n in zip(used, row):
            if n and slot >= 0:
                cells.append((expert, slot, slice(at, at + n)))
            at += n
        if at > begin:
            spans.append((expert, slice(begin, at)))
    for expert, rows in spans:
        torch.mm(x[rows], w1[expert].t(), out=h[rows])
    for expert, slot, rows in cells:
        _add_mm(h[rows, :inter], x[rows], adapters.gate_a[slot], adapters.gate_b[slot], expert)
        _add_mm(h[rows, inter:], x[rows], adapters.up_a[slot], adapters.up_b[slot], expert)
    a = F.silu(h[:, :inter]).mul_(h[:, inter:])
    for expert, rows in spans:
        torch.mm(a[rows], w2[expert].t(), out=y[rows])
    for expert, slot, rows in cells:
        _add_mm(y[rows], a[rows], adapters.down_a[slot], adapters.down_b[slot], expert)
    return y


def _add_mm(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, expert: int) -> None:
    low = x @ a[expert if a.shape[0] > 1 else 0].t()
    out.addmm_(low, b[expert if b.shape[0] > 1 else 0].t())

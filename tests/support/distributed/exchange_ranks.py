"""One layer's routed experts on ranks that exchange tokens. The experts scale their rows: an oracle is simple."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.engine.megatron_utils.cpu_patches import Ranks, TokenExchange

TOKENS, HIDDEN, EXPERTS, TOP_K = 9, 6, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``etp`` ranks share each expert, and each of them its part of the features; tokens go to the first ``used``."""

    world: int
    etp: int = 1
    used: int = EXPERTS
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of all ranks: hidden states [n, HIDDEN], routing weights and map [n, EXPERTS], gradient of the outputs."""

    hidden: Tensor
    probs: Tensor
    routing_map: Tensor
    grads: Tensor


def make_tokens(case: Case) -> Tokens:
    n = case.world * TOKENS
    numbers = torch.Generator().manual_seed(11)
    scores = torch.rand(n, EXPERTS, generator=numbers)
    scores[:, case.used :] = -1.0
    routing_map = torch.zeros(n, EXPERTS, dtype=torch.bool).scatter_(1, scores.topk(TOP_K).indices, True)
    hidden, grads = (torch.randn(n, HIDDEN, generator=numbers).to(case.dtype) for _ in range(2))
    return Tokens(hidden, torch.where(routing_map, scores, 0.0), routing_map, grads)


def experts_of(rank: int, case: Case) -> range:
    count = EXPERTS * case.etp // case.world
    return range(rank // case.etp * count, (rank // case.etp + 1) * count)


def exchange(case: Case) -> dict[str, Any]:
    """This rank's outputs and gradients."""
    rank, tokens = dist.get_rank(), make_tokens(case)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    hidden = tokens.hidden[mine].view(TOKENS, 1, HIDDEN).clone().requires_grad_()
    probs = tokens.probs[mine].clone().requires_grad_()
    own = experts_of(rank, case)
    exchange = TokenExchange(Ranks(dist.group.WORLD), own)
    x, p = exchange.dispatch_preprocess(hidden, tokens.routing_map[mine], probs)
    rows, counts, weights = exchange.dispatch_postprocess(*exchange.token_dispatch(x, p))
    numbers = torch.tensor(own).repeat_interleave(counts) + 1
    features = torch.zeros(HIDDEN)
    features[rank % case.etp :: case.etp] = 1.0
    scaled = rows * (numbers[:, None] * weights[:, None] * features).to(rows.dtype)
    out = exchange.combine_postprocess(exchange.token_combine(exchange.combine_preprocess(scaled)))
    out.backward(tokens.grads[mine].view_as(out))
    assert hidden.grad is not None
    assert probs.grad is not None
    return {
        "counts": counts.tolist(),
        "out": out.detach().view(TOKENS, HIDDEN).double().numpy(),
        "hidden": hidden.grad.view(TOKENS, HIDDEN).double().numpy(),
        "probs": probs.grad.double().numpy(),
    }

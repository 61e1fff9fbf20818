"""Megatron's own routing with routes in the place of its choice, against a float64 formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lora.engine.layers.active import ActiveAdapters, PackedTokens
from tests.support.lazy import Lazy

moe_utils = Lazy("megatron.core.transformer.moe.moe_utils")
modules = Lazy("areal_lora.engine.megatron_utils.modules")
pytestmark = pytest.mark.usefixtures("cpu_patches")

TOKENS, EXPERTS, K = 7, 6, 2
HOWS: tuple[dict[str, Any], ...] = (
    {"use_pre_softmax": False},
    {"use_pre_softmax": True},
    {"score_function": "sigmoid", "scaling_factor": 2.5},
    {"score_function": "sigmoid", "expert_bias": torch.linspace(-3.0, 3.0, EXPERTS), "num_groups": 3, "group_topk": 2},
)


def formula(how: dict[str, Any], logits: Tensor, chosen: Tensor) -> Tensor:
    """[t, E] weights, 0 for other experts."""
    if how.get("score_function") == "sigmoid":
        weights = logits.sigmoid().gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * how.get("scaling_factor", 1.0)
    elif how["use_pre_softmax"]:
        weights = logits.softmax(-1).gather(1, chosen)
    else:
        weights = logits.gather(1, chosen).softmax(-1)
    return torch.zeros_like(logits).scatter(1, chosen, weights)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_router_weighs_the_experts_of_its_tokens(
    how: dict[str, Any], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one rank, and on both of a sequence-parallel group, which have half of the micro-batch's tokens each."""
    print("seed 2")
    torch.manual_seed(2)
    monkeypatch.setattr("megatron.core.parallel_state.get_tensor_model_parallel_rank", lambda: rank)
    active, tokens = ActiveAdapters(), TOKENS if rank is None else 2 * TOKENS
    own = slice(0, TOKENS) if rank is None else slice(rank * TOKENS, (rank + 1) * TOKENS)
    logits = torch.randn(TOKENS, EXPERTS, requires_grad=True)
    plain, plain_map = moe_utils.topk_routing_with_score_function(logits, K, **how)
    choice: Any = modules.RouterChoice(active, 1)
    assert torch.equal(moe_utils.topk_routing_with_score_function(logits, K, **how, router_replay=choice)[0], plain)
    routes = torch.rand(tokens, 3, EXPERTS).topk(K).indices.to(torch.int16)
    routes[::3] = -1
    active.tokens = PackedTokens(keys=torch.zeros(tokens), routes=routes)
    found, found_map = moe_utils.topk_routing_with_score_function(logits, K, **how, router_replay=choice)
    mine = routes[own, 1].long()
    chosen = torch.where(mine < 0, plain_map.nonzero()[:, 1].view(TOKENS, K), mine)
    exact = logits.detach().double().requires_grad_()
    wanted = formula(how, exact, chosen)
    torch.testing.assert_close(found.double(), wanted, atol=1e-6, rtol=1e-5)
    assert torch.equal(found_map, wanted > 0)
    assert not torch.equal(found_map, plain_map)
    weights = torch.randn(TOKENS, EXPERTS)
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-6, rtol=1e-5)
    own_sets, known = plain_map.nonzero()[:, 1].view(TOKENS, K), mine[:, 0] >= 0
    flipped = sum(set(a) != set(b) for a, b in zip(own_sets[known].tolist(), mine[known].tolist(), strict=True))
    with active.choosing("compare"):
        assert torch.equal(moe_utils.topk_routing_with_score_function(logits, K, **how, router_replay=choice)[0], plain)
    assert active.flips is not None
    assert active.flips.tolist() == [flipped, int(known.sum())]
    nowhere = routes.new_full(routes.shape, -1)
    active.tokens = PackedTokens(keys=torch.zeros(tokens), routes=nowhere)
    with active.choosing("record"):
        assert torch.equal(moe_utils.topk_routing_with_score_function(logits, K, **how, router_replay=choice)[0], plain)
    assert (nowhere[own, 1].sort(-1).values == own_sets.sort(-1).values).all()
    assert (nowhere >= 0).sum() == TOKENS * K, "of its tokens and its layer alone"
    active.tokens = PackedTokens(keys=torch.zeros(tokens), routes=routes.new_full(routes.shape, -1))
    assert torch.equal(moe_utils.topk_routing_with_score_function(logits, K, **how, router_replay=choice)[0], plain)

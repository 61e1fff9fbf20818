"""The adapters of projections with one input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.fsdp_engine import LinearLora, LinearSite, SharedInput
from areal_lora.engine.layers.active import ActiveAdapters, Dropout, PackedTokens
from areal_lora.types import AdapterSpec
from tests.support.families.shapes import make_shape

SHAPE = make_shape("qwen3", layers=1, hidden=16, heads=4, kv_heads=2, head_dim=4, ffn=8)
RANKS = {"a": 3, "b": 2, "c": 4}


@pytest.mark.parametrize("dropout", [None, Dropout(rate=0.4, seed=7)])
@pytest.mark.parametrize("rows", [{"a": 5}, {"b": 2, "base": 1, "a": 0, "c": 2}], ids=["alone", "joined"])
def test_projections_share_a_product_and_their_rows_lie_apart(rows: dict[str, int], dropout: Dropout | None) -> None:
    """Against the formula in float64 with matrices cut by hand, in two passes whose gradients add up.

    Joined: each adapter has its own rank and its rows of the input; one has none here, one has no adapter of the layer.
    """
    print("seed 5")
    draw = torch.Generator().manual_seed(5)
    layout = ParallelLayout.of(TrainerConfig(world_size=1), layers=1, experts=0)
    sharded = ShardedModel(shape=SHAPE, layout=layout)
    keys = torch.arange(5)
    active = ActiveAdapters({name: dropout if name == "a" or name == "b" else None for name in rows})
    ends = torch.tensor([*rows.values()]).cumsum(0).int()
    owners = torch.arange(len(rows)).repeat_interleave(torch.tensor([*rows.values()]))
    active.tokens = PackedTokens(keys=keys, ends=ends, owners=owners)
    memories = {}
    for name in rows.keys() - {"base"}:
        spec = AdapterSpec(name=name, base_model="m", rank=RANKS[name], alpha=6.0, target_modules=("linear_qkv",))
        memories[name] = AdapterMemory(sharded, spec, 0, torch.device("cpu"))
    pieces = sharded.pieces(next(iter(memories.values())).arena.banks[0].keys[0])
    shared = SharedInput(len(pieces), 11)
    sites = [LinearSite(nn.Identity(), shared, active) for _ in pieces]
    found, exact = {}, {}
    for name, memory in sorted(memories.items()):
        memory.weights.copy_(torch.randn(memory.arena.size, generator=draw))
        (bank,) = memory.arena.banks
        found[name] = memory.parameters(bank, 0)
        exact[name] = [x.detach().double().requires_grad_() for x in found[name]]
        shared.lora_a[name] = found[name][0]
        for site, piece in zip(sites, pieces, strict=True):
            site.adapters[name] = LinearLora.of(memory, bank, piece.rows, 2.0)
    for _ in range(2):
        x = torch.randn(5, 16, generator=draw, requires_grad=True)
        exact_x = x.detach().double().requires_grad_()
        for piece, site in zip(pieces, sites, strict=True):
            base, slopes = (torch.randn(5, sum(b - a for a, b in piece.rows), generator=draw) for _ in range(2))
            wanted, start = [], 0
            for name, size in rows.items():
                own = slice(start, start := start + size)
                part = base[own].double()
                if name in exact:
                    a, b = exact[name]
                    drop = active.each[name]
                    kept = exact_x[own] if drop is None else exact_x[own] * drop.keep(keys[own], 11, 16)
                    factor = 1.0 if drop is None else 1 / 0.6
                    cut = torch.cat([b[first:last] for first, last in piece.rows])
                    part = part + 2.0 * factor * kept @ a.t() @ cut.t()
                wanted.append(part)
            got = site(nn.Identity(), (x,), base.clone())
            torch.testing.assert_close(got.double(), torch.cat(wanted), atol=1e-5, rtol=1e-5)
            (got * slopes).sum().backward(retain_graph=True)
            (torch.cat(wanted) * slopes).sum().backward(retain_graph=True)
        assert shared._known is None, "it would keep the pass alive"
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), exact_x.grad, atol=1e-5, rtol=1e-5)
    for name, pair in found.items():
        for parameter, truth in zip(pair, exact[name], strict=True):
            assert parameter.grad is not None
            assert rows[name] == 0 or parameter.grad.any()
            torch.testing.assert_close(parameter.grad.double(), truth.grad, atol=1e-4, rtol=1e-5)

"""Pack and load plans as data: every rank of a layout simulated in one process, against whole matrices.

A whole lora_A and lora_B per site are cut for each rank by slices written down here, packed by
the plans and compared with `to_hf`; loading goes the other way. Real ranks: tests/distributed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common import transfer_plan as plans
from areal_lora.engine.common.arena import ALIGN, Arena, ParallelLayout, ShardedModel, arrange
from areal_lora.families.family import Scope
from areal_lora.families.sites import SiteKey
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.strided import StridedCopies
from tests.support.families.conversion import to_hf
from tests.support.families.shapes import make_shape
from tests.support.sizes import sample

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
SIZES = {"layers": 4, "hidden": 24, "heads": 24, "head_dim": 2, "ffn": 24, "expert_ffn": 24}
SHAPES = {
    "qwen3_moe": make_shape("qwen3_moe", **SIZES, kv_heads=2, experts=8, dense={1}),
    "qwen3": make_shape("qwen3", **SIZES, kv_heads=8),
    "qwen2_moe": make_shape("qwen2_moe", **SIZES, kv_heads=24, experts=8, shared_ffn=48),
    "mixtral": make_shape("mixtral", **SIZES, kv_heads=4, experts=8),
}


def worlds() -> Iterator[tuple[int, int, int, int, int]]:
    sizes = ((1, 2, 4, 6, 8), (1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 4, 8), (1, 2, 3))
    for world, tp, pp, ep, etp in itertools.product(*sizes):
        if world % (tp * pp) == 0 and world % (ep * etp * pp) == 0:
            yield world, tp, pp, ep, etp


def model(kind: str, world: int, tp: int, pp: int, ep: int, etp: int) -> ShardedModel:
    virtual = [1] * 4 if pp == 2 and tp > 1 else None
    config = TrainerConfig(world_size=world, tp=tp, pp=pp, ep=ep, etp=etp, pp_layers=virtual)
    shape = SHAPES[kind]
    return ShardedModel(shape=shape, layout=ParallelLayout.of(config, layers=4, experts=shape.experts))


def whole(model: ShardedModel, key: SiteKey, rank: int) -> tuple[Tensor, Tensor]:
    pieces = model.pieces(key)
    n_out = sum(p.out_features for p in pieces)

    def numbers(side: str, *shape: int) -> Tensor:
        expert = 0 if key.shared == side else key.expert or 0
        place = (TARGETS.index(key.linear) * 100 + expert) * 100 + key.layer
        seed = (place * 10 + list(Scope).index(key.scope)) * 2 + (side == "lora_B")
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return numbers("lora_A", rank, pieces[0].in_features), numbers("lora_B", n_out, rank)


def own(model: ShardedModel, key: SiteKey, rank: int) -> dict[str, Tensor]:
    """Wire tensors of a site; what experts share is the first one's."""
    tensors = to_hf(model.pieces(key), *whole(model, key, rank))
    return {n: t for n, t in tensors.items() if not (key.expert and key.shared and f".{key.shared}." in n)}


def memory(model: ShardedModel, spec: AdapterSpec, rank: int, arena: Arena) -> np.ndarray:
    """What a rank holds, cut by hand."""
    values = np.full(arena.size, np.nan, dtype=np.float32)
    for bank in arena.banks:
        routed = bank.scope in (Scope.EXPERT, Scope.ALL_EXPERTS)
        size = model.layout.etp if routed else model.layout.tp
        mine = rank % size
        for i, key in enumerate(bank.keys):
            a, b = whole(model, key, spec.rank)
            if key.linear in ("linear_proj", "linear_fc2"):
                a = a.chunk(size, 1)[mine]
            elif key.linear == "linear_fc1":
                b = torch.cat([half.chunk(size)[mine] for half in b.chunk(2)])
            else:
                b = b.chunk(size)[mine]
            for side, begin, part in (("lora_A", bank.a, a), ("lora_B", bank.b, b)):
                start = begin if key.shared == side else begin + i * part.numel()
                if key.shared == side and i:
                    assert np.array_equal(values[start : start + part.numel()], part.flatten().numpy())
                    continue
                assert np.isnan(values[start : start + part.numel()]).all(), "two sites share memory"
                values[start : start + part.numel()] = part.flatten().numpy()
    unused = np.isnan(values)
    for part in plans.Range:
        start, end = arena.extent(part)
        assert (end - start) % model.layout.ranks_per_stage == 0, "its replicas step equal parts"
        ends = {it for bank in arena.banks for it in (bank.a, bank.b) if start < it < end} | {end}
        last = math.lcm(model.layout.ranks_per_stage, ALIGN)
        for at in ends:
            filled = int(np.argmin(unused[start:at][::-1])) if not unused[start:at].all() else at - start
            assert filled < (last + ALIGN if at == end else ALIGN), "memory that no site uses"
            unused[at - filled : at] = False
    assert not unused.any(), "a gap that ends where no matrix starts"
    return values


def pack(
    model: ShardedModel, spec: AdapterSpec, layout: AdapterLayout, held: list[np.ndarray], rank: int
) -> np.ndarray:
    found = plans.pack_plan(model, spec, rank, layout)
    space = np.full(found.space, np.nan, dtype=np.float32)
    space[: found.own] = held[rank]
    for part, at in found.others.items():
        start, end = arrange(model, spec, rank).extent(part)
        parts = [held[rank + k][start:end] for k in range(1, model.split_over(part))]
        space[at:][: sum(map(len, parts))] = np.concatenate([space[:0], *parts])
    (shard,) = [s for s in layout.shards if s.source == rank] or [None]
    flat = np.zeros(shard.nbytes if shard else 0, dtype=np.uint8)
    views = torch.zeros(len(flat) // TYPES[layout.dtype].itemsize, dtype=TYPES[layout.dtype])
    strided = StridedCopies(found.blocks, (0, 4 * found.own), (0,))
    sources = torch.from_numpy(space).split([found.own, found.space - found.own])
    first = 0
    for end in found.ends:
        found.blocks.copy(space.ctypes.data, flat.ctypes.data, tensors=(first, end))
        strided.copy(sources, (views,), (first, end))
        first = end
    assert first == (len(shard.tensors) if shard else 0)
    assert np.array_equal(views.view(torch.uint8).numpy(), flat), "a device packs the same bytes"
    return flat


@pytest.mark.parametrize(("kind", "experts"), sample(itertools.product(SHAPES, ExpertLayout), 0, lambda case: case))
def test_every_rank_packs_and_loads_its_part(kind: str, experts: ExpertLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "SECTION_BYTES", 2000)  # several sections of several sites
    spec = AdapterSpec(name="a", base_model="b", rank=3, alpha=1.0, target_modules=TARGETS, expert_layout=experts)
    count = 0
    kv_heads, dense = SHAPES[kind].kv_heads, SHAPES[kind].experts == 0
    fit = [s for s in worlds() if not (kv_heads % s[1] and s[1] % kv_heads) and not (dense and s[3:] != (1, 1))]
    for sizes in sample(fit, 0, enumerate):
        it = model(kind, *sizes)
        layout = plans.wire_layout(it, spec, "float32")
        held = [memory(it, spec, rank, arrange(it, spec, rank)) for rank in range(it.layout.world)]
        expected: dict[str, Tensor] = {}
        for key in it.sites(spec):
            expected |= own(it, key, spec.rank)
        packed: dict[str, Tensor] = {}
        for rank in range(it.layout.world):
            flat = torch.from_numpy(pack(it, spec, layout, held, rank)).clone()
            for shard in [s for s in layout.shards if s.source == rank]:
                values = flat.view(torch.float32)
                for t in shard.tensors:
                    n = t.shape[0] * t.shape[1]
                    packed[t.name] = values[t.offset // 4 : t.offset // 4 + n].view(t.shape)
        assert packed.keys() == expected.keys()
        assert all(torch.equal(packed[n], expected[n]) for n in expected), sizes
        for rank in range(it.layout.world):
            names, blocks = plans.load_plan(it, spec, rank)
            filled = np.full_like(held[rank], np.nan)
            tensors = [expected[n].contiguous() for n in names]
            starts = np.repeat([t.data_ptr() for t in tensors], np.diff(blocks.first))
            blocks.moved(src_by=starts).copy(0, filled.ctypes.data)
            assert np.array_equal(filled, held[rank], equal_nan=True), (sizes, rank)
        count += 1
    assert count > 1
    digests = {plans.wire_layout(model(kind, *sizes), spec, "float32").digest for sizes in fit}
    assert len(digests) > 3  # layouts differ in their senders


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_are_rounded_like_torch(dtype: str) -> None:
    it = model("qwen3_moe", 4, 2, 1, 2, 2)
    spec = AdapterSpec(name="a", base_model="b", rank=12, alpha=1.0, target_modules=TARGETS)
    layout = plans.wire_layout(it, spec, dtype)
    held = [memory(it, spec, rank, arrange(it, spec, rank)) for rank in range(4)]
    expected: dict[str, Tensor] = {}
    for key in it.sites(spec):
        expected |= own(it, key, spec.rank)
    for shard in layout.shards:
        values = torch.from_numpy(pack(it, spec, layout, held, shard.source)).view(TYPES[dtype])
        for t in shard.tensors:
            n = t.shape[0] * t.shape[1]
            found = values[t.offset // 2 : t.offset // 2 + n].view(t.shape)
            assert torch.equal(found, expected[t.name].to(TYPES[dtype])), t.name


def test_shared_experts_have_one_adapter_with_every_expert_as_alias() -> None:
    it = model("qwen3_moe", 8, 2, 1, 4, 2)
    spec = AdapterSpec(
        name="a",
        base_model="b",
        rank=4,
        alpha=1.0,
        target_modules=("expert.linear_fc1",),
        expert_layout=ExpertLayout.SHARED,
    )
    layout = plans.wire_layout(it, spec, "float32")
    assert [s.source for s in layout.shards] == [0]
    names = {t.name for t in layout.shards[0].tensors}
    base = "model.layers.{}.mlp.experts.{}.{}_proj.lora_{}.weight"
    sparse = (0, 2, 3)
    assert names == {
        base.format(layer, 0, *leaf) for layer in sparse for leaf in (("gate", "A"), ("gate", "B"), ("up", "B"))
    }
    assert len(layout.aliases) == len(sparse) * (8 * 4 - 3)
    assert layout.aliases[base.format(2, 5, "up", "A")] == base.format(2, 0, "gate", "A")
    assert layout.aliases[base.format(2, 5, "up", "B")] == base.format(2, 0, "up", "B")

"""The initial adapter, and packing on a device: tensors on the host take its way as well."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common import adapter_memory
from areal_lora.engine.common.adapter_memory import AdapterMemory, Packer, initial_tensor
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec, ExpertLayout
from areal_lora.weight_sync.layout import WireTensor
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from tests.support.families.shapes import make_shape
from tests.support.weight_sync.helpers import KEYS, ref
from tests.support.weight_sync.launches import launches

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first = WireTensor("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), 0)
    second = WireTensor("model.layers.1.self_attn.q_proj.lora_A.weight", (4, 64), 1024)
    moved = WireTensor(first.name, first.shape, 4096)
    assert torch.equal(initial_tensor(first, 1), initial_tensor(moved, 1))
    assert not torch.equal(initial_tensor(first, 1), initial_tensor(second, 1))
    assert not torch.equal(initial_tensor(first, 1), initial_tensor(first, 2))
    assert not initial_tensor(WireTensor("model.layers.0.self_attn.q_proj.lora_B.weight", (64, 4), 0), 1).any()


def adapter(
    layers: int, experts: int, layout: ExpertLayout = ExpertLayout.PER_EXPERT, value_head: bool = False
) -> AdapterMemory:
    """An adapter of rank 16 on a model with the proportions of Qwen3-30B-A3B, of a sixteenth of its widths."""
    sizes = {"hidden": 128, "heads": 4, "kv_heads": 1, "head_dim": 64, "ffn": 0, "expert_ffn": 48}
    shape = make_shape("qwen3_moe", layers=layers, experts=experts, **sizes)
    place = ParallelLayout.of(TrainerConfig(world_size=1), layers=layers, experts=experts)
    spec = AdapterSpec(
        name="a", base_model="m", rank=16, alpha=32, target_modules=TARGETS, expert_layout=layout, value_head=value_head
    )
    memory = AdapterMemory(ShardedModel(shape=shape, layout=place), spec, 0, torch.device("cpu"))
    memory.weights.normal_(generator=torch.Generator().manual_seed(2))
    return memory


def packed(memory: AdapterMemory, dtype: str, strided: bool) -> tuple[PackedShard, Packer]:
    packer = Packer(memory, memory.layout(dtype), strided=strided)
    shard = PackedShard(memory.layout(dtype), 0, KEYS, strided=strided)
    shard.pack(ref(0), lambda flat: packer.fill(memory.weights, flat, {}))
    return shard, packer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", list(ExpertLayout))
def test_a_shard_on_a_device_is_that_of_the_host(
    layout: ExpertLayout, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_memory, "LAUNCHED", 2)
    memory = adapter(6, 12, layout, value_head=True)
    (host, compiled), (device, strided) = (packed(memory, dtype, way) for way in (False, True))
    assert torch.equal(host.flat, device.flat)
    assert host.sums.tolist() == device.sums.tolist()
    assert host._trailer.tobytes() == device._trailer.tobytes()
    if dtype == "float32":
        want, got = (dict(p.tensors(memory.weights, {})) for p in (compiled, strided))
        assert list(want) == list(got)
        assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(("layers", "experts"), [(48, 128), (6, 128), (48, 16)])
def test_launches_of_packing_do_not_grow_with_names(layers: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The widths of Qwen3-30B-A3B, of which a rank has an eighth of the experts, on a device without memory."""
    sizes = {"num_hidden_layers": layers, "num_experts": experts}
    shape = ModelShape.from_hf({**(known_config("Qwen/Qwen3-30B-A3B") or {}), **sizes})
    place = ParallelLayout.of(TrainerConfig(world_size=8, ep=8), layers=layers, experts=experts)
    spec = AdapterSpec(name="a", base_model="m", rank=16, alpha=32, target_modules=TARGETS)
    memory = AdapterMemory(ShardedModel(shape=shape, layout=place), spec, 0, torch.device("meta"))
    packer = memory.packer("bfloat16")
    flat = torch.empty(packer.shard.nbytes, dtype=torch.uint8, device="meta")

    def pack() -> list[int]:
        return list(packer.fill(memory.weights, flat, {}))

    assert launches(pack) <= 12 * len(pack())
    monkeypatch.setattr(adapter_memory, "LAUNCHED", 1 << 20)
    assert len(pack()) == 1
    assert launches(pack) == 8


def test_launches_of_fingerprints_do_not_grow_with_names() -> None:
    counted = []
    for experts in (8, 64):
        shard, _ = packed(adapter(2, experts), "bfloat16", True)
        measure = partial(shard._chunks.measure, shard._table.marks(KEYS.multipliers), shard.flat, 0)
        counted.append(launches(partial(measure, len(shard.shard.tensors))))
    assert counted[0] == counted[1] <= 50


@pytest.mark.parametrize(
    ("targets", "experts", "groups"),
    [(TARGETS, 8, 4), (("linear_fc2",), 8, 4), (("linear_qkv", "linear_proj"), 8, 1), (TARGETS, 0, 1)],
)
@pytest.mark.parametrize("layout", ExpertLayout)
def test_rows_form_groups_by_expert_where_experts_are_adapted(
    targets: tuple[str, ...], experts: int, groups: int, layout: ExpertLayout
) -> None:
    """Also on the first stage, whose layers have no experts here."""
    sizes = {"hidden": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "ffn": 8, "expert_ffn": 8, "dense": {0}}
    shape = make_shape("qwen3_moe", layers=2, experts=experts, **sizes)  # type: ignore[arg-type]
    place = ParallelLayout.of(TrainerConfig(world_size=4, pp=2, ep=2), layers=2, experts=experts)
    spec = AdapterSpec(name="a", base_model="m", rank=2, alpha=4, target_modules=targets, expert_layout=layout)
    for rank in range(4):
        memory = AdapterMemory(ShardedModel(shape=shape, layout=place), spec, rank, torch.device("cpu"))
        assert memory.groups == groups

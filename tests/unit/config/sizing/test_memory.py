"""The memory estimate of large jobs, against sums made by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.models import AdapterConfig, Config, TrainerConfig
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check
from areal_lora.config.rules.memory_rules import slurm_bytes
from areal_lora.config.sections.run import ServiceConfig
from areal_lora.config.sections.task import BuiltInReward
from areal_lora.config.sizing.activations import in_flight, layer_elements, pass_elements
from areal_lora.config.sizing.memory import GIB, PACKED, Memory, Part, job_memory, staging_bytes
from areal_lora.config.sizing.slots import bucket_of, seats_of, send_places, sent_bytes, source_ranks
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.common.transfer_plan import merged_layout, pack_plan, wire_layout
from areal_lora.engine.layers.active import Dropout
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import adapter_size
from areal_lora.tasks.code_reward import TEST_BYTES
from areal_lora.weight_sync.layout import plan_buckets
from areal_lora.weight_sync.link.inbox import RING
from areal_lora.weight_sync.strided import MEASURED_BYTES
from areal_lora.weight_sync.trainer.gathering import by_place
from tests.support.engine.alive import Alive
from tests.support.paths import EXAMPLES

MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
ONE_GPU = EXAMPLES / "one_gpu.yaml"
DENSE = EXAMPLES / "gsm8k_grpo_megatron_lora_72b.yaml"
CHECKPOINT = "publish and checkpoint"
FACTS = Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B"))


def estimate(*overrides: str) -> dict[str, Memory]:
    shape = ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {})
    return {m.name: m for m in reversed(job_memory(load_config([MOE], list(overrides)), shape))}  # first owners


def part(memory: Memory, name: str) -> float:
    return sum(p.device for p in memory.parts if p.name == name)


def test_the_base_is_divided_as_megatron_divides_it() -> None:
    whole = 30.532e9 * 2
    alone = part(estimate("trainer.world_size=1", "trainer.tp=1", "trainer.ep=1")["trainer rank"], "base weights")
    assert alone == pytest.approx(whole, rel=0.001)
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    by_eight = part(estimate("trainer.tp=1", "trainer.ep=8")["trainer rank"], "base weights")
    assert by_eight == pytest.approx(whole - experts * 7 / 8, rel=0.001)
    stages = estimate("trainer.tp=1", "trainer.ep=1", "trainer.pp=2", "cluster.nodes=3")
    assert sum(part(stages[f"trainer rank, stage {i}"], "base weights") for i in range(2)) == pytest.approx(
        alone, rel=0.001
    )


def test_fsdp_shards_the_base_and_gathers_one_layer_twice_and_the_next_one() -> None:
    sizes = ["trainer.engine=fsdp", "trainer.tp=1", "trainer.ep=1"]
    rank = estimate(*sizes)["trainer rank"]
    assert part(rank, "base weights") == pytest.approx(30.532e9 * 2 / 16, rel=0.001)
    layer = 128 * 3 * 2048 * 768 + 2 * 2048 * 128 * (32 + 4) + 128 * 2048  # experts, attention, router
    assert part(rank, "gathered layer") == pytest.approx(3 * 2 * layer, rel=0.001)
    whole = estimate(*sizes, "trainer.fsdp_shard=1")["trainer rank"]
    assert part(whole, "gathered layer") == 0
    offloaded = estimate(*sizes, "trainer.fsdp_shard=1", "trainer.cpu_offload=true")["trainer rank"]
    assert part(offloaded, "gathered layer") == part(rank, "gathered layer")
    copies = estimate(*sizes, "trainer.fsdp_shard=4")["trainer rank"]
    assert copies.device - rank.device == pytest.approx(3 * part(rank, "base weights"), rel=0.001)
    away = estimate(*sizes, "trainer.cpu_offload=true")["trainer rank"]
    assert away.device == rank.device - part(rank, "base weights")
    assert away.host > rank.host


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B", "Qwen/Qwen3-235B-A22B"])
def test_offloaded_shards_take_blocks_of_powers_of_two(model: str) -> None:
    """Shards of transformers' own parameters on eight ranks, each rounded up as torch's page-locked allocator does."""
    values = dict(known_config(model) or {})
    shape, kind = ModelShape.from_hf(values), values.pop("model_type")
    keys = ["trainer.engine=fsdp", "trainer.tp=1", "trainer.ep=1", "trainer.world_size=8", "trainer.cpu_offload=true"]
    rank = next(m for m in job_memory(load_config([MOE], keys), shape) if m.role == "trainer")
    found = next(p.host for p in rank.parts if p.name == "base weights")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**values), dtype=torch.bfloat16)
    shards = [-(-p.shape[0] // 8) * p[0].numel() * 2 for p in whole.parameters()]
    assert found == pytest.approx(sum(1 << (nbytes - 1).bit_length() for nbytes in shards), rel=0.2)
    assert found > 1.1 * sum(shards)


def test_inputs_of_layers_on_the_host_take_blocks_of_powers_of_two() -> None:
    """48 layers of 12,000 tokens and 2,048 numbers on four ranks: 11.7 MiB each, of blocks of 16."""
    sizes = ["trainer.max_tokens_per_microbatch=12000", "rollout.max_model_len=8192"]
    less, away = (estimate(*sizes, f"trainer.recompute={kind}")["trainer rank"] for kind in ("full", "offload"))
    assert away.host - less.host == 48 * 16 * 2**20


def test_one_layer_is_held_twice_where_servers_round_or_merge_weights() -> None:
    sizes, layer = ["trainer.tp=1", "trainer.ep=1"], 128 * 3 * 2048 * 768 + 2 * 2048 * 128 * (32 + 4) + 128 * 2048
    assert part(estimate(*sizes)["trainer rank"], "served layer") == 0
    for how in ("rollout.adapter_mode=merged", "rollout.engine_args.quantization=fp8_per_channel"):
        found = part(estimate(*sizes, how)["trainer rank"], "served layer")
        assert found == pytest.approx(2 * layer + 3 * 4 * 2**26, rel=0.001), how
        sharded = part(estimate(*sizes, how, "trainer.engine=fsdp")["trainer rank"], "served layer")
        assert sharded == pytest.approx(found, rel=0.001), how
        assert part(estimate("trainer.tp=1", "trainer.ep=8", how)["trainer rank"], "served layer") < found / 2


@pytest.mark.parametrize("kind", ["fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor"])
def test_a_rounded_base_takes_one_byte_of_each_linear_weight(kind: str) -> None:
    whole, rounded = (
        part(estimate(*how)["server replica"], "base weights")
        for how in ((), (f"rollout.engine_args.quantization={kind}",))
    )
    linear = 48 * (128 * 3 * 2048 * 768 + 2 * 2048 * 128 * (32 + 4))  # experts and attention; the router is not rounded
    assert whole - rounded == pytest.approx(linear / load_config([MOE], []).rollout.tp, abs=1)
    assert rounded < 0.53 * whole
    unknown = estimate("rollout.engine_args.quantization=mxfp8")["server replica"]
    assert part(unknown, "base weights") == whole


def test_a_key_and_a_value_take_one_byte_each_in_fp8() -> None:
    length = "rollout.max_model_len=4096"  # the least cache is of one sequence: 48 layers, 2 of 4 heads on a device
    for kind, item in (("auto", 2), ("fp8", 1), ("fp8_e5m2", 1)):
        server = estimate(length, f"rollout.engine_args.kv_cache_dtype={kind}")["server replica"]
        assert part(server, "KV cache, least") == 4096 * 48 * 2 * (2 * 128) * item, kind


def test_an_adapter_has_sixteen_bytes_a_parameter_and_its_cast_two() -> None:
    rank = estimate("trainer.world_size=1", "trainer.tp=1", "trainer.ep=1")["trainer rank"]
    size = part(rank, "adapter weights and gradients") + part(rank, "optimizer moments")
    assert size / 18 == pytest.approx(2.557e9 / 2, rel=0.002), "2.557 GB on the wire in bfloat16"


def test_several_adapters_need_the_sum_and_slots_for_each() -> None:
    """Against each adapter alone; a slot is as wide as the widest adapter."""
    shape = ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {})
    config = load_config([MOE], ["trainer.pp=2", "trainer.ep=1", "trainer.tp=1", "cluster.nodes=3"])
    [wide] = config.adapters
    narrow = wide.model_copy(update={"name": "narrow", "rank": 8, "target_modules": ["linear_qkv"]})

    def of(*adapters: AdapterConfig) -> dict[str, dict[str, Part]]:
        job = reversed(job_memory(config.model_copy(update={"adapters": list(adapters)}), shape))
        return {memory.name: {p.name: p for p in memory.parts} for memory in job}

    both, first, second = of(wide, narrow), of(wide), of(narrow)
    for rank in ("trainer rank, stage 0", "trainer rank, stage 1"):
        for name in ("adapter weights and gradients", "optimizer moments"):
            assert both[rank][name].device == first[rank][name].device + second[rank][name].device
            assert second[rank][name].device > 0
        name = "publish and checkpoint"
        assert both[rank][name].host == first[rank][name].host + second[rank][name].host
        for name in ("base weights", "activations", "buffers", "process"):
            assert both[rank][name] == first[rank][name], "shared by all adapters"
    server, alone, other = (one["server replica"] for one in (both, first, second))
    assert both["controller"]["processes"].host > first["controller"]["processes"].host
    shared = 8 / 5  # one slot on its way and one for an evaluation serve both
    assert server["adapter slots"].device == pytest.approx(shared * alone["adapter slots"].device, abs=4)
    assert other["adapter slots"].device < alone["adapter slots"].device
    name = "staging of publishes"
    assert server[name] == alone[name], "one ring of buffers, of the wider one"
    assert 0 < other[name].device < alone[name].device


def test_programs_of_answers_count_with_all_that_they_may_have() -> None:
    plain, code = (
        estimate(f"adapters.0.reward={reward}")["controller"]
        for reward in ("{kind: function, path: a.py:f, workers: 3}", "{kind: code, asserts: tests, workers: 3}")
    )
    assert code.host == plain.host + 3 * TEST_BYTES


def test_adapters_that_may_join_count_like_listed_ones_of_their_size() -> None:
    """Two places are free: as much as two more listed adapters of the largest rank with all targets need."""
    shape = ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {})
    sizes = ["trainer.pp=2", "trainer.ep=1", "trainer.tp=1", "cluster.nodes=3", "rollout.max_adapters=3"]
    [listed] = load_config([MOE], sizes).adapters
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    small = listed.model_copy(update={"rank": 4, "target_modules": ["linear_qkv"]})
    largest = [
        listed.model_copy(
            update={"name": f"more-{i}", "rank": 32, "target_modules": targets, "reward": BuiltInReward()}
        )
        for i in range(2)
    ]
    config = load_config([MOE], sizes).model_copy(update={"adapters": [small]})
    service = config.model_copy(update={"service": ServiceConfig(target_modules=targets)})

    def of(config: Config) -> dict[str, dict[str, Part]]:
        return {m.name: {p.name: p for p in m.parts} for m in reversed(job_memory(config, shape))}

    joins, fixed, three = of(service), of(config), of(config.model_copy(update={"adapters": [small, *largest]}))
    for stage in ("trainer rank, stage 0", "trainer rank, stage 1"):
        names = ("adapter weights and gradients", "optimizer moments", "publish and checkpoint", PACKED)
        room = joins[stage]["room for adapters that join"]
        assert "room for adapters that join" not in fixed[stage]
        assert room.device == sum(three[stage][n].device - fixed[stage][n].device for n in names) > 0
        assert room.host == pytest.approx(sum(three[stage][n].host - fixed[stage][n].host for n in names), abs=8)
    server, same, narrow = (one["server replica"] for one in (joins, three, fixed))
    for name in ("adapter slots", "staging of publishes"):
        assert server[name] == same[name] != narrow[name]
    assert joins["controller"] == three["controller"] != fixed["controller"]


def test_where_only_those_that_may_join_do_not_fit_it_is_a_warning() -> None:
    overrides = ["service={}", "rollout.max_adapters=20", "cluster.device_memory_gib=24", "rollout.tp=8"]
    overrides += ["rollout.servers=1", "rollout.max_staleness=0", "weight_sync.bucket_mib=16", "trainer.recompute=full"]
    found = [f for f in check(load_config([MOE], overrides), FACTS) if f.path == "rollout.max_adapters"]
    assert [f.severity for f in found] == [Severity.WARNING]
    assert "the largest part is room for adapters that join" in found[0].reason


@pytest.mark.parametrize("names", ["all-linear", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"])
def test_the_check_counts_targets_in_any_spelling(names: str) -> None:
    overrides = ["cluster.device_memory_gib=44", "rollout.gpu_memory_utilization=0.9"]
    written = check(load_config([MOE], overrides), FACTS)
    assert [f.path for f in written] == ["rollout.tp"], "49 GiB, 14 of them for slots"
    assert check(load_config([MOE], [*overrides, f"adapters.0.target_modules=[{names}]"]), FACTS) == written


def test_a_critic_is_an_adapter_of_its_rank_and_a_reference_has_its_weights_only() -> None:
    sizes = ["trainer.world_size=1", "trainer.tp=1", "trainer.ep=1"]
    alone = estimate(*sizes)["trainer rank"]
    one = part(alone, "optimizer moments") / 8  # parameters of the adapter
    keys = ["kind=ppo", "kl_coef=0.1", "reference=initial", "reference_refresh_steps=9"]
    both = estimate(*sizes, *(f"adapters.0.algorithm.{key}" for key in keys))["trainer rank"]
    assert part(both, "optimizer moments") == pytest.approx(8 * 2 * one)
    assert part(both, "adapter weights and gradients") == pytest.approx(10 * 2 * one + 6 * one)
    checkpoint = [sum(p.host for p in m.parts if p.name == "publish and checkpoint") for m in (alone, both)]
    assert checkpoint[1] - checkpoint[0] == pytest.approx(4 * one * (3 + 1))


@pytest.mark.parametrize(
    ("path", "model"), [(MOE, "Qwen/Qwen3-30B-A3B"), (DENSE, "Qwen/Qwen2.5-72B-Instruct")], ids=["moe", "dense"]
)
def test_buffers_of_a_publish_are_those_of_the_packers(path: Path, model: str) -> None:
    """A source that publishes in bfloat16 and writes checkpoints in fp32 has two, and the shards of its node."""
    shape, config = ModelShape.from_hf(known_config(model) or {}), load_config([path])
    parallel = ParallelLayout.of(config.trainer, layers=shape.layers, experts=shape.experts)
    sharded, spec = ShardedModel(shape=shape, layout=parallel), config.adapters[0].spec("")
    layout = wire_layout(sharded, spec, "bfloat16")
    plan = pack_plan(sharded, spec, 0, layout)
    rank = next(m for m in job_memory(config, shape) if m.role == "trainer")
    found, packed = (next(p for p in rank.parts if p.name == name) for name in ("publish and checkpoint", PACKED))
    numbers = adapter_size(shape, spec).parameters // (config.trainer.ep if shape.experts else 1)
    wire = by_place(layout, send_places(config)).shards[0].nbytes
    copies, packers = 3 * 4 * numbers, 2
    assert found.device == packers * 4 * (plan.space - plan.own)
    assert (packed.device, packed.host) == (wire, 0)
    assert found.host == copies, "shards are packed on the device"


@pytest.mark.parametrize("over_host", [False, True])
@pytest.mark.parametrize(
    ("path", "model", "overrides"),
    [
        (MOE, "Qwen/Qwen3-30B-A3B", []),
        (MOE, "Qwen/Qwen3-30B-A3B", ["trainer.engine=fsdp", "trainer.tp=1", "trainer.ep=1"]),
        (MOE, "Qwen/Qwen3-30B-A3B", ["trainer.etp=2", "trainer.tp=2", "trainer.ep=4"]),
        (MOE, "Qwen/Qwen3-30B-A3B", ["trainer.ep=2", "trainer.pp=2", "trainer.pp_layers=[20, 28]"]),
        (DENSE, "Qwen/Qwen2.5-72B-Instruct", []),
    ],
)
def test_owners_alone_copy_checkpoints_and_packed_versions(
    path: Path, model: str, overrides: list[str], over_host: bool
) -> None:
    """Against the shards of the layout on each node: three copies in fp32, and one to send where gloo sends."""
    backend = "weight_sync.backend=" + ("gloo" if over_host else "nccl")
    shape, config = ModelShape.from_hf(known_config(model) or {}), load_config([path], [*overrides, backend])
    parallel = ParallelLayout.of(config.trainer, layers=shape.layers, experts=shape.experts)
    sharded, spec = ShardedModel(shape=shape, layout=parallel), config.adapters[0].spec("")
    ranks, held = [m for m in job_memory(config, shape) if m.role == "trainer"], Counter[int]()
    for shard in wire_layout(sharded, spec, "float32").shards:
        held[seats_of(config).trainer[shard.source].node] += 3 * shard.nbytes + shard.nbytes // 2 * over_host
    for node in {node for rank in ranks for node in rank.nodes}:
        copies = [p.host * m.nodes.count(node) for m in ranks for p in m.parts if p.name in (CHECKPOINT, PACKED)]
        assert sum(copies) == pytest.approx(held[node], rel=0.1), node
    assert sum(len(m.nodes) for m in ranks) == config.trainer.world_size


def test_ranks_that_own_no_experts_copy_no_adapter_of_attention_alone() -> None:
    """Of two adapters the first rank copies both, the other owners of experts one, and the remaining eight none."""
    shape, config = ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {}), load_config([MOE])
    [both] = config.adapters
    attention = both.model_copy(update={"name": "attention", "target_modules": ["linear_qkv"]})
    job = job_memory(config.model_copy(update={"adapters": [both, attention]}), shape)
    ranks = [(len(m.nodes), sum(p.host for p in m.parts if p.name == CHECKPOINT)) for m in job if m.role == "trainer"]
    size = {a.name: 12 * adapter_size(shape, a.spec("")).parameters for a in (both, attention)}
    first, other = size[both.name] // 8 + size["attention"], size[both.name] // 8
    assert ranks == [(1, pytest.approx(first, abs=99)), (7, pytest.approx(other, abs=99)), (8, 0)]


EP8_PP8 = ["trainer.world_size=256", "trainer.tp=4", "trainer.ep=8", "trainer.pp=8", "cluster.nodes=64"]
STAGES = [12, 12, 12, 12, 12, 12, 11, 11]
ONE_NODE = ["trainer.world_size=8", "trainer.tp=2", "cluster.nodes=2"]
ATTENTION = "adapters.0.target_modules=[linear_qkv, linear_proj]"


@pytest.mark.parametrize(
    ("model", "overrides", "owners", "sources"),
    [
        ("Qwen/Qwen3-30B-A3B", [], 8, 1),
        ("Qwen/Qwen3-30B-A3B", [ATTENTION], 1, 1),
        ("Qwen/Qwen3-30B-A3B", ["adapters.0.expert_layout=shared"], 1, 1),
        ("Qwen/Qwen3-30B-A3B", ["adapters.0.expert_layout=shared_outer"], 8, 1),
        ("Qwen/Qwen3-30B-A3B", ["trainer.etp=2", "trainer.tp=2"], 8, 2),
        ("Qwen/Qwen3-30B-A3B", ["rollout.max_adapters=2", "service={}"], 8, 8),
        ("Qwen/Qwen3-30B-A3B", ["cluster.device=cpu", "model.dtype=float32"], 8, 8),
        ("Qwen/Qwen3-235B-A22B", [*EP8_PP8, f"trainer.pp_layers={STAGES}"], 64, 8),
        ("Qwen/Qwen3-235B-A22B", [*EP8_PP8, f"trainer.pp_layers={STAGES}", ATTENTION], 8, 8),
        ("Qwen/Qwen3-30B-A3B", ["trainer.ep=2", "trainer.pp=2", "trainer.pp_layers=[11, 13, 14, 10]"], 4, 2),
        ("Qwen/Qwen3-30B-A3B", [*ONE_NODE, "trainer.ep=2", "trainer.pp=2", "trainer.pp_layers=[20, 28]"], 4, 1),
        ("Qwen/Qwen3-235B-A22B", [*EP8_PP8, "trainer.pp=1", "trainer.ep=64"], 64, 8),
        ("Qwen/Qwen2.5-72B-Instruct", ["trainer.ep=1", "trainer.pp=2"], 2, 2),
    ],
)
def test_sources_and_their_bytes_are_those_of_the_layout(
    model: str, overrides: list[str], owners: int, sources: int
) -> None:
    shape, config = ModelShape.from_hf(known_config(model) or {}), load_config([MOE], overrides)
    parallel = ParallelLayout.of(config.trainer, layers=shape.layers, experts=shape.experts)
    adapter = config.adapters[0]
    owned = wire_layout(ShardedModel(shape=shape, layout=parallel), adapter.spec(""), config.model.dtype)
    assert len(owned.shards) == owners
    layout = by_place(owned, send_places(config))
    assert len(layout.shards) == source_ranks(config, shape) == sources
    estimated = sent_bytes(config, shape, adapter)
    assert estimated.keys() == {shard.source for shard in layout.shards}
    for shard in layout.shards:  # attention is not divided over the expert-parallel ranks
        assert estimated[shard.source] == pytest.approx(shard.nbytes, rel=0.15)


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (3, 2), (4, 3)])
def test_virtual_stages_hold_what_the_schedule_has_in_progress(pp: int, chunks: int) -> None:
    """Passes in Megatron's order, counted one by one: rounds of pp micro-batches by chunk, backward passes
    by chunk in reverse, one forward and one backward in turn after the warm-up."""
    trainer = TrainerConfig(world_size=pp, pp=pp, pp_layers=[1] * (pp * chunks))
    order = [(r * pp + i, c) for r in range(6) for c in range(chunks) for i in range(pp)]
    for stage in range(pp):
        warmup = 2 * (pp - 1 - stage) + (chunks - 1) * pp
        alive, most, done = set[tuple[int, int]](), 0, 0
        for number, each in enumerate(order):
            alive.add(each)
            most = max(most, len(alive))
            if number >= warmup:
                micro_batch, chunk = order[done]
                alive.remove((micro_batch, chunks - 1 - chunk))
                done += 1
        assert in_flight(trainer, stage) == most / chunks
    assert [in_flight(TrainerConfig(world_size=pp, pp=pp), stage) for stage in range(pp)] == list(range(pp, 0, -1))


def test_tensor_parallel_ranks_divide_activations() -> None:
    alone, two = (
        part(estimate("trainer.world_size=2", f"trainer.tp={tp}", "trainer.ep=1")["trainer rank"], "activations")
        for tp in (1, 2)
    )
    assert two == pytest.approx(alone / 2)


def test_recompute_and_shorter_micro_batches_need_less() -> None:
    full, less = (estimate(*how)["trainer rank"] for how in ((), ("trainer.recompute=full",)))
    assert part(full, "activations") > 10 * part(less, "activations")
    some, away = (estimate(f"trainer.recompute={kind}")["trainer rank"] for kind in ("selective", "offload"))
    layers, heads, width = 48, 32, 128  # with a head's log-sum-exp, 4 bytes
    kept = layers * 16384 // 4 * heads * (2 * width + 4) * 1.1
    assert part(some, "activations") - part(less, "activations") == pytest.approx(kept)
    inputs = layers * 16384 // 4 * 2048 * 2
    assert part(less, "activations") - part(away, "activations") == pytest.approx(1.1 * inputs)
    assert away.host - less.host == inputs
    rows = 8 * 3 * (2048 + 768)  # of a token's experts: gradients of inputs, outputs and the MLP between
    alone = estimate("trainer.world_size=1", "trainer.tp=1", "trainer.ep=1")["trainer rank"]
    assert part(alone, "buffers") == pytest.approx(1.1 * 16384 * (rows + 2048) * 2)
    half = estimate("trainer.max_tokens_per_microbatch=8192")["trainer rank"]
    hidden = 8192 * 2048 * 2 * 2  # states and their gradient; the logits of a chunk are not those of a micro-batch
    assert part(less, "buffers") - part(half, "buffers") == hidden
    assert part(half, "buffers") == 2**26 * (4 + 4 + 2) + hidden


@pytest.mark.parametrize(
    ("overrides", "key", "severity", "words"),
    [
        (
            ["trainer.recompute=none", "trainer.max_tokens_per_microbatch=49152"],
            "trainer.max_tokens_per_microbatch",
            Severity.WARNING,
            "largest part is activations",
        ),
        (
            ["cluster.device_memory_gib=8", "trainer.recompute=full"],
            "trainer.world_size",
            Severity.ERROR,
            "a device has 8",
        ),
        (
            ["rollout.tp=1", "rollout.servers=8", "cluster.device_memory_gib=64"],
            "rollout.tp",
            Severity.ERROR,
            "gets 54",
        ),
        (["cluster.slurm.mem=40G"], "cluster.slurm.mem", Severity.WARNING, "cluster.slurm.mem is 40"),
        (
            ["cluster.slurm.mem=60G", "weight_sync.backend=gloo", "weight_sync.bucket_mib=1024"],
            "cluster.slurm.mem",
            Severity.WARNING,
            "21 of them for the staging of publishes",
        ),
        (
            [
                "cluster.nodes=1",
                "weight_sync.backend=gloo",
                "cluster.slurm.mem=900G",
                "cluster.slurm.components=[{roles: [trainer, controller], nodes: 2}, {roles: [rollout], mem: 48G}]",
            ],
            "cluster.slurm.components.1.mem",
            Severity.WARNING,
            "on a node of rollout",
        ),
    ],
)
def test_what_does_not_fit(overrides: list[str], key: str, severity: Severity, words: str) -> None:
    findings = {f.path: f for f in check(load_config([MOE], overrides), FACTS)}
    assert (findings[key].severity, words in findings[key].reason) == (severity, True), findings


MERGED = "rollout.adapter_mode=merged"


def test_smaller_buckets_need_less_host_memory_than_a_node_has() -> None:
    crowded, fits = (
        check(
            load_config([MOE], ["cluster.slurm.mem=60G", "weight_sync.backend=gloo", f"weight_sync.bucket_mib={mib}"]),
            FACTS,
        )
        for mib in (1024, 64)
    )
    assert ["lower weight_sync.bucket_mib" in f.fix for f in crowded] == [True]
    assert fits == ()


def test_staging_is_what_the_layout_of_the_wire_asks_for() -> None:
    """Rings of a worker for the shards that the trainer plans, on the side on which they arrive."""
    hf = known_config("Qwen/Qwen3-30B-A3B") or {}
    shape, config = ModelShape.from_hf(hf), load_config([MOE])
    parallel = ParallelLayout.of(config.trainer, layers=shape.layers, experts=shape.experts)
    spec = config.adapters[0].spec("m")
    owned = wire_layout(ShardedModel(shape=shape, layout=parallel), spec, "bfloat16")
    layout = by_place(owned, send_places(config))
    bucket = int(config.weight_sync.bucket_mib * 2**20)
    longest = [max(b.end - b.start for b in plan_buckets(shard, bucket)) for shard in layout.shards]
    assert (len(owned.shards), len(longest)) == (8, 1), "of one node"
    assert staging_bytes(config, shape) == pytest.approx(RING * sum(longest), rel=0.03)
    nccl, gloo = (
        next(p for p in estimate(*keys)["server replica"].parts if p.name == "staging of publishes")
        for keys in ((), ("weight_sync.backend=gloo",))
    )
    measured = 5 * MEASURED_BYTES
    assert (nccl.device - measured, nccl.host) == (pytest.approx(RING * sum(longest), rel=0.03), 0)
    assert gloo.device - measured == pytest.approx(sum(longest), rel=0.03), "one bucket is uploaded at a time"
    assert gloo.host == pytest.approx(2 * RING * sum(longest), rel=0.03), "page-locked, of two workers"


FSDP = ["trainer.engine=fsdp", "trainer.tp=1", "trainer.ep=1"]
PP8 = [f"trainer.pp_layers={STAGES}", "trainer.tp=4", "trainer.pp=8", "trainer.world_size=256", "cluster.nodes=64"]


@pytest.mark.parametrize(
    ("model", "overrides", "sources"),
    [
        ("Qwen/Qwen3-30B-A3B", [*FSDP, "trainer.world_size=8"], list(range(8))),
        ("Qwen/Qwen3-30B-A3B", [*FSDP, "trainer.world_size=32", "cluster.nodes=8"], list(range(0, 32, 4))),
        ("Qwen/Qwen3-30B-A3B", [*FSDP, "trainer.world_size=12", "cluster.nodes=8"], [0, 1, 3, 4, 6, 7, 9, 10]),
        ("Qwen/Qwen3-30B-A3B", ["trainer.tp=4", "trainer.ep=1"], [0, 4, 8, 12]),
        ("Qwen/Qwen3-30B-A3B", ["trainer.tp=2", "trainer.ep=2"], list(range(16))[::4] + list(range(16))[1::4]),
        ("Qwen/Qwen3-30B-A3B", ["trainer.tp=2", "trainer.ep=2", ATTENTION], [0, 4, 8, 12]),
        ("Qwen/Qwen3-30B-A3B", ["trainer.etp=2", "trainer.tp=2", "trainer.ep=4"], [0, 2, 4, 6, 8, 10, 12, 14]),
        ("Qwen/Qwen3-30B-A3B", ["adapters.0.expert_layout=shared"], list(range(8))),
        ("Qwen/Qwen3-235B-A22B", [*FSDP, "trainer.world_size=32", "cluster.nodes=12"], list(range(0, 32, 4))),
        ("Qwen/Qwen3-235B-A22B", PP8, [32 * stage + part for stage in range(8) for part in range(8)]),
        ("Qwen/Qwen3-32B", [*FSDP], [0, 4, 8, 12]),
        ("Qwen/Qwen2.5-72B-Instruct", ["trainer.tp=8", "trainer.ep=1"], [0, 8]),
        ("Qwen/Qwen2.5-72B-Instruct", ["trainer.ep=1", "trainer.pp=2"], [0, 8]),
    ],
)
def test_replicas_share_merged_weights_by_their_bytes(model: str, overrides: list[str], sources: list[int]) -> None:
    """Sources, bytes and rings of the plan are those of the layout, whose largest share is about the mean."""
    shape, config = ModelShape.from_hf(known_config(model) or {}), load_config([MOE], [MERGED, *overrides])
    parallel = ParallelLayout.of(config.trainer, layers=shape.layers, experts=shape.experts)
    sharded, [adapter] = ShardedModel(shape=shape, layout=parallel), config.adapters
    shared, whole = (
        merged_layout(wire_layout(sharded, adapter.spec(""), "float32", spread=spread), "bfloat16")
        for spread in (True, False)
    )
    assert shared.names_digest == whole.names_digest
    assert [shard.source for shard in shared.shards] == sorted(sources)
    estimated, sizes = sent_bytes(config, shape, adapter), {s.source: s.nbytes for s in shared.shards}
    assert estimated.keys() == sizes.keys()
    assert sum(sizes.values()) == whole.nbytes == pytest.approx(sum(estimated.values()))
    assert max(sizes.values()) < 1.15 * whole.nbytes / len(sources)
    bucket = bucket_of(config.weight_sync.bucket_bytes, len(sources))
    rings = RING * sum(max(b.nbytes for b in plan_buckets(shard, bucket)) for shard in shared.shards)
    assert staging_bytes(config, shape) == pytest.approx(rings, rel=0.06)
    assert rings < 5 * GIB
    locked = {1 << (max(sizes.values()) - 1).bit_length(), 1 << (min(sizes.values()) - 1).bit_length(), 0}
    ranks = [(len(m.nodes), p.host) for m in job_memory(config, shape) for p in m.parts if p.name == PACKED]
    assert {host for _, host in ranks} <= locked
    assert sum(n for n, host in ranks if host) == len(sources)


def test_publishes_need_room_beside_vllms_share() -> None:
    """vLLM fills its share with the KV cache before the first publish."""
    keys = ["cluster.device_memory_gib=80", "rollout.gpu_memory_utilization=0.999"]
    [found] = check(load_config([MOE], keys), FACTS)
    assert (found.path, found.severity) == ("rollout.gpu_memory_utilization", Severity.ERROR)
    assert "publishes need about 0.7 GiB of a server's device, and 0.999 leaves 0.1 of 80" in found.reason
    assert check(load_config([MOE], [*keys, "rollout.kv_cache_gib=10"]), FACTS) == ()


LARGE = ["trainer.world_size=32", "trainer.pp=2", "trainer.recompute=full", "rollout.servers=2", "rollout.tp=8"]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_merged_version_is_page_locked_and_sent_through_a_few_buckets(backend: str) -> None:
    """Linear layers of 72B: 131 GiB in bfloat16. Each matrix of an MLP is a bucket; a sum takes twice its fp32."""
    facts, keys = Facts(hf_config=known_config("Qwen/Qwen2.5-72B-Instruct")), [MERGED, f"weight_sync.backend={backend}"]
    ranks = job_memory(load_config([DENSE], keys), ModelShape.from_hf(facts.hf_config or {}))
    packed = [(p.device, p.host) for m in ranks for p in m.parts for _ in m.nodes if p.name == PACKED]
    matrix = 8192 * 29568
    device = 2 * 4 * matrix + (3 * 2 * matrix if backend == "nccl" else 0)
    assert sorted(packed)[-3:] == [(0, 0), (device, 128 * GIB), (device, 128 * GIB)], "of two copies of the adapter"
    assert check(load_config([DENSE], keys), facts) == ()


def test_a_version_that_no_link_carries_in_time_is_a_warning() -> None:
    """468 GB of 235 G parameters at 12.5 GB/s; an attempt has 12 of 30 s."""
    sizes = [MERGED, *LARGE]
    facts = Facts(hf_config=known_config("Qwen/Qwen3-235B-A22B"))
    [found] = check(load_config([MOE], [*sizes, "cluster.nodes=6"]), facts)
    assert (found.path, found.severity) == ("weight_sync.timeout_s", Severity.WARNING)
    assert "at least 37 s over a link and an attempt 12 s" in found.reason
    assert "raise weight_sync.timeout_s to 187, and run.stall_s" in found.fix
    longer = ["weight_sync.timeout_s=187", "run.stall_s=2000"]
    assert check(load_config([MOE], [*sizes, "cluster.nodes=6", *longer]), facts) == ()
    near = ["cluster.nodes=1", "cluster.devices_per_node=48"]
    assert "weight_sync.timeout_s" not in {f.path for f in check(load_config([MOE], [*sizes, *near]), facts)}


def test_slots_that_take_the_room_are_named_with_what_makes_them_smaller() -> None:
    """Qwen3-235B-A22B on nodes of 8 x 80 GiB; the first fix alone is enough."""
    sizes = [*LARGE, "cluster.nodes=6"]
    facts = Facts(hf_config=known_config("Qwen/Qwen3-235B-A22B"))
    [found] = check(load_config([MOE], sizes), facts)
    assert ", 47 of them for adapter slots," in found.reason
    assert found.fix.startswith("set rollout.expert_parallel=true, raise rollout.gpu_memory")
    assert "rollout.tp" not in found.fix, "a node has no more devices"
    assert check(load_config([MOE], [*sizes, "rollout.expert_parallel=true"]), facts) == ()
    dense = load_config([DENSE], ["rollout.tp=4", "rollout.servers=4", "rollout.max_staleness=150"])
    [found] = check(dense, Facts(hf_config=known_config("Qwen/Qwen2.5-72B-Instruct")))
    fewer = "lower rollout.max_staleness, rollout.max_adapters or rollout.max_lora_rank"
    assert found.fix.startswith(f"{fewer}, raise rollout.tp or rollout.gpu_memory_utilization")


def test_a_step_of_a_server_is_as_long_as_configured_where_prompts_are_split() -> None:
    longer, on_cpu = "rollout.max_model_len=32768", ["cluster.device=cpu", "weight_sync.backend=gloo"]
    short, long = (part(estimate(*more)["server replica"], "activations") for more in ([], [longer]))
    assert short == long > 0
    whole = [estimate(*on_cpu, *more)["server replica"].parts for more in ([], [longer])]
    short, long = (next(p.host for p in parts if p.name == "activations") for parts in whole)
    assert short < long


def test_one_device_for_trainer_and_server() -> None:
    facts = Facts(hf_config=known_config("Qwen/Qwen2.5-1.5B-Instruct"))
    assert check(load_config([ONE_GPU]), facts) == ()
    [tight] = check(load_config([ONE_GPU], ["rollout.gpu_memory_utilization=0.75"]), facts)
    assert (tight.path, tight.severity) == ("rollout.gpu_memory_utilization", Severity.WARNING)
    assert "0.75 leaves 6 of 24 GiB to the trainer rank on the same device" in tight.reason
    [full] = check(load_config([ONE_GPU], ["rollout.gpu_memory_utilization=0.9"]), facts)
    assert (full.path, full.severity) == ("rollout.gpu_memory_utilization", Severity.ERROR)
    [cache] = check(load_config([ONE_GPU], ["rollout.kv_cache_gib=6"]), facts)
    assert (cache.path, "KV cache of 6" in cache.reason, "rollout.kv_cache_gib" in cache.fix) == (
        "rollout.tp",
        True,
        True,
    )


def test_the_recipes_fit_their_devices() -> None:
    for path, model in ((MOE, "Qwen/Qwen3-30B-A3B"), (DENSE, "Qwen/Qwen2.5-72B-Instruct")):
        assert check(load_config([path]), Facts(hf_config=known_config(model))) == ()


@pytest.mark.parametrize(
    ("text", "nbytes"), [(None, None), ("0", None), ("800G", 800 * GIB), ("2048", 2 * GIB), ("1t", 1024 * GIB)]
)
def test_memory_as_slurm_reads_it(text: str | None, nbytes: int | None) -> None:
    assert slurm_bytes(text) == nbytes


def test_the_moments_of_a_stage_are_divided_over_its_ranks() -> None:
    whole = part(estimate("trainer.world_size=1", "trainer.tp=1", "trainer.ep=1")["trainer rank"], "optimizer moments")
    for sizes in (["trainer.engine=fsdp", "trainer.tp=1", "trainer.ep=1"], ["trainer.tp=2", "trainer.ep=8"]):
        assert part(estimate(*sizes)["trainer rank"], "optimizer moments") == pytest.approx(whole / 16, rel=1e-6)


def test_context_parallelism_gathers_keys_and_values_of_all_ranks() -> None:
    one, two = (estimate("trainer.recompute=none", f"trainer.cp={cp}")["trainer rank"] for cp in (1, 2))
    gathered = 48 * 16384 // 4 * 2 * (2 - 1) * 4 * 128 * 2  # layers, tokens, keys and values of the other rank, bytes
    assert part(two, "activations") - part(one, "activations") == pytest.approx(1.1 * gathered)
    assert part(two, "base weights") == part(one, "base weights")


@pytest.mark.parametrize(("cp", "elements"), [(1, 3 * 29568), (4, 3 * 29568), (8, 2 * 2 * 65 * 8 * 128 // 2)])
def test_a_pass_takes_keys_and_values_for_each_part_of_a_row(cp: int, elements: int) -> None:
    """Of both and their gradients eight ranks have 65 / 16 rows each, 65 / 2 times their tokens; an MLP's are fewer."""
    shape = ModelShape.from_hf(known_config("Qwen/Qwen2.5-72B-Instruct") or {})
    config = load_config([MOE], [f"trainer.cp={cp}", "trainer.tp=2", "trainer.ep=1"])
    assert pass_elements(config, shape, 0) == (elements + 8192) / 2


def test_dropout_keeps_a_byte_of_each_input_of_lora_a_and_makes_masks_of_24() -> None:
    """Of attention's two inputs and of gate and up 8192 each, of down 29568."""
    shape = ModelShape.from_hf(known_config("Qwen/Qwen2.5-72B-Instruct") or {})
    keys = ["trainer.recompute=none", "trainer.tp=1", "trainer.ep=1"]
    plain, dropping = (load_config([MOE], [*keys, f"adapters.0.dropout={rate}"]) for rate in (0.0, 0.05))
    assert 2 * (layer_elements(dropping, shape, 0) - layer_elements(plain, shape, 0)) == 3 * 8192 + 29568
    with Alive() as made:
        Dropout(rate=0.05, seed=1).keep(torch.zeros(64, dtype=torch.int64), 5, 4096)
    buffer = (pass_elements(dropping, shape, 0) - 8192) * 2
    assert buffer / 29568 == pytest.approx(made.peak / (64 * 4096), rel=0.01)
    assert pass_elements(plain, shape, 0) == 3 * 29568 + 8192

"""Each rule on facts made by hand; the machine is not asked except where a test says so."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity, resolve_targets
from areal_lora.config.rules.guardrails import check
from areal_lora.config.sizing.slots import adapter_capacity, served_targets
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.common.micro_batches import plans_of
from areal_lora.errors import ConfigError
from areal_lora.families.registry import derive, known_config
from tests.support.paths import EXAMPLES

MOE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]
DENSE = [EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"]
ONE_GPU = [EXAMPLES / "one_gpu.yaml"]
EMBEDDED = [*MOE, EXAMPLES / "embedded.yaml"]

FACTS = {
    "moe": Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B")),
    "dense": Facts(hf_config=known_config("Qwen/Qwen3-8B")),
    "one_gpu": Facts(hf_config=known_config("Qwen/Qwen2.5-1.5B-Instruct")),
    "embedded": Facts(hf_config=json.loads((EXAMPLES / "tiny_model" / "config.json").read_text())),
}
FACTS["fsdp"] = FACTS["long"] = FACTS["embedded"]
PHI3 = {**FACTS["embedded"].hf_config, "model_type": "phi3"}
ALL = "adapters.0.target_modules=[all-linear]"
LAYERS = derive(
    {
        f"model.layers.{layer}.{path}.weight": shape
        for layer in range(4)
        for path, shape in {"self_attn.qkv_proj": (64, 64), "mlp.down_proj": (64, 64)}.items()
    },
    4,
)
PATHS = {
    "moe": MOE,
    "dense": DENSE,
    "one_gpu": ONE_GPU,
    "embedded": EMBEDDED,
    "fsdp": [*EMBEDDED, EXAMPLES / "embedded_fsdp.yaml"],
    "long": [*EMBEDDED, EXAMPLES / "embedded_long.yaml"],
}


SERVICE = ["service={}", "rollout.max_adapters=4"]


def test_a_service_needs_no_adapter_and_knows_how_many_there_will_be() -> None:
    config = load_config(EMBEDDED, SERVICE)
    assert check(config, FACTS["embedded"]) == ()
    empty = config.model_copy(update={"adapters": []})
    assert check(empty, FACTS["embedded"]) == ()
    resolved = resolve_targets(empty, FACTS["embedded"])
    assert resolved.service is not None
    assert served_targets(resolved) == ("linear_fc1", "linear_fc2", "linear_proj", "linear_qkv")
    assert adapter_capacity(resolved) == 4


@pytest.mark.parametrize("job", PATHS)
def test_shipped_configurations_pass(job: str) -> None:
    assert check(load_config(PATHS[job]), FACTS[job]) == ()


# job, overrides, facts to change, key to be named, words of the line
# fmt: off
# ruff: noqa: E501
TABLE: list[tuple[str, list[str], dict, str, list[str]]] = [
    ("embedded", ["trainer.ep=3", "trainer.world_size=3"], {}, "trainer.ep", ["3 does not divide", "8 experts", "4, 8"]),
    ("embedded", ["trainer.tp=3"], {}, "trainer.tp", ["4 attention heads"]),
    ("embedded", ["trainer.pp=5"], {}, "trainer.pp", ["5 stages", "4 layers"]),
    ("dense", ["trainer.tp=64"], {}, "trainer.tp", ["32 attention heads"]),
    ("embedded", ["trainer.pp=2", "trainer.world_size=4", "trainer.pp_layers=[1, 2]"], {}, "trainer.pp_layers", ["[1, 2]", "4 layers"]),
    ("embedded", ["trainer.etp=3"], {}, "trainer.etp", ["64 columns of an expert"]),
    ("embedded", ["trainer.world_size=3"], {}, "trainer.world_size", ["etp x ep x pp = 2", "multiple of 2"]),
    ("moe", ["trainer.world_size=6", "trainer.ep=2", "cluster.nodes=2"], {}, "trainer.world_size", ["tp x cp x pp = 4"]),
    ("dense", ["trainer.ep=2"], {}, "trainer.ep", ["dense"]),
    ("embedded", ["trainer.engine=fsdp"], {}, "trainer.ep", ["2", "trainer.engine = fsdp"]),
    ("dense", ["trainer.engine=fsdp", "trainer.tp=1", "trainer.pp_layers=[36]"], {}, "trainer.pp_layers", ["no stages"]),
    ("embedded", ["trainer.engine=fsdp", "trainer.ep=1", "trainer.cpu_offload=true"], {}, "trainer.cpu_offload", ["host memory anyway"]),
    ("dense", ["model.dtype=float32"], {}, "model.dtype", ["16-bit", "bfloat16"]),
    ("dense", ["trainer.cpu_offload=true"], {}, "trainer.cpu_offload", ["Megatron"]),
    ("dense", ["trainer.fsdp_shard=2"], {}, "trainer.fsdp_shard", ["tp, pp, ep and etp"]),
    ("embedded", ["trainer.moe_dispatcher=deepep"], {}, "trainer.moe_dispatcher", ["deepep", "run on GPUs", "alltoall"]),
    ("moe", ["trainer.moe_dispatcher=hybridep", "trainer.ep=1", "trainer.recompute=full"], {}, "trainer.moe_dispatcher", ["ep x etp = 1"]),
    ("moe", ["trainer.moe_dispatcher=deepep", "adapters.0.dropout=0.1"], {}, "trainer.moe_dispatcher", ["adapters.dropout"]),
    ("fsdp", ["trainer.moe_dispatcher=deepep"], {}, "trainer.moe_dispatcher", ["fsdp sends no tokens"]),
    ("fsdp", ["trainer.fsdp_shard=3"], {}, "trainer.fsdp_shard", ["2 ranks cannot be divided", "3 ranks each"]),
    ("embedded", ["adapters.0.sft.steps=2", "adapters.0.sft.column=solution"], {}, "adapters.0.sft.column", ["'solution' names a column", "word_problems has none"]),
    ("fsdp", [ALL, "trainer.engine=megatron"], {"hf_config": PHI3, "checkpoint": LAYERS}, "model.path", ["'phi3' has no row", "set trainer.engine=fsdp"]),
    ("fsdp", [], {"hf_config": PHI3}, "model.path", ["safetensors files, which are not here"]),
    ("fsdp", [ALL, "rollout.tp=2"], {"hf_config": PHI3, "checkpoint": LAYERS}, "rollout.tp", ["2, but", "'phi3'", "not divided"]),
    ("fsdp", [ALL], {"hf_config": {**PHI3, "model_type": "bitnet"}, "checkpoint": LAYERS}, "rollout", ["serves no adapters", "'bitnet'"]),
    ("fsdp", [ALL], {"hf_config": {**PHI3, "attn_logit_softcapping": 50.0}, "checkpoint": LAYERS}, "model.path", ["no engine trains it", "soft cap"]),
    ("fsdp", [ALL], {"hf_config": {**PHI3, "model_type": "ernie4_5", "use_bias": True}, "checkpoint": LAYERS}, "model.path", ["no engine", "use_bias of True, which vLLM serves as False"]),
    ("moe", ["model.shared_memory=true"], {"shared_bytes": 2**30}, "model.shared_memory", ["56.9 GiB", "/dev/shm holds 1.0", "--shm-size"]),
    ("embedded", ["rollout.tp=3"], {}, "rollout.tp", ["4 attention heads"]),
    ("dense", ["rollout.expert_parallel=true"], {}, "rollout.expert_parallel", ["dense"]),
    ("moe", ["rollout.tp=16", "rollout.servers=1", "cluster.nodes=4"], {}, "rollout.tp", ["node of 8"]),
    ("embedded", ["adapters.0.target_modules=[linear_qvk]"], {}, "adapters.0.target_modules", ["linear_qvk", "linear_qkv,"]),
    ("embedded", ["adapters.0.target_modules=[q_proj]"], {}, "adapters.0.target_modules", ["q_proj without k_proj, v_proj", "linear_qkv"]),
    ("embedded", ["adapters.0.target_modules=[linear_fc3*]"], {}, "adapters.0.target_modules", ["matches no module"]),
    ("embedded", ["adapters.0.exclude_modules=['*']"], {}, "adapters.0.exclude_modules", ["leaves no module"]),
    ("embedded", ["service={}"], {}, "rollout.max_adapters", ["how many adapters"]),
    ("embedded", [*SERVICE, "service.target_modules=[linear_qvk]"], {}, "service.target_modules", ["linear_qvk"]),
    ("embedded", [*SERVICE, "adapters.0.name=a.1"], {}, "adapters.0.name", ["'a.1' has a dot"]),
    ("embedded", [*SERVICE, "rollout.adapter_mode=merged"], {}, "rollout.adapter_mode", ["adapters of a service cannot be merged"]),
    ("embedded", ["adapters.0.rank=16"], {}, "adapters.0.rank", ["16", "max_lora_rank = 8"]),
    ("embedded", ["adapters.0.rank_pattern={o_proj: 12}"], {}, "adapters.0.rank_pattern", ["12", "max_lora_rank = 8"]),
    ("embedded", ["adapters.0.rank_pattern={q_proj: 4}"], {}, "adapters.0.rank_pattern", ["self_attn.q_proj", "self_attn.k_proj", "(q|k|v)_proj"]),
    ("embedded", ["adapters.0.rank_pattern={'experts.7.*': 4}"], {}, "adapters.0.rank_pattern", ["experts.0.gate_proj and", "experts.7"]),
    ("embedded", ["adapters.0.alpha_pattern={'o_porj': 4}"], {}, "adapters.0.alpha_pattern", ["'o_porj' matches no adapted module"]),
    ("embedded", ["adapters.0.alpha_pattern={'o_(': 4}"], {}, "adapters.0.alpha_pattern", ["no regular expression"]),
    ("embedded", ["rollout.max_lora_rank=12"], {}, "rollout.max_lora_rank", ["8, 16"]),
    ("embedded", ["adapters.0.sampling.max_new_tokens=256"], {}, "adapters.0.sampling.max_new_tokens", ["no room for a prompt"]),
    ("embedded", ["adapters.0.sampling.n_samples=1025", "adapters.0.sampling.prompts_per_step=1"], {}, "adapters.0.sampling.n_samples", ["1024 sequences"]),
    ("embedded", ["rollout.max_model_len=1024"], {}, "rollout.max_model_len", ["512 positions"]),
    ("embedded", ["trainer.max_tokens_per_microbatch=128"], {}, "trainer.max_tokens_per_microbatch", ["256"]),
    ("embedded", ["trainer.cp=2", "trainer.max_tokens_per_microbatch=127"], {}, "trainer.max_tokens_per_microbatch", ["254 tokens of 2", "256", "at least 128"]),
    ("embedded", ["adapters.0.sampling={prompts_per_step: 1, n_samples: 3}", "trainer.world_size=8", "trainer.cp=2"], {}, "adapters.0.sampling.prompts_per_step", ["4 data-parallel replicas"]),
    ("embedded", ["adapters.0.sampling.n_samples=1"], {}, "adapters.0.sampling.n_samples", ["grpo", "at least 2"]),
    ("embedded", ["adapters.0.minibatches=65"], {}, "adapters.0.minibatches", ["64 prompts"]),
    ("embedded", ["cluster.nodes=2"], {}, "cluster.nodes", ["this machine"]),
    ("moe", ["cluster.nodes=2"], {}, "cluster.nodes", ["24 devices are needed", "16 are declared"]),
    ("moe", ["cluster.bind=127.0.0.1"], {}, "cluster.bind", ["cannot reach"]),
    ("embedded", ["cluster.interface=eth0"], {}, "cluster.interface", ["'eth0'", "contradicts cluster.bind = 127.0.0.1"]),
    ("embedded", ["cluster.bind=0.0.0.0", "cluster.interface=10.0.0.0/40"], {}, "cluster.interface", ["10.0.0.0/40"]),
    ("embedded", ["cluster.bind=10.9.9.9"], {"address_problem": ConfigError("cluster.bind", "no such address")}, "cluster.bind", ["no such"]),
    ("dense", [], {"devices": 4}, "cluster.device", ["8 cuda devices", "4 are visible"]),
    ("one_gpu", ["rollout.kv_cache_gib=null"], {}, "rollout.kv_cache_gib", ["measure", "set it"]),
    ("one_gpu", ["weight_sync.backend=nccl"], {}, "weight_sync.backend", ["two members on one device", "auto"]),
    ("one_gpu", ["weight_sync.backend=hccl"], {}, "weight_sync.backend", ["hccl", "cuda"]),
    ("one_gpu", ["rollout.tp=2"], {}, "rollout.tp", ["node of 1"]),
    ("one_gpu", ["rollout.servers=2"], {}, "cluster.nodes", ["2 devices are needed", "1 are declared"]),
    ("one_gpu", ["cluster.share_devices=false"], {}, "cluster.nodes", ["2 devices are needed", "1 are declared"]),
    ("one_gpu", [], {"devices": 0}, "cluster.device", ["1 cuda devices", "0 are visible"]),
    ("embedded", ["cluster.share_devices=true"], {}, "cluster.share_devices", ["on CPUs"]),
    ("embedded", ["weight_sync.backend=nccl"], {}, "weight_sync.backend", ["nccl", "cluster.device = cpu"]),
    ("embedded", [], {"hf_config": None, "model_problem": "there is no folder 'x'"}, "model.path", ["no folder 'x'"]),
    ("embedded", [], {"hf_config": {"model_type": "gpt2"}}, "model.path", ["no engine trains it", "'gpt2' has no row", "over packed sequences", "qwen3_moe"]),
    ("embedded", [], {"hf_config": {"model_type": "qwen3"}}, "model.path", ["lacks sizes"]),
    ("embedded", [], {"hf_config": {**FACTS["embedded"].hf_config, "num_experts_per_tok": [2] * 4}}, "model.path", ["lacks sizes"]),
    ("fsdp", [ALL], {"hf_config": {**PHI3, "model_type": "hunyuan_v1_moe", "intermediate_size": [64] * 4}, "checkpoint": LAYERS}, "model.path", ["no engine trains it", "'hunyuan_v1_moe' has no row"]),
    ("dense", [], {"hf_config": {**known_config("Qwen/Qwen3-8B"), "quantization_config": {"quant_method": "fp8"}}}, "model.path", ["quantised (fp8)", "16-bit checkpoint"]),
    ("fsdp", [], {"hf_config": {**FACTS["embedded"].hf_config, "compression_config": {"format": "dense"}}}, "model.path", ["quantised (of an unknown method)"]),
    ("dense", [], {"hf_config": {**known_config("meta-llama/Llama-3.1-8B"), "attention_bias": True}}, "model.path", ["attention_bias", "engine=fsdp"]),
    ("dense", [], {"hf_config": {**known_config("Qwen/Qwen3-8B"), "rope_scaling": {"type": "yarn"}}}, "model.path", ["'yarn'"]),
]
# fmt: on


@pytest.mark.parametrize(
    ("job", "overrides", "changes", "key", "words"), TABLE, ids=[f"{row[3]}:{row[4][0]}" for row in TABLE]
)
def test_rule(job: str, overrides: list[str], changes: dict, key: str, words: list[str]) -> None:
    findings = check(load_config(PATHS[job], overrides), replace(FACTS[job], **changes))
    assert [f.path for f in findings] == [key], "one mistake, one line"
    line = str(findings[0].error())
    assert findings[0].severity is Severity.ERROR
    assert "\n" not in line
    for word in words:
        assert word in line


def test_context_parallel_ranks_divide_a_sequence() -> None:
    """The longest one fits where their budgets together hold it, and they are one replica."""
    sizes = ["trainer.world_size=8", "trainer.cp=4", "trainer.max_tokens_per_microbatch=64"]
    config = load_config(EMBEDDED, [*sizes, "adapters.0.sampling={prompts_per_step: 1, n_samples: 2}"])
    assert check(config, FACTS["embedded"]) == ()
    layout = ParallelLayout.of(config.trainer, layers=4, experts=8)
    longest = config.rollout.max_model_len
    batch = scoring_batch([np.arange(longest, dtype=np.int32) + i for i in range(2)], "a")
    (plan,) = plans_of(batch, layout, config.trainer.max_tokens_per_microbatch)
    assert [len(trees) for trees in plan.trees] == [1, 1], "each replica has one of two sequences"
    assert plan.n_tokens // layout.cp == config.trainer.max_tokens_per_microbatch


def test_same_adapter_name_twice() -> None:
    config = load_config(EMBEDDED)
    config = config.model_copy(update={"adapters": [config.adapters[0]] * 2})
    assert [f.path for f in check(config, FACTS["embedded"])] == ["adapters"]


def test_a_run_may_have_several_adapters() -> None:
    config = load_config(EMBEDDED)
    twin = config.adapters[0].model_copy(update={"name": "twin"})
    assert not check(config.model_copy(update={"adapters": [config.adapters[0], twin]}), FACTS["embedded"])


def test_every_problem_is_reported_at_once() -> None:
    """Of eight subjects, whatever the order of the rules."""
    wrong = [
        "trainer.ep=3",
        "rollout.tp=3",
        "adapters.0.rank=16",
        "adapters.0.target_modules=[linear_qvk]",
        "adapters.0.sft.column=solution",
        "adapters.0.sampling.n_samples=1",
    ]
    found = {f.path for f in check(load_config(EMBEDDED, wrong), FACTS["embedded"])}
    assert {text.partition("=")[0].replace("[", "") for text in wrong} <= found


def test_warnings_are_not_errors_and_come_last() -> None:
    facts = replace(FACTS["embedded"], model_is_local=False, memory_bytes=2**20)
    findings = check(load_config(EMBEDDED, ["adapters.0.rank=16"]), facts)
    assert [f.severity for f in findings] == [Severity.ERROR, Severity.WARNING, Severity.WARNING]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.pp=3", "trainer.world_size=6", "trainer.ep=2"],
        ["adapters.0.rank=3"],
        ["adapters.0.expert_layout=shared"],
    ],
)
def test_allowed(overrides: list[str]) -> None:
    """Stages of unequal length, ranks that vLLM has no size for, one adapter for all experts."""
    assert check(load_config(EMBEDDED, overrides), FACTS["embedded"]) == ()


def test_dense_layers_between_sparse_ones() -> None:
    hf = {**(known_config("Qwen/Qwen3-30B-A3B") or {}), "decoder_sparse_step": 2}
    assert check(load_config(MOE), Facts(hf_config=hf)) == ()


def test_targets_become_canonical() -> None:
    config = load_config(EMBEDDED, ["adapters.0.target_modules=[experts, linear_qkv]"])
    assert check(config, FACTS["embedded"]) == ()
    resolved = resolve_targets(config, FACTS["embedded"])
    assert resolved.adapters[0].target_modules == ["linear_fc1", "linear_fc2", "linear_qkv"]
    config = load_config(EMBEDDED, ["adapters.0.target_modules=[all-linear]", "adapters.0.exclude_modules=[experts]"])
    resolved = resolve_targets(config, FACTS["embedded"])
    assert resolved.adapters[0].target_modules == ["linear_proj", "linear_qkv"]
    assert resolve_targets(resolved, FACTS["embedded"]) == resolved


def test_the_fsdp_engine_takes_what_megatron_does_not_compute() -> None:
    """Bias in attention, other rotary scalings, sliding windows: transformers' own modules compute them."""
    hf = {**(known_config("meta-llama/Llama-3.1-8B") or {}), "attention_bias": True, "rope_scaling": {"type": "yarn"}}
    (refused,) = check(load_config(DENSE), Facts(hf_config=hf))
    assert (refused.path, refused.fix) == ("model.path", "set trainer.engine=fsdp, or use another model")
    assert check(load_config(DENSE, ["trainer.engine=fsdp", "trainer.tp=1"]), Facts(hf_config=hf)) == ()

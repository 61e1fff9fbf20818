"""Each rule on facts made by hand; the machine is not asked except where a test says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity
from areal_lora.config.rules.guardrails import check, resolve_targets
from areal_lora.errors import ConfigError
from areal_lora.families.published import known_config
from tests.support.paths import EXAMPLES

MOE = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"]
DENSE = [EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"]
EMBEDDED = [*MOE, EXAMPLES / "embedded.yaml"]

FACTS = {
    "moe": Facts(hf_config=known_config("Qwen/Qwen3-30B-A3B")),
    "dense": Facts(hf_config=known_config("Qwen/Qwen3-8B")),
    "embedded": Facts(hf_config=json.loads((EXAMPLES / "tiny_model" / "config.json").read_text())),
}
PATHS = {"moe": MOE, "dense": DENSE, "embedded": EMBEDDED}


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
    ("moe", ["trainer.world_size=6", "trainer.ep=2"], {}, "trainer.world_size", ["tp x pp = 4"]),
    ("dense", ["trainer.ep=2"], {}, "trainer.ep", ["dense"]),
    ("embedded", ["rollout.tp=3"], {}, "rollout.tp", ["4 attention heads"]),
    ("dense", ["rollout.expert_parallel=true"], {}, "rollout.expert_parallel", ["dense"]),
    ("moe", ["rollout.tp=16", "rollout.servers=1", "cluster.nodes=4"], {}, "rollout.tp", ["node of 8"]),
    ("embedded", ["adapters.0.target_modules=[linear_qvk]"], {}, "adapters.0.target_modules", ["linear_qvk", "linear_qkv,"]),
    ("embedded", ["adapters.0.target_modules=[q_proj]"], {}, "adapters.0.target_modules", ["q_proj without k_proj, v_proj", "linear_qkv"]),
    ("embedded", ["adapters.0.target_modules=[linear_fc3*]"], {}, "adapters.0.target_modules", ["matches no module"]),
    ("embedded", ["adapters.0.exclude_modules=['*']"], {}, "adapters.0.exclude_modules", ["leaves no module"]),
    ("moe", [], {"hf_config": {**known_config("Qwen/Qwen3-30B-A3B"), "decoder_sparse_step": 2}}, "adapters.0.target_modules", ["dense layers", "mlp_only_layers"]),
    ("embedded", ["adapters.0.dropout=0.1"], {}, "adapters.0.dropout", ["random"]),
    ("embedded", ["adapters.0.rank=16"], {}, "adapters.0.rank", ["16", "max_lora_rank = 8"]),
    ("embedded", ["rollout.max_lora_rank=12"], {}, "rollout.max_lora_rank", ["8, 16"]),
    ("embedded", ["adapters.0.sampling.max_new_tokens=256"], {}, "adapters.0.sampling.max_new_tokens", ["no room for a prompt"]),
    ("embedded", ["rollout.max_model_len=1024"], {}, "rollout.max_model_len", ["512 positions"]),
    ("embedded", ["trainer.max_tokens_per_microbatch=128"], {}, "trainer.max_tokens_per_microbatch", ["256"]),
    ("embedded", ["weight_sync.probe_tokens=300"], {}, "weight_sync.probe_tokens", ["256"]),
    ("embedded", ["adapters.0.sampling.n_samples=1"], {}, "adapters.0.sampling.n_samples", ["grpo", "at least 2"]),
    ("embedded", ["adapters.0.minibatches=65"], {}, "adapters.0.minibatches", ["64 prompts"]),
    ("embedded", ["rollout.port=4000", "rollout.servers=2"], {"ports_in_use": frozenset({4001})}, "rollout.port", ["4001"]),
    ("embedded", ["rollout.port=70000"], {}, "rollout.port", ["not a port number"]),
    ("embedded", ["cluster.nodes=2"], {}, "cluster.nodes", ["this machine"]),
    ("moe", ["cluster.nodes=2"], {}, "cluster.nodes", ["24 devices are needed", "16 are declared"]),
    ("moe", ["cluster.bind=127.0.0.1"], {}, "cluster.bind", ["cannot reach"]),
    ("embedded", ["cluster.interface=eth0"], {}, "cluster.interface", ["'eth0'", "contradicts cluster.bind = 127.0.0.1"]),
    ("embedded", ["cluster.bind=0.0.0.0", "cluster.interface=10.0.0.0/40"], {}, "cluster.interface", ["10.0.0.0/40"]),
    ("embedded", ["cluster.bind=10.9.9.9"], {"address_problem": ConfigError("cluster.bind", "no such address")}, "cluster.bind", ["no such"]),
    ("dense", [], {"devices": 4}, "cluster.device", ["8 cuda devices", "4 are visible"]),
    ("embedded", [], {"hf_config": None, "model_problem": "there is no folder 'x'"}, "model.path", ["no folder 'x'"]),
    ("embedded", [], {"hf_config": {"model_type": "gpt2"}}, "model.path", ["'gpt2' is not supported", "qwen3_moe"]),
    ("embedded", [], {"hf_config": {"model_type": "qwen3"}}, "model.path", ["lacks sizes"]),
    ("dense", [], {"hf_config": {**known_config("Qwen/Qwen3-8B"), "attention_bias": True}}, "model.path", ["attention_bias"]),
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


def test_same_adapter_name_twice() -> None:
    config = load_config(EMBEDDED)
    config = config.model_copy(update={"adapters": [config.adapters[0]] * 2})
    assert [f.path for f in check(config, FACTS["embedded"])] == ["adapters"]


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


def test_dense_layers_that_vllm_sees() -> None:
    hf = {**(known_config("Qwen/Qwen3-30B-A3B") or {}), "decoder_sparse_step": 2}
    assert check(load_config(MOE), Facts(hf_config={**hf, "mlp_only_layers": [0]})) == ()
    excluded = load_config(MOE, ["adapters.0.exclude_modules=[mlp.linear_fc1]"])
    assert check(excluded, Facts(hf_config=hf)) == ()


def test_targets_become_canonical() -> None:
    config = load_config(EMBEDDED, ["adapters.0.target_modules=[experts, linear_qkv]"])
    assert check(config, FACTS["embedded"]) == ()
    resolved = resolve_targets(config, FACTS["embedded"])
    assert resolved.adapters[0].target_modules == ["linear_fc1", "linear_fc2", "linear_qkv"]
    config = load_config(EMBEDDED, ["adapters.0.target_modules=[all-linear]", "adapters.0.exclude_modules=[experts]"])
    resolved = resolve_targets(config, FACTS["embedded"])
    assert resolved.adapters[0].target_modules == ["linear_proj", "linear_qkv"]
    assert resolve_targets(resolved, FACTS["embedded"]) == resolved

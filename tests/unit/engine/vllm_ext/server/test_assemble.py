"""Arguments of vLLM's engine for a run."""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.support import ENGINE_ARGS
from areal_lora.engine.vllm_ext import stock
from areal_lora.errors import ConfigError
from areal_lora.run_folder.paths import RunFolder
from tests.support.engine.vllm_ext.byte_level import byte_level
from tests.support.lazy import Lazy
from tests.support.paths import EXAMPLES, TINY_MODEL

assemble = Lazy("areal_lora.engine.vllm_ext.server.assemble")
tokenizers = Lazy("vllm.tokenizers")
cpu_scheduler = Lazy("areal_lora.engine.vllm_ext.compat.cpu_scheduler")

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "longest", "context"),
    [
        ({}, 4096, 4097),
        ({"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8192}}, 8192, 8193),
        ({"rope_parameters": LONG}, 4096, 4096),
        ({"rope_parameters": LONG}, 4095, 4096),
        ({"rope_parameters": LONG}, 8192, 8193),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096, 4096),
    ],
)
def test_room_for_a_sampled_token_does_not_change_long_rope(config: dict[str, Any], longest: int, context: int) -> None:
    """vLLM takes the long factors for a context above the original one."""
    assert assemble.engine_context(longest, config) == context


def args_of(*overrides: str) -> assemble.AsyncEngineArgs:
    return assemble.engine_args(
        load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], overrides)
    )


def test_what_other_keys_decide_is_refused_as_a_further_argument() -> None:
    """Each argument that differs from vLLM's default without ``rollout.engine_args``, but for those of CPUs."""
    of_cpus = {"enforce_eager", "block_size", "enable_chunked_prefill", "scheduler_cls", "distributed_executor_backend"}
    of_cpus.add("additional_config")
    ours = vars(args_of("rollout.kv_cache_gib=1", "adapters.0.expert_layout=shared_outer"))
    defaults = vars(assemble.AsyncEngineArgs(model=""))
    decided = {name for name in ours if ours[name] != defaults[name]} - of_cpus
    assert decided >= {"model", "dtype", "max_loras", "worker_extension_cls"}
    assert decided <= ENGINE_ARGS.keys() <= defaults.keys()


def test_slots_share_what_the_experts_of_all_adapters_share() -> None:
    """Adapters that join may share nothing, and one of attention has no experts."""
    outer, shared = ("adapters.0.expert_layout=shared_outer", "adapters.0.expert_layout=shared")
    attention = "adapters.0.target_modules=[linear_qkv]"
    cases = ((), (outer,), (shared,), (outer, "service={}"), (outer, attention))
    assert [args_of(*case).enable_moe_shared_loras for case in cases] == [False, True, True, False, False]


def test_servers_adapt_dense_layers_that_config_json_has_by_a_step(tmp_path: Path) -> None:
    hf = json.loads((TINY_MODEL / "config.json").read_text()) | {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    (tmp_path / "config.json").write_text(json.dumps(hf | {"mlp_only_layers": []}))
    assert args_of(f"model.path={tmp_path}").hf_overrides == {"mlp_only_layers": [0, 2]}
    assert args_of().hf_overrides == {}


def test_further_arguments_reach_vllm() -> None:
    args = args_of("rollout.engine_args={block_size: 64, attention_backend: TORCH_SDPA}")
    assert (args.block_size, args.enforce_eager) == (64, True)
    with pytest.raises(ConfigError, match=r"rollout.engine_args.quantisation: .* no such argument \(fix: use quantiza"):
        args_of("rollout.engine_args.quantisation=fp8")


@pytest.mark.parametrize(
    ("key", "tokens"),
    [
        ("cluster.device=cpu", 2049),
        ("cluster.device=cuda", 1024),
        ("rollout.engine_args.enable_chunked_prefill=false", 2049),
    ],
)
def test_a_step_holds_a_whole_prompt_only_where_prompts_are_not_split(key: str, tokens: int) -> None:
    keys = ("rollout.max_model_len=2048", "rollout.max_num_batched_tokens=1024", "rollout.kv_cache_gib=1")
    assert args_of("cluster.device=cuda", *keys, key).max_num_batched_tokens == tokens


def test_merged_experts_have_a_kernel_of_their_order_unless_another_is_chosen() -> None:
    merged = ("rollout.adapter_mode=merged", "cluster.device=cuda", "rollout.kv_cache_gib=1")
    assert args_of(*merged).moe_backend == "triton"
    assert args_of(*merged, "rollout.engine_args.moe_backend=flashinfer_cutlass").moe_backend == "flashinfer_cutlass"


def test_servers_return_routes_where_the_trainer_replays_them() -> None:
    """Through vLLM's own argument on devices."""
    assert args_of("behaviour.router_replay=rollout").additional_config == {cpu_scheduler.ROUTES: True}
    for off in ((), ("behaviour.router_replay=old",)):
        assert args_of(*off).additional_config == {cpu_scheduler.ROUTES: False}
    for device in ("cpu", "cuda"):
        on_device = args_of(f"cluster.device={device}", "behaviour.router_replay=rollout", "rollout.kv_cache_gib=1")
        assert on_device.enable_return_routed_experts == (device == "cuda")


@pytest.mark.parametrize("which", ["run", "stock"])
def test_vllm_keeps_the_spaces_of_a_byte_level_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """The tokenizer that vLLM loads when it starts, in place of the start."""
    folder = byte_level(tmp_path / "model", "llama", "LlamaTokenizerFast")
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [])
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})
    texts: list[str] = []

    def start(*_: Any, **__: Any) -> None:
        tokenizer = tokenizers.get_tokenizer(str(folder))
        texts.append(tokenizer.decode(tokenizer.encode("a b\n  c")))
        raise ConfigError("start", "it is not the subject")

    if which == "run":
        module = import_module("areal_lora.engine.vllm_ext.server.assemble")
        for name, fake in {"base_digest": str, "engine_args": str, "start_engine": start}.items():
            monkeypatch.setattr(module, name, fake)
        with pytest.raises(ConfigError, match="not the subject"):
            asyncio.run(module.assemble(config, RunFolder(tmp_path), 0, "", Any))
    else:
        fakes = {
            "die_with_parent": id,
            "read_config": lambda _: config,
            "set_environment": id,
            "lora_rank": lambda _: 8,
            "check_experts": id,
            "read_hf_config": lambda _: {},
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(stock, name, fake)
        monkeypatch.setattr(import_module("areal_lora.engine.vllm_ext.compat.engine"), "fork_engines", lambda: None)
        monkeypatch.setattr("runpy.run_module", start)
        monkeypatch.setattr("sys.argv", [])
        with pytest.raises(ConfigError, match="not the subject"):
            stock.main(["--run-folder", str(tmp_path), "--lora", "a=/a", "--port", "1"])
    assert texts == ["a b\n  c"]

"""Arguments of vLLM's own server for a run's adapter."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from areal_lora.checkpoint.adapter_io import peft_config
from areal_lora.engine.vllm_ext.stock import check_experts, lora_rank, stock_arguments
from areal_lora.errors import ConfigError
from areal_lora.rollout.completion_client import CompletionRequest
from areal_lora.types import AdapterSpec
from tests.support.lazy import Lazy
from tests.support.obs.fake_run import make_config
from tests.support.paths import TINY_MODEL

protocol = Lazy("vllm.entrypoints.openai.completion.protocol")
vllm_config = Lazy("vllm.config")
peft_helper = Lazy("vllm.lora.peft_helper")


def test_the_server_gets_the_sizes_of_the_run() -> None:
    config = make_config()
    words = stock_arguments(config, ["toy@v3=/a b/adapter", "toy@v2=/b"], 8123, 64)
    options = dict(pairwise(words))
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8123")
    assert options["--lora-modules"] == "toy@v3=/a b/adapter"
    assert options["toy@v3=/a b/adapter"] == "toy@v2=/b"
    assert options["--served-model-name"] == "base", "no path is a name"
    assert options["--max-lora-rank"] == "64"
    assert "--enforce-eager" in words
    assert options["--distributed-executor-backend"].endswith(".UniProcExecutor"), "no process for one worker"
    assert "--gpu-memory-utilization" not in words


def test_the_base_alone_is_a_version_and_needs_no_lora() -> None:
    words = stock_arguments(make_config(), [], 8123, lora_rank([]))
    assert not [word for word in words if "lora" in word]
    at = words.index("--served-model-name")
    assert words[at + 1 : at + 4] == ["base@v0", "base", "--disable-uvicorn-access-log"], "the first is in answers"


@pytest.mark.parametrize(("further", "sampled"), [({}, (0, 1.0)), ({"generation_config": "auto"}, (7, 1.5))])
def test_an_answer_is_sampled_as_its_request_states(
    tmp_path: Path, further: dict[str, str], sampled: tuple[int, float]
) -> None:
    """Not as generation_config.json has it, unless a setting of the run does; ends of sequences are read there."""
    shutil.copy(TINY_MODEL / "config.json", tmp_path)
    given = {"top_k": 7, "repetition_penalty": 1.5, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    config = make_config()
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine_args": further})})
    chosen = dict(pairwise(stock_arguments(config, ["toy@v3=/x"], 8000, 8)))["--generation-config"]
    model = vllm_config.ModelConfig(
        model=str(tmp_path), dtype="float32", skip_tokenizer_init=True, generation_config=chosen
    )
    request = protocol.CompletionRequest(
        **msgspec.to_builtins(CompletionRequest(prompt=[1], max_tokens=8, temperature=1.0, top_p=1.0, model="x"))
    )
    params = request.to_sampling_params(8, model.get_diff_sampling_param())
    assert (params.top_k, params.repetition_penalty) == sampled
    assert model.try_get_generation_config()["eos_token_id"] == [1, 2]


def test_on_a_gpu_it_leaves_memory_as_the_run_does() -> None:
    config = make_config()
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cuda"})})
    words = stock_arguments(config, ["toy@v3=/x"], 8000, 8)
    assert dict(pairwise(words))["--gpu-memory-utilization"] == "0.85"
    assert "--enforce-eager" not in words
    assert "--distributed-executor-backend" not in words, "it is vLLM's default"


def test_further_arguments_of_the_engine_are_options() -> None:
    config = make_config()
    further = {"enforce_eager": False, "quantization": "fp8", "swap_space": 2, "compilation_config": {"level": 3}}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine_args": further})})
    words = " ".join(stock_arguments(config, ["toy@v3=/x"], 8000, 8))
    assert "--no-enforce-eager" in words
    assert ' --quantization fp8 --swap-space 2 --compilation-config {"level": 3}' in words


def export(folder: Path, rank: int, **patterns: int) -> Path:
    """The configuration of an adapter of experts."""
    spec = AdapterSpec(
        name="a",
        base_model="b",
        rank=rank,
        alpha=16.0,
        target_modules=("expert.linear_fc1", "expert.linear_fc2"),
        rank_pattern=tuple(patterns.items()),
    )
    names = [
        f"model.layers.0.mlp.experts.0.{leaf}.lora_{side}.weight"
        for leaf in ("gate_proj", "up_proj", "down_proj")
        for side in "AB"
    ]
    folder.mkdir()
    config = peft_config(spec, ["down_proj", "gate_proj", "up_proj"], names, "b", None)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("rank", "patterns", "least"),
    [(8, {}, 8), (9, {}, 16), (8, {"(gate|up)_proj": 32}, 64), (64, {"(gate|up)_proj": 8}, 64), (256, {}, 256)],
)
def test_the_rank_is_the_least_that_vllm_accepts_for_the_export(
    tmp_path: Path, rank: int, patterns: dict[str, int], least: int
) -> None:
    folder = export(tmp_path / "a", rank, **patterns)
    assert lora_rank([export(tmp_path / "small", 1), folder]) == least
    helper = peft_helper.PEFTHelper.from_local_dir(str(folder), None)
    helper.validate_legal(SimpleNamespace(max_lora_rank=least))
    with pytest.raises(ValueError, match="max_lora_rank"):
        helper.validate_legal(SimpleNamespace(max_lora_rank=rank - 1 if least == rank else least // 2))


def test_a_rank_above_the_limit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has 640 .* limit is 512 \(fix: merge"):
        lora_rank([export(tmp_path / "a", 8, **{"(gate|up)_proj": 320})])


@pytest.mark.parametrize(
    ("projections", "alone"),
    [
        (["self_attn.q_proj"], ""),
        (["self_attn.q_proj", "mlp.gate_proj"], ""),
        (["mlp.experts.0.gate_proj", "mlp.experts.0.up_proj", "mlp.experts.0.down_proj"], ""),
        (["self_attn.q_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"], "linear_fc1"),
        (["block_sparse_moe.experts.3.w2"], "linear_fc2"),
    ],
)
def test_an_adapter_of_some_projections_of_experts_is_refused(
    tmp_path: Path, projections: list[str], alone: str
) -> None:
    names = [f"base_model.model.model.layers.0.{name}.lora_{side}.weight" for name in projections for side in "AB"]
    save_file({name: torch.zeros(1, 1) for name in names}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=f"has {alone} alone .*areal-lora merge") if alone else nullcontext():
        check_experts([tmp_path])

"""Arguments of vLLM's own server for a run's adapter."""

from __future__ import annotations

from itertools import pairwise

from areal_lora.engine.vllm_ext.stock import stock_arguments
from tests.support.obs.fake_run import make_config


def test_the_server_gets_the_sizes_of_the_run() -> None:
    config = make_config()
    words = stock_arguments(config, ["toy@v3=/a b/adapter", "toy@v2=/b"], 8123)
    options = dict(pairwise(words))
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8123")
    assert options["--lora-modules"] == "toy@v3=/a b/adapter"
    assert options["toy@v3=/a b/adapter"] == "toy@v2=/b"
    assert options["--served-model-name"] == "base", "no path is a name"
    assert options["--max-lora-rank"] == str(config.rollout.max_lora_rank)
    assert "--enforce-eager" in words
    assert options["--distributed-executor-backend"].endswith(".UniProcExecutor"), "no process for one worker"
    assert "--gpu-memory-utilization" not in words


def test_on_a_gpu_it_leaves_memory_as_the_run_does() -> None:
    config = make_config()
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device": "cuda"})})
    words = stock_arguments(config, ["toy@v3=/x"], 8000)
    assert dict(pairwise(words))["--gpu-memory-utilization"] == "0.85"
    assert "--enforce-eager" not in words
    assert "--distributed-executor-backend" not in words, "it is vLLM's default"


def test_further_arguments_of_the_engine_are_options() -> None:
    config = make_config()
    further = {"enforce_eager": False, "quantization": "fp8", "swap_space": 2, "compilation_config": {"level": 3}}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine_args": further})})
    words = " ".join(stock_arguments(config, ["toy@v3=/x"], 8000))
    assert "--no-enforce-eager" in words
    assert ' --quantization fp8 --swap-space 2 --compilation-config {"level": 3}' in words

"""vLLM's own OpenAI server with adapters: ``python -m areal_lora.engine.vllm_ext.stock --run-folder DIR ...``.

Nothing of a run's servers is in it: no admin plane, no publishes. It reads the model's settings from the run folder and
ends with its parent. The plugin of this package supplies LoRA on CPU experts.
"""

import argparse
import importlib.util
import json
import runpy
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.rules.adapter_rules import VLLM_LORA_RANKS
from areal_lora.data.prompts import keep_byte_level
from areal_lora.engine.vllm_ext.server.main import set_environment
from areal_lora.errors import ArealLoraError, ConfigError, EnvironmentError_
from areal_lora.families.family import Scope
from areal_lora.families.peft_folder import CONFIG_FILE, TENSOR_FILE
from areal_lora.families.registry import target_of
from areal_lora.families.safetensors_head import read_head
from areal_lora.families.shape import read_hf_config, with_dense_layers
from areal_lora.processes.startup import die_with_parent
from areal_lora.run_folder.paths import RunFolder

MODULE = "vllm.entrypoints.openai.api_server"
"""Not the program ``vllm``: it looks for the distribution `vllm`, and vLLM's CPU builds have another name."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.engine.vllm_ext.stock", description=__doc__)
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    parser.add_argument("--lora", required=True, metavar="NAME=FOLDER", nargs="*")
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args(argv)
    die_with_parent(signal.SIGTERM)
    try:
        config = read_config(args.run_folder)
        if importlib.util.find_spec("vllm") is None:
            fix = "install it there, or set rollout.python to the rollout role's interpreter"
            raise EnvironmentError_(f"vllm: {sys.executable} does not have it (fix: {fix})")
        set_environment(config)
        folders = [Path(word.partition("=")[2]) for word in args.lora]
        check_experts(folders)
        rank = lora_rank(folders)
        served = with_dense_layers(config.rollout.engine_args, read_hf_config(Path(config.model.folder)))
        rollout = config.rollout.model_copy(update={"engine_args": served})
        words = stock_arguments(config.model_copy(update={"rollout": rollout}), args.lora, args.port, rank)
        from areal_lora.engine.vllm_ext.compat.engine import fork_engines  # imports vLLM
        from areal_lora.engine.vllm_ext.server import tool_calls

        fork_engines()
        keep_byte_level(config.model.folder)
        if tool_calls.configured_parsers(config):  # of the run's agents: they answer beside vLLM
            tool_calls.prepare(config)
            words += ["--middleware", f"{tool_calls.__name__}.{tool_calls.ToolCallsMiddleware.__name__}"]
    except ArealLoraError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sys.argv = [MODULE, *words]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)
    return 0


def check_experts(folders: Iterable[Path]) -> None:
    """Raise ConfigError for an adapter of some projections of its experts: vLLM ends with a bare assertion."""
    for folder in folders:
        with (folder / TENSOR_FILE).open("rb") as file:
            modules = (name.partition(".lora_")[0] for name in read_head(file)[0])
            found = {target[0] for target in map(target_of, modules) if target and target[1] is Scope.EXPERT}
        if len(found) == 1:
            reason = f"vLLM's own server takes adapters of all projections of experts; this one has {found.pop()} alone"
            raise ConfigError("adapters.target_modules", reason, "merge the adapter into its base: areal-lora merge")


def lora_rank(folders: Iterable[Path]) -> int:
    """The least ``max_lora_rank`` for these adapters: vLLM counts all patterns, also of fused gate and up projections.

    Raises ConfigError above vLLM's limit.
    """
    files = [json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")) for folder in folders]
    rank = max((rank for file in files for rank in [file["r"], *file["rank_pattern"].values()]), default=1)
    if rank > (limit := VLLM_LORA_RANKS[-1]):
        reason = f"{CONFIG_FILE} has {rank} (gate and up of experts: twice theirs), and vLLM's limit is {limit}"
        raise ConfigError("adapters.rank", reason, "merge the adapter into its base: areal-lora merge")
    return next(each for each in VLLM_LORA_RANKS if each >= rank)


def stock_arguments(config: Config, lora: Sequence[str], port: int, rank: int) -> list[str]:
    """Arguments of vLLM's server for the run's model and sizes; pure."""
    rollout = config.rollout
    words = ["--host", "127.0.0.1", "--port", str(port), "--model", config.model.folder, "--dtype", config.model.dtype]
    words += ["--max-model-len", str(rollout.max_model_len), "--tensor-parallel-size", str(rollout.tp)]
    if lora:
        words += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", *lora]
    # As on a run's own servers; otherwise it is the folder, and vLLM's errors cut paths out of what they quote.
    # Answers have the first name: `areal-lora eval` reads a version from it.
    words += ["--served-model-name", *([] if lora else ["base@v0"]), "base", "--disable-uvicorn-access-log"]
    on_cpu = config.cluster.device == "cpu"
    if not on_cpu:
        words += ["--gpu-memory-utilization", str(rollout.gpu_memory_utilization)]
    # Requests state how they sample; vLLM would fill in what generation_config.json has, such as a repetition penalty.
    further: dict[str, Any] = {"generation_config": "vllm"} | ({"enforce_eager": True} if on_cpu else {})
    if on_cpu and rollout.tp == 1:  # by its path: vLLM replaces the short name, for the sake of OpenMP
        further["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    for name, value in (further | rollout.engine_args).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{option}" if value else f"--no-{option}"]
        else:
            words += [f"--{option}", value if isinstance(value, str) else json.dumps(value)]
    if rollout.kv_cache_gib is not None:
        # On CPUs vLLM otherwise reserves nearly all memory of the machine and fails if less is free.
        words += ["--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * 2**30))]
    return words


if __name__ == "__main__":
    sys.exit(main())

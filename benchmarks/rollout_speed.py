"""Decode speed with and without an adapter: ``python benchmarks/rollout_speed.py [--json FILE]``.

Three engines of the embedded example run side by side, idle unless it is their turn: one
started without LoRA, one with LoRA and asked for the base, one with LoRA and an adapter on
attention and all experts. Rounds are interleaved; ratios are of the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "math"
SEQUENCES, NEW_TOKENS, ROUNDS = 64, 64, 15
VARIANTS = ("engine without LoRA", "base request", "adapter request")


def child(variant: str, adapter: str) -> None:
    """Answer every line on stdin with the tokens per second of one round."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    from dataclasses import fields, replace

    from vllm import LLM, EngineArgs, SamplingParams
    from vllm.lora.request import LoRARequest

    from areal_lora.config.load import load_config
    from areal_lora.engine.vllm_ext.assemble import engine_args

    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [])
    args = replace(engine_args(config), enable_lora=variant != VARIANTS[0], worker_extension_cls="")
    engine = LLM.from_engine_args(EngineArgs(**{f.name: getattr(args, f.name) for f in fields(EngineArgs)}))
    request = LoRARequest("adapter", 1, adapter) if variant == VARIANTS[2] else None
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True, logprobs=0, seed=1)
    prompts = [{"prompt_token_ids": [5 + (7 * i + j) % 90 for j in range(40)]} for i in range(SEQUENCES)]

    def round_() -> float:
        started = time.perf_counter()
        engine.generate(prompts, sampling, lora_request=request, use_tqdm=False)
        return SEQUENCES * NEW_TOKENS / (time.perf_counter() - started)

    round_()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(round_(), flush=True)


def make_adapter(folder: Path) -> Path:
    """A random rank-8 adapter on everything; the values do not matter for speed."""
    import torch

    from areal_lora.checkpoint.adapter_io import save_peft
    from areal_lora.config.load import load_config
    from areal_lora.families.shape import ModelShape, read_hf_config
    from areal_lora.families.sites import pieces_of, sites_of, wire_names

    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [])
    hf = read_hf_config(Path(config.model.path))
    shape, spec = ModelShape.from_hf(hf), config.adapters[0].spec(config.model.path)
    tensors, aliases = {}, {}
    for key in sites_of(shape, spec.expert_layout):
        shapes, shared = wire_names(pieces_of(shape, key))
        tensors |= {n: torch.randn([spec.rank if d < 0 else d for d in s]) * 0.02 for n, s in shapes.items()}
        aliases |= shared
    save_peft(folder, spec, tensors, config.model.path, aliases)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    with tempfile.TemporaryDirectory() as scratch:
        adapter = make_adapter(Path(scratch) / "adapter")
        command = [sys.executable, __file__, "--child"]
        engines = [
            subprocess.Popen([*command, v, str(adapter)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for v in VARIANTS
        ]
        for engine in engines:
            while (line := engine.stdout.readline()).strip() != "ready":
                if not line:
                    sys.exit("an engine ended before it was ready; its error is above")
        print(f"load {os.getloadavg()[0]:.2f}; {SEQUENCES} sequences x {NEW_TOKENS} tokens, {ROUNDS} rounds, 1 thread")
        speeds: dict[str, list[float]] = {v: [] for v in VARIANTS}
        for _ in range(ROUNDS):
            for variant, engine in zip(VARIANTS, engines, strict=True):
                engine.stdin.write("go\n")
                engine.stdin.flush()
                speeds[variant].append(float(engine.stdout.readline()))
        for engine in engines:
            engine.stdin.close()
            engine.wait()
    for variant, values in speeds.items():
        low, mid = min(values), statistics.median(values)
        print(f"{variant:22} tokens/s min {low:8.0f}  p50 {mid:8.0f}  max {max(values):8.0f}")
    claims = {}
    for key, against in (("adapter_vs_no_lora_engine", VARIANTS[0]), ("adapter_vs_base_request", VARIANTS[1])):
        ratios = sorted(a / b for a, b in zip(speeds[VARIANTS[2]], speeds[against], strict=True))
        claims[key] = statistics.median(ratios)
        print(f"{key}: min {ratios[0]:.3f} p50 {claims[key]:.3f} max {ratios[-1]:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"claims": claims, "speeds": speeds}, indent=1))


if __name__ == "__main__":
    main()

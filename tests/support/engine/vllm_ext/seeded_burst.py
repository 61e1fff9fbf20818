"""More seeded prompts than one step has room for, through the server's engine arguments (a test's helper)."""

from __future__ import annotations

import os
import sys
from dataclasses import fields
from pathlib import Path

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def main(examples: Path) -> None:
    os.environ |= ENVIRONMENT
    from vllm import LLM, EngineArgs, SamplingParams

    from areal_lora.config.load import load_config
    from areal_lora.engine.vllm_ext.server.assemble import engine_args

    config = load_config(
        [examples / "gsm8k_grpo_megatron_lora_moe.yaml", examples / "embedded.yaml"],
        ["rollout.max_num_batched_tokens=256", "rollout.max_num_seqs=64"],
    )
    args = engine_args(config)
    values = {f.name: getattr(args, f.name) for f in fields(EngineArgs)} | {"worker_extension_cls": ""}
    engine = LLM.from_engine_args(EngineArgs(**values))
    prompts = [{"prompt_token_ids": [5 + (7 * i + j) % 90 for j in range(60)]} for i in range(32)]
    sampling = [SamplingParams(max_tokens=8, temperature=1.0, seed=i, ignore_eos=True) for i in range(32)]
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    print(sum(len(o.outputs[0].token_ids) for o in outputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

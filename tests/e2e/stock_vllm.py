"""Greedy answers of vLLM's own LLM class with an adapter folder: RUN_FOLDER ADAPTER (a test's helper)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_PLUGINS": "areal_lora", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def main(run_folder: Path, adapter: Path) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from areal_lora.config.models import Config
    from areal_lora.tasks.datasets import load_samples

    config = Config.model_validate_json((run_folder / "config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(config.model.folder)
    samples = load_samples(config.adapters[0].task, "eval")[:32]
    prompts = [tokenizer.encode(s.prompt, add_special_tokens=False) for s in samples]
    engine = LLM(
        config.model.folder, dtype="float32", max_model_len=256, enforce_eager=True, enable_lora=True, max_lora_rank=8,
        max_loras=2,
    )
    outputs = engine.generate(
        [{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=32, temperature=0.0),
        lora_request=LoRARequest("exported", 1, str(adapter)), use_tqdm=False,
    )
    answers = [{"prompt": p, "completion": list(o.outputs[0].token_ids)} for p, o in zip(prompts, outputs, strict=True)]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

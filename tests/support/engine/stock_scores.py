"""vLLM's own LLM class: log-probabilities of tokens with and without an adapter.

Its arguments are TOKENS (JSON) and a number of folders BASE ADAPTER; one line for each pair, once it is scored.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_PLUGINS": "areal_lora", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def scores(base: str, adapter: str, tokens: list[int]) -> list[list[float]]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from areal_lora.engine.vllm_ext.compat.engine import import_classes

    import_classes(base)
    engine = LLM(
        base,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    rows = []
    for request in (LoRARequest("converted", 1, adapter), None):
        prompt = {"prompt_token_ids": tokens}
        (output,) = engine.generate([prompt], params, lora_request=request, use_tqdm=False)
        rows.append([output.prompt_logprobs[i][token].logprob for i, token in enumerate(tokens) if i])
    return rows


if __name__ == "__main__":
    for folders in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        print(json.dumps(scores(*folders, json.loads(sys.argv[1]))))

"""Sizes of published models, copied from their config.json: a plan needs no hub."""

from __future__ import annotations

import re
from typing import Any

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")

_DENSE_KEYS = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "tie_word_embeddings",
)
_MOE_KEYS = (*_DENSE_KEYS[:5], "moe_intermediate_size")


def _dense(common: dict[str, Any], *values: int | bool) -> dict[str, Any]:
    return {**common, **dict(zip(_DENSE_KEYS, values, strict=True))}


def _moe(common: dict[str, Any], *values: int) -> dict[str, Any]:
    return {**common, **dict(zip(_MOE_KEYS, values, strict=True)), "tie_word_embeddings": False}


_QWEN3 = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
_QWEN3_MOE = {**_QWEN3, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
_QWEN25 = {"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768}
_QWEN25_WIDE = {**_QWEN25, "vocab_size": 152064}
_QWEN15_MOE = {
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
}
_LLAMA2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
_MIXTRAL = {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}

# fmt: off
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": _dense(_QWEN3, 28, 1024, 16, 8, 3072, True),
    "Qwen/Qwen3-1.7B": _dense(_QWEN3, 28, 2048, 16, 8, 6144, True),
    "Qwen/Qwen3-4B": _dense(_QWEN3, 36, 2560, 32, 8, 9728, True),
    "Qwen/Qwen3-8B": _dense(_QWEN3, 36, 4096, 32, 8, 12288, False),
    "Qwen/Qwen3-14B": _dense(_QWEN3, 40, 5120, 40, 8, 17408, False),
    "Qwen/Qwen3-32B": _dense(_QWEN3, 64, 5120, 64, 8, 25600, False),
    "Qwen/Qwen3-30B-A3B": _moe(_QWEN3_MOE, 48, 2048, 32, 4, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _moe(_QWEN3_MOE, 94, 4096, 64, 4, 12288, 1536),
    "Qwen/Qwen2.5-0.5B-Instruct": _dense(_QWEN25, 24, 896, 14, 2, 4864, True),
    "Qwen/Qwen2.5-1.5B-Instruct": _dense(_QWEN25, 28, 1536, 12, 2, 8960, True),
    "Qwen/Qwen2.5-3B-Instruct": _dense(_QWEN25, 36, 2048, 16, 2, 11008, True),
    "Qwen/Qwen2.5-7B-Instruct": _dense(_QWEN25_WIDE, 28, 3584, 28, 4, 18944, False),
    "Qwen/Qwen2.5-14B-Instruct": _dense(_QWEN25_WIDE, 48, 5120, 40, 8, 13824, False),
    "Qwen/Qwen2.5-32B-Instruct": _dense(_QWEN25_WIDE, 64, 5120, 40, 8, 27648, False),
    "Qwen/Qwen2.5-72B-Instruct": _dense(_QWEN25_WIDE, 80, 8192, 64, 8, 29568, False),
    "Qwen/Qwen1.5-MoE-A2.7B": _moe(_QWEN15_MOE, 24, 2048, 16, 16, 5632, 1408),
    "meta-llama/Llama-2-7b-hf": _dense(_LLAMA2, 32, 4096, 32, 32, 11008, False),
    "meta-llama/Llama-3.1-8B": _dense(_LLAMA3, 32, 4096, 32, 8, 14336, False),
    "meta-llama/Llama-3.1-70B": _dense(_LLAMA3, 80, 8192, 64, 8, 28672, False),
    "meta-llama/Llama-3.2-1B": _dense({**_LLAMA3, "head_dim": 64}, 16, 2048, 32, 8, 8192, True),
    "meta-llama/Llama-3.2-3B": _dense({**_LLAMA3, "head_dim": 128}, 28, 3072, 24, 8, 8192, True),
    "mistralai/Mixtral-8x7B-v0.1":
        _dense({**_MIXTRAL, "max_position_embeddings": 32768}, 32, 4096, 32, 8, 14336, False),
    "mistralai/Mixtral-8x22B-v0.1":
        _dense({**_MIXTRAL, "max_position_embeddings": 65536}, 56, 6144, 48, 8, 16384, False),
}
# fmt: on


def is_hub_name(path: str) -> bool:
    """True for ``owner/name``."""
    return bool(_HUB_NAME.match(path))


def known_config(hub_name: str) -> dict[str, Any] | None:
    """The built-in description of a published model; ``-Base`` variants share their sibling's sizes."""
    return PUBLISHED.get(hub_name) or PUBLISHED.get(hub_name.removesuffix("-Base"))


def known_models() -> tuple[str, ...]:
    """Hub names of the models described here."""
    return tuple(PUBLISHED)

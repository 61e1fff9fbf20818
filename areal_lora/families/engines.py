"""Which engine trains a config.json, and whether vLLM serves its LoRA: data, for the rules.

Families with a row are trained by both engines, but for variants that Megatron does not compute. A family without a
row is trained by the FSDP engine if transformers computes it over packed sequences; it is served unmerged if vLLM's
class of that architecture takes LoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from areal_lora.families.registry import supported
from areal_lora.families.variants import unsupported

Engine = Literal["megatron", "fsdp"]
ENGINES: tuple[Engine, ...] = ("megatron", "fsdp")

PACKED = frozenset(
    [
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "cwm",
        "diffllama",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "flex_olmo",
        "gemma",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "granite",
        "helium",
        "hunyuan_v1_dense",
        "jais2",
        "ministral",
        "mistral",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "seed_oss",
        "smollm3",
        "starcoder2",
    ]
)
"""Model types without a row whose tiny models score alike packed by the FSDP engine and alone by transformers 5.19."""

UNSERVED = frozenset(["bitnet", "diffllama", "helium", "ministral", "persimmon"])
"""Those of `PACKED` for which vLLM 0.32 has no class, or one without LoRA."""

_LAYERS = {"full_attention", "sliding_attention"}


def problems(engine: Engine, config: Mapping[str, Any]) -> list[str]:
    """Why the engine cannot train a model with this config.json; empty if it can."""
    kind = config.get("model_type")
    if engine == "megatron":
        if kind in supported():
            return unsupported(config)
        return [f"model type {kind!r} has no row in families/table.py, which the Megatron engine needs"]
    odd = sorted(set(config.get("layer_types") or ()) - _LAYERS)
    found = {
        f"transformers is not known to compute model type {kind!r} over packed sequences": kind
        not in (*supported(), *PACKED),
        f"layers of type {', '.join(odd)}, whose states cross packed sequences": bool(odd),
        "attention scores with a soft cap": config.get("attn_logit_softcapping") is not None,
    }
    return [what for what, bad in found.items() if bad]


def engines(config: Mapping[str, Any]) -> tuple[Engine, ...]:
    """The engines that train a model with this config.json."""
    return tuple(engine for engine in ENGINES if not problems(engine, config))


def served(config: Mapping[str, Any]) -> bool:
    """Whether vLLM serves adapters of this model unmerged."""
    kind = config.get("model_type")
    return kind in supported() or (kind in PACKED and kind not in UNSERVED)

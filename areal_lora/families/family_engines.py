"""What is known of families without a row, and the variants of a family that an engine does not compute: data.

`config.support` judges families by these lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from areal_lora.families.registry import supported, unsupported

Engine = Literal["megatron", "fsdp"]
ENGINES: tuple[Engine, ...] = ("megatron", "fsdp")

# fmt: off
PACKED = frozenset([
    "arcee", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo",
    "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "granite", "helium", "hunyuan_v1_dense", "jais2",
    "ministral", "mistral", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "seed_oss",
    "smollm3", "starcoder2",
])
# fmt: on
"""Model types without a row whose tiny models score alike packed by the FSDP engine and alone by transformers 5.19."""

UNSERVED = frozenset(
    [
        "bitnet",
        "diffllama",
        "ernie4_5_moe",  # the server scores differently
        "flex_olmo",  # the server ends while it starts on a CPU, glm4_moe too
        "glm4",  # mlp.gate_up_proj is not wrapped
        "glm4_moe",
        "helium",
        "ministral",
        "persimmon",
    ]
)
"""Those of `PACKED` for which vLLM 0.32 has no class, or one without LoRA, or whose server differs or ends."""

_LAYERS = {"full_attention", "sliding_attention"}


def variants(engine: Engine, config: Mapping[str, Any]) -> list[str]:
    """What a config.json requires beyond its family and the engine does not compute; empty if nothing."""
    if engine == "megatron":
        return unsupported(config) if config.get("model_type") in supported() else []
    odd = sorted(set(config.get("layer_types") or ()) - _LAYERS)
    found = {
        f"layers of type {', '.join(odd)}, whose states cross packed sequences": bool(odd),
        "attention scores with a soft cap": config.get("attn_logit_softcapping") is not None,
    }
    return [what for what, bad in found.items() if bad]

"""Megatron adapter tensors to Hugging Face names and back, one file per model family.

To add a family: write its file with a ``FAMILY`` and name it here. See docs/en/model_families.md.
"""

from areal_lora.engine.megatron_utils.convert import llama, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from areal_lora.engine.megatron_utils.convert.registry import Family
from areal_lora.errors import ConfigError

FAMILIES = {
    kind: module.FAMILY
    for module in (qwen3_moe, qwen3, qwen2, llama, mixtral, qwen2_moe)
    for kind in module.FAMILY.model_types
}


def family_for(model_type: str) -> Family:
    """The family of a Hugging Face ``model_type``. Raises ConfigError for one nobody has written yet."""
    if model_type not in FAMILIES:
        raise ConfigError(
            "model.path", f"no adapter converter for model type {model_type!r}", f"known: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]

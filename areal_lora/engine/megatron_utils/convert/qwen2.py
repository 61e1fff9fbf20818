"""Qwen2 and Qwen2.5 dense. The bias of q, k and v belongs to the frozen base; LoRA adds no bias."""

from areal_lora.engine.megatron_utils.convert.blocks import layer_pieces, layer_sites
from areal_lora.engine.megatron_utils.convert.registry import Family

FAMILY = Family(model_types=("qwen2",), sites=layer_sites, pieces=layer_pieces)

"""Qwen3-MoE: Qwen3's attention and gated experts; layers of ``mlp_only_layers`` keep the dense MLP."""

from areal_lora.engine.megatron_utils.convert.blocks import layer_pieces, layer_sites
from areal_lora.engine.megatron_utils.convert.registry import Family

FAMILY = Family(model_types=("qwen3_moe",), sites=layer_sites, pieces=layer_pieces)

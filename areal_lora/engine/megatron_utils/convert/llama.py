"""Llama 2 and 3: multi-head or grouped-query attention, gated MLP."""

from areal_lora.engine.megatron_utils.convert.blocks import layer_pieces, layer_sites
from areal_lora.engine.megatron_utils.convert.registry import Family

FAMILY = Family(model_types=("llama",), sites=layer_sites, pieces=layer_pieces)

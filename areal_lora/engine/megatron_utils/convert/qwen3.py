"""Qwen3 dense: attention with grouped queries, gated MLP. Query and key norms stay frozen."""

from areal_lora.engine.megatron_utils.convert.blocks import layer_pieces, layer_sites
from areal_lora.engine.megatron_utils.convert.registry import Family

FAMILY = Family(model_types=("qwen3",), sites=layer_sites, pieces=layer_pieces)

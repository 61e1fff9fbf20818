"""Qwen2-MoE and Qwen1.5-MoE: routed experts, and one shared expert that every token passes.

Layers that ``decoder_sparse_step`` or ``mlp_only_layers`` take out keep the dense MLP. The
router (``mlp.gate``) and the gate of the shared expert (``mlp.shared_expert_gate``) stay frozen.
"""

from areal_lora.engine.megatron_utils.convert.blocks import layer_pieces, layer_sites
from areal_lora.engine.megatron_utils.convert.registry import Family

FAMILY = Family(model_types=("qwen2_moe",), sites=layer_sites, pieces=layer_pieces)

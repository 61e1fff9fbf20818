"""The architecture of a family's model in Megatron's terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import functional

from areal_lora.families.shape import ModelShape


def architecture(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and choices for Bridge's GPTModelProvider. `variants.unsupported` has refused what they do not cover."""
    shape = ModelShape.from_hf(hf)
    attention, experts = shape.family.attention, shape.family.experts
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn,
        "vocab_size": shape.vocab,
        "seq_length": shape.max_positions,
        "layernorm_epsilon": hf["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": attention.bias,
        "qk_layernorm": attention.norms,
        "share_embeddings_and_output_weights": shape.tied,
        # `attention.PackedAttention` rotates queries and keys: positions restart in every sequence.
        "position_embedding_type": "none",
        "rotary_base": rope.get("rope_theta") or hf.get("rope_theta") or 10000.0,
        "rope_scaling": rope.get("rope_type") == "llama3",
        "rope_scaling_factor": rope.get("factor") or 1.0,
    }
    if experts is not None:
        sparse = set(shape.sparse_layers)
        fields |= {
            "num_moe_experts": shape.experts,
            "moe_ffn_hidden_size": shape.expert_ffn,
            "moe_router_topk": shape.experts_per_token,
            "moe_layer_freq": [int(i in sparse) for i in range(shape.layers)],
            # True: softmax over all experts, and the weights of the chosen ones do not sum to 1.
            "moe_router_pre_softmax": not (experts.normalized or hf.get("norm_topk_prob", False)),
            "moe_shared_expert_intermediate_size": shape.shared_ffn or None,
            "moe_shared_expert_gate": shape.shared_ffn > 0,
        }
    return fields

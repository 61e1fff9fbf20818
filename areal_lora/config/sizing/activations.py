"""What a micro-batch leaves in memory until its backward pass, in elements, and the buffers of its passes. Pure."""

from areal_lora.config.models import Config
from areal_lora.families.shape import ModelShape

KEY_COPIES = 2.0
"""Keys and values per packed token: the shared prompt of a group is gathered for each of its answers. With `trainer.cp`
a rank gathers those of all ranks' tokens."""
CHUNK = 2**26
"""Logits of which the output layer makes fp32 buffers at a time: `engine.layers.output`."""


def chunk_bytes(logits: int, item: int) -> int:
    """Two buffers in fp32, and the gradient in a smaller type: `engine.layers.output`."""
    return logits * (2 * 4 + (item if item < 4 else 0))


def layer_elements(config: Config, shape: ModelShape, layer: int) -> float:
    """Elements that one layer keeps for the backward pass, per token of a micro-batch.

    Both norms keep input and output (4 h). Attention keeps queries before and after the norm and rotation, gathered by
    sequence, and its output as computed and as unpacked (5 q); keys before and after (2 or 3 k) and gathered; values
    and gathered. An MLP of width f keeps its input and 3 f: both projections and their product. Experts see each token
    ``experts_per_token`` times, on average; with tp, a rank routes its part of the sequence. For a family without a
    row: both norms, and inputs and outputs of every linear layer.
    """
    t, h = config.trainer, shape.hidden
    if shape.checkpoint is not None:
        own = sum(one.inputs + one.outputs for one in shape.checkpoint.linears if layer in one.layers)
        routed = shape.experts_per_token * (h + 3 * shape.expert_ffn) if layer in shape.sparse_layers else 0
        return 4 * h + own + routed
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 1 if shape.family.attention.norms else 0
    attention = 4 * h + (4 + norms) * q + (2 + norms + 2 * KEY_COPIES * t.cp) * k
    if layer not in shape.sparse_layers:
        return (attention + 3 * shape.ffn) / t.tp
    rows = shape.experts_per_token
    return (attention + rows * (h + 3 * shape.expert_ffn) + 3 * shape.shared_ffn) / t.tp


def kept_elements(config: Config, shape: ModelShape) -> float:
    """Elements that a recomputed layer keeps, per token: its input; what attention returns if ``selective``, where a
    log-sum-exp in fp32 counts as two."""
    attention = shape.heads * (shape.head_dim + 2) if config.trainer.recompute == "selective" else 0
    return (shape.hidden + attention) / config.trainer.tp


def dispatched_elements(config: Config, shape: ModelShape) -> int:
    t = config.trainer
    rows = t.max_tokens_per_microbatch // t.tp * shape.experts_per_token
    return 2 * rows * shape.hidden if shape.experts and t.ep * t.etp > 1 else 0

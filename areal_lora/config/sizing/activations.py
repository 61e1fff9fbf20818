"""What a micro-batch leaves in memory until its backward pass, in elements, and the buffers of its passes. Pure."""

from areal_lora.config.models import Config, TrainerConfig
from areal_lora.families.family import Scope
from areal_lora.families.shape import DTYPE_BYTES, ModelShape
from areal_lora.families.sites import linear_sites, pieces_of

KEY_COPIES = 2.0
"""Keys and values per packed token that CPUs gather: the shared prompt of a group for each of its answers."""
CHUNK = 2**26
"""Logits of which the output layer makes fp32 buffers at a time: `engine.layers.output`."""
MASK_BYTES = 24
"""Three numbers of 64 bits: `engine.layers.active.Dropout`."""


def chunk_bytes(logits: int, item: int) -> int:
    """Two buffers in fp32, and the gradient in a smaller type: `engine.layers.output`."""
    return logits * (2 * 4 + (item if item < 4 else 0))


def layer_elements(config: Config, shape: ModelShape, layer: int) -> float:
    """Elements that one layer keeps for the backward pass, per token of a micro-batch.

    Both norms keep their input (2 h), adapters that of attention and of a dense MLP. Attention keeps projections where
    a norm follows, rotated queries and keys, values, and what it returns (2 q + 2 k, with norms 3 each); with cp, keys
    and values of all ranks. Megatron's fused projection stays, and a copy of its queries for their norm. CPUs, without
    flash attention, keep padded and gathered rows, too. An MLP of width f keeps both projections and their product.
    Experts see each token ``experts_per_token`` times, on average; with tp, a rank routes its part of the sequence.
    Dropout keeps a byte of each input of lora_A. For a family without a row: both norms, and inputs and outputs of
    every linear layer.
    """
    t, h, sparse = config.trainer, shape.hidden, layer in shape.sparse_layers
    masks = sum(_dropped(config, shape, layer)) / DTYPE_BYTES[config.model.dtype]
    routed = shape.experts_per_token * (h + 3 * shape.expert_ffn) if sparse else 0
    if shape.checkpoint is not None:
        return 4 * h + masks + routed + sum(x.inputs + x.outputs for x in shape.checkpoint.linears if layer in x.layers)
    megatron, norms = t.engine == "megatron", 1 if shape.family.attention.norms else 0
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if config.cluster.device == "cpu":
        attention = (4 + norms) * q + (2 + norms + 2 * KEY_COPIES * t.cp) * k
    elif megatron:
        attention = (3 + norms) * q + (1 + 2 * t.cp) * k
    else:
        attention = (2 + norms) * q + (norms + 2 * t.cp) * k
    adapted = h * (1 if sparse and not megatron else 2)  # Megatron's router keeps its input
    mlp = shape.shared_ffn if sparse else shape.ffn
    return (2 * h + adapted + attention + routed + masks + 3 * mlp) / t.tp


def _dropped(config: Config, shape: ModelShape, layer: int) -> list[int]:
    """Inputs, per token, of each linear layer at which adapters drop some."""
    targets = [adapter.spec("").target_modules for adapter in config.adapters if adapter.dropout]
    sites = [key for key in linear_sites(shape) if key.layer == layer and any(map(key.covered, targets))]
    times = [shape.experts_per_token if key.scope is Scope.EXPERT else 1 for key in sites]
    return [n * pieces_of(shape, key)[0].in_features for n, key in zip(times, sites, strict=True)]


def pass_elements(config: Config, shape: ModelShape, layer: int) -> float:
    """Buffers of one layer's backward pass, per token, beside what it keeps.

    Gradients of an MLP's projections and product (3 f), and of the layer's output. For each row of an expert also
    those of its input and output, and a product that is added (3 h); where experts are divided, rows that travel. With
    cp each part of a sequence takes the keys and values before it, and their gradients: of one that fills the row as
    many rows as a rank has pairs of parts (4, `engine.layers.context`), and half a part. Or, forward, `MASK_BYTES` of
    each of a linear layer's inputs that dropout masks.
    """
    rows = shape.experts_per_token * 3 * (shape.hidden + shape.expert_ffn)
    mlp, t = rows if layer in shape.sparse_layers else 3 * shape.ffn, config.trainer
    keys = 0.0 if t.cp == 1 else 4 * (4 * t.cp + 0.5) * shape.kv_heads * shape.head_dim
    mask = MASK_BYTES * max(_dropped(config, shape, layer), default=0) / DTYPE_BYTES[config.model.dtype]
    return (max(mlp, keys, mask) + shape.hidden) / t.tp


def kept_elements(config: Config, shape: ModelShape) -> float:
    """Of a recomputed layer, per token: its input; if ``selective`` what attention returns, a log-sum-exp as two."""
    attention = shape.heads * (shape.head_dim + 2) if config.trainer.recompute == "selective" else 0
    return (shape.hidden + attention) / config.trainer.tp


def in_flight(t: TrainerConfig, stage: int) -> float:
    """Micro-batches whose activations a pipeline stage holds: pp - stage with 1F1B; with virtual stages those of
    Megatron's warm-up and one more, each of a chunk of the layers (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    later = t.pp - 1 - stage
    return later + 1 if t.chunks == 1 else (2 * later + (t.chunks - 1) * t.pp + 1) / t.chunks

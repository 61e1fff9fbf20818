"""Wire names and shapes of small adapters, and a ``Pack`` of given tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.trainer.publish_job import Pack


def moe_shapes(
    rank: int, *, layers: int = 2, experts: int = 4, hidden: int = 16, ffn: int = 8
) -> dict[str, tuple[int, ...]]:
    """Wire names and shapes of a small MoE adapter on attention and every expert."""
    sizes = {f"self_attn.{p}_proj": (hidden, hidden) for p in "qkvo"}
    for e in range(experts):
        sizes |= {f"mlp.experts.{e}.{p}_proj": (ffn, hidden) for p in ("gate", "up")}
        sizes[f"mlp.experts.{e}.down_proj"] = (hidden, ffn)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for module, (out, inner) in sizes.items():
            shapes[f"model.layers.{layer}.{module}.lora_A.weight"] = (rank, inner)
            shapes[f"model.layers.{layer}.{module}.lora_B.weight"] = (out, rank)
    return shapes


def pack_of(layout: AdapterLayout, source: int, tensors: Mapping[str, torch.Tensor]) -> Pack:
    """Make the ``Pack`` that copies ``tensors`` into ``source``'s shard, one at a time, without an engine."""
    mine = [t for shard in layout.shards if shard.source == source for t in shard.tensors]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[layout.dtype]

    def pack(flat: torch.Tensor) -> Iterator[int]:
        for i, place in enumerate(mine):
            raw = tensors[place.name].detach().to(dtype).contiguous().view(torch.uint8).reshape(-1)
            flat[place.offset : place.offset + raw.numel()] = raw
            yield i + 1

    return pack

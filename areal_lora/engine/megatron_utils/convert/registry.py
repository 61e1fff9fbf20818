"""What a family declares about its adaptable layers, and both directions of the conversion.

An adapted Megatron layer (a *site*) has one whole lora_A [r, in] and one whole lora_B [out, r].
A family says which Hugging Face projections they become: all share lora_A, and each takes
some rows of lora_B. Rows are given as index ranges, so both directions are the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from areal_lora.errors import AdapterError, UnknownTensorError


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteKey:
    """Which adapted layer: Megatron's name of the linear, global layer number, global expert number."""

    linear: str
    layer: int
    expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Sizes of the model that conversion needs."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    moe_ffn: int
    experts: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Dims:
        """From a Hugging Face ``config.json``; transformers 5 writes ``num_local_experts`` for ``num_experts``."""
        return cls(
            hidden=hf["hidden_size"], heads=hf["num_attention_heads"], kv_heads=hf["num_key_value_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            ffn=hf["intermediate_size"], moe_ffn=hf.get("moe_intermediate_size", 0),
            experts=hf.get("num_experts") or hf.get("num_local_experts") or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One Hugging Face projection of a site: rows [start, stop) of lora_B, in this order."""

    name: str  # `model.layers.0.self_attn.q_proj`
    in_features: int
    rows: tuple[tuple[int, int], ...]

    @property
    def out_features(self) -> int:
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``sites(dims, layers)`` lists the adaptable layers, ``pieces(dims, key)`` what one becomes."""

    model_types: tuple[str, ...]
    sites: Callable[[Dims, Sequence[int]], list[SiteKey]]
    pieces: Callable[[Dims, SiteKey], list[Piece]]


def wire_names(pieces: Sequence[Piece]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """``({unique tensor name: shape without rank}, {alias: unique name})`` of one site (contract C5).

    Shapes have -1 where the rank goes. lora_A travels once, under the first projection's name.
    """
    first = pieces[0]
    shapes: dict[str, tuple[int, ...]] = {f"{first.name}.lora_A.weight": (-1, first.in_features)}
    shapes |= {f"{p.name}.lora_B.weight": (p.out_features, -1) for p in pieces}
    return shapes, {f"{p.name}.lora_A.weight": f"{first.name}.lora_A.weight" for p in pieces[1:]}


def to_hf(pieces: Sequence[Piece], lora_a: Tensor, lora_b: Tensor) -> dict[str, Tensor]:
    """Unique wire tensors of one site from its whole Megatron tensors, as contiguous clones."""
    tensors = {f"{pieces[0].name}.lora_A.weight": lora_a.clone()}
    for piece in pieces:
        tensors[f"{piece.name}.lora_B.weight"] = torch.cat([lora_b[a:b] for a, b in piece.rows])
    return tensors


def to_megatron(pieces: Sequence[Piece], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Inverse of `to_hf`; ``tensors`` may hold more names. Raises UnknownTensorError for a missing one."""
    missing = [n for n in wire_names(pieces)[0] if n not in tensors]
    if missing:
        raise UnknownTensorError(f"adapter tensor {missing[0]} is missing ({len(missing)} of its layer)")
    lora_a = tensors[f"{pieces[0].name}.lora_A.weight"]
    rank = lora_a.shape[0]
    lora_b = lora_a.new_empty(sum(p.out_features for p in pieces), rank)
    for piece in pieces:
        source = tensors[f"{piece.name}.lora_B.weight"]
        if tuple(source.shape) != (piece.out_features, rank):
            raise AdapterError(
                f"adapter tensor {piece.name}.lora_B.weight has shape {tuple(source.shape)}, "
                f"expected {(piece.out_features, rank)}"
            )
        at = 0
        for start, stop in piece.rows:
            lora_b[start:stop] = source[at : at + stop - start]
            at += stop - start
    return lora_a, lora_b

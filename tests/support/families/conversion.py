"""The conversion of one site written down plainly, on whole tensors: the oracle of the engine's pack and load plans."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from areal_lora.errors import AdapterError, UnknownTensorError
from areal_lora.families.sites import Piece, wire_names


def to_hf(pieces: Sequence[Piece], lora_a: Tensor, lora_b: Tensor) -> dict[str, Tensor]:
    """Unique wire tensors of one site from its whole Megatron tensors, as contiguous clones.

    The engine packs straight from shards by plans; this is the expected result.
    """
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

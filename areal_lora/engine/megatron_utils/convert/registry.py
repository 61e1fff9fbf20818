"""What a family declares about its adaptable layers: the data that both directions of the conversion follow.

An adapted Megatron layer (a *site*) has one whole lora_A [r, in] and one whole lora_B [out, r].
A family says which Hugging Face projections they become: all share lora_A, and each takes
some rows of lora_B. Rows are given as index ranges, so both directions are the same data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_lora.families.shape import ModelShape, Scope, covers
from areal_lora.types import ExpertLayout

__all__ = ["Dims", "Family", "Piece", "Scope", "SiteKey", "spec_covers", "wire_names"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteKey:
    """Which adapted layer: Megatron's name of the linear, global layer number, where in the layer it sits.

    ``expert`` is the global number of a routed expert, None in every scope but ``EXPERT``.
    """

    linear: str
    layer: int
    scope: Scope
    expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dims:
    """Sizes of the model that conversion needs. ``dense_layers`` are those of a mixture that have no experts."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    moe_ffn: int
    experts: int
    shared_ffn: int = 0
    dense_layers: frozenset[int] = frozenset()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Dims:
        """From a Hugging Face ``config.json``. Raises KeyError naming a size that is missing."""
        shape = ModelShape.from_hf(hf)
        return cls(
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.ffn,
            moe_ffn=shape.expert_ffn,
            experts=shape.experts,
            shared_ffn=shape.shared_ffn,
            dense_layers=frozenset(range(shape.layers)) - frozenset(shape.sparse_layers),
        )

    def is_sparse(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One Hugging Face projection of a site: rows [start, stop) of lora_B, in this order.

    ``aliases`` are further modules with the same lora_A and lora_B (``ALL_EXPERTS``: the other experts).
    """

    name: str  # `model.layers.0.self_attn.q_proj`
    in_features: int
    rows: tuple[tuple[int, int], ...]
    aliases: tuple[str, ...] = ()

    @property
    def out_features(self) -> int:
        return sum(stop - start for start, stop in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``sites(dims, layers, expert_layout)`` lists the adaptable layers, ``pieces(dims, key)`` what one becomes.

    Order of sites: by layer; in a layer linear_qkv, linear_proj, dense fc1, fc2, shared expert
    fc1, fc2, then fc1 of every expert, fc2 of every expert (or fc1, fc2 of all experts at once).
    ``pieces`` raises UnknownTensorError for a key that the model does not have.
    """

    model_types: tuple[str, ...]
    sites: Callable[[Dims, Sequence[int], ExpertLayout], list[SiteKey]]
    pieces: Callable[[Dims, SiteKey], list[Piece]]


def spec_covers(target_modules: Sequence[str], key: SiteKey) -> bool:
    """Whether an adapter with these (canonical) targets sits on ``key``; ``ALL_EXPERTS`` counts as ``expert``.

    The serving side asks the same of a Hugging Face module name, without torch or Megatron::

        found = architectures.target_of("model.layers.0.mlp.experts.7.gate_proj")  # ("linear_fc1", Scope.EXPERT)
        found is not None and architectures.covers(spec.target_modules, *found)
    """
    return covers(target_modules, key.linear, key.scope)


def wire_names(pieces: Sequence[Piece]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """``({unique tensor name: shape without rank}, {alias: unique name})`` of one site (contract C5).

    Shapes have -1 where the rank goes. lora_A travels once, under the first projection's name;
    modules with the same numbers (``Piece.aliases``) do not travel at all.
    """
    lora_a = f"{pieces[0].name}.lora_A.weight"
    shapes: dict[str, tuple[int, ...]] = {lora_a: (-1, pieces[0].in_features)}
    aliases: dict[str, str] = {}
    for piece in pieces:
        lora_b = f"{piece.name}.lora_B.weight"
        shapes[lora_b] = (piece.out_features, -1)
        aliases |= {f"{name}.lora_A.weight": lora_a for name in (piece.name, *piece.aliases)}
        aliases |= {f"{name}.lora_B.weight": lora_b for name in piece.aliases}
    del aliases[lora_a]
    return shapes, aliases

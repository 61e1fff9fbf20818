"""Floating point operations of a model's passes, from its shapes alone; a multiply-add counts as two."""

from dataclasses import dataclass

from areal_lora.families.family import Scope
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import linear_sites, pieces_of
from areal_lora.types import AdapterStructure


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """Multiply-adds of a forward pass: ``layers``, ``output`` and ``adapter`` of a token, ``attention`` of a pair of
    a query and a key (scores and weighted values, all layers).

    A token meets the router and the chosen experts only. Norms, rotations and activations do not count, as usual
    (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). Sliding windows count as full causal attention.
    """

    layers: int
    output: int
    adapter: int
    attention: int

    @classmethod
    def of(cls, shape: ModelShape, adapter: AdapterStructure | None) -> "PassSizes":
        """Of a pass with ``adapter``, or of the base alone; a value head takes the place of the output layer."""
        layers, adapted = shape.moe_layers * shape.hidden * shape.experts, 0
        for key in linear_sites(shape):
            pieces = pieces_of(shape, key)
            times = shape.experts_per_token if key.scope is Scope.EXPERT else 1
            inputs, outputs = pieces[0].in_features, sum(piece.out_features for piece in pieces)
            layers += times * inputs * outputs
            if adapter is not None and key.covered(adapter.target_modules):
                adapted += times * adapter.rank_of(pieces[0].name) * (inputs + outputs)
        values = adapter is not None and adapter.value_head
        return cls(
            layers=layers,
            output=shape.hidden * (1 if values else shape.vocab),
            adapter=adapted,
            attention=2 * shape.layers * shape.heads * shape.head_dim,
        )

    def forward(self, tokens: int, pairs: int) -> int:
        """FLOPs of a forward pass over ``tokens``; ``pairs`` are those of causal attention (`Tree.pairs`)."""
        return self.recompute(tokens, pairs) + 2 * tokens * self.output

    def training(self, tokens: int, pairs: int) -> int:
        """FLOPs of a forward and a backward pass.

        Backward, frozen weights have the gradient of their input alone (as many as forward), adapters also that of
        their weights, attention those of both factors of its products (twice as many).
        """
        backward = 2 * tokens * (self.layers + self.output + 2 * self.adapter) + 4 * pairs * self.attention
        return self.forward(tokens, pairs) + backward

    def recompute(self, tokens: int, pairs: int) -> int:
        """FLOPs of the layers alone, which `trainer.recompute` computes once more in the backward pass.

        `selective` keeps what attention returns: no ``pairs``.
        """
        return 2 * (tokens * (self.layers + self.adapter) + pairs * self.attention)

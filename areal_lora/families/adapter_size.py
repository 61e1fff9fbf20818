"""Number of parameters of an adapter, calculated from sizes without listing names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.families.family import Scope, covers
from areal_lora.families.shape import DTYPE_BYTES, ModelShape
from areal_lora.types import ExpertLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Sizes of one adapter version.

    ``parameters`` in ``tensors`` go over the wire. They stand for ``names`` Hugging Face names, which hold
    ``file_parameters`` in a PEFT file because shared tensors are repeated there.
    """

    parameters: int
    file_parameters: int
    tensors: int
    names: int

    def nbytes(self, dtype: str) -> int:
        return self.parameters * DTYPE_BYTES[dtype]


def adapter_size(shape: ModelShape, rank: int, targets: Sequence[str], expert_layout: ExpertLayout) -> AdapterSize:
    """Count the unique numbers of an adapter with these (canonical) targets.

    ``linear_qkv`` and ``linear_fc1`` are fused: one lora_A [rank, in] serves q, k, v (gate, up). It is counted
    and sent once, while every Hugging Face name needs its own. With layout ``shared`` the same holds for a
    layer's experts.
    """
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shared = expert_layout is ExpertLayout.SHARED
    adapters, copies = (1, shape.experts) if shared else (shape.experts, 1)

    def mlp(scope: Scope, count: int, copies: int = 1) -> list[tuple[str, Scope, int, int, int, list[int]]]:
        width = shape.width(scope)
        return [
            ("linear_fc1", scope, count, copies, shape.hidden, [width, width]),
            ("linear_fc2", scope, count, copies, width, [shape.hidden]),
        ]

    # linear, scope, number of adapters, modules that one stands for, inputs, outputs of each Hugging Face projection
    blocks = [
        ("linear_qkv", Scope.ATTENTION, shape.layers, 1, shape.hidden, [query, key, key]),
        ("linear_proj", Scope.ATTENTION, shape.layers, 1, query, [shape.hidden]),
        *mlp(Scope.MLP, shape.dense_layers),
        *mlp(Scope.SHARED_EXPERT, shape.moe_layers if shape.shared_ffn else 0),
        *mlp(Scope.EXPERT, shape.moe_layers * adapters, copies),
    ]
    chosen = [block[2:] for block in blocks if covers(targets, block[0], block[1])]
    return AdapterSize(
        parameters=sum(n * rank * (inputs + sum(outs)) for n, _, inputs, outs in chosen),
        file_parameters=sum(n * c * rank * (len(outs) * inputs + sum(outs)) for n, c, inputs, outs in chosen),
        tensors=sum(n * (1 + len(outs)) for n, _, _, outs in chosen),
        names=sum(n * c * 2 * len(outs) for n, c, _, outs in chosen),
    )

"""Number of parameters of an adapter, calculated from sizes without listing names."""

from __future__ import annotations

from dataclasses import dataclass

from areal_lora.families.family import Scope
from areal_lora.families.shape import DTYPE_BYTES, ModelShape
from areal_lora.families.sites import linear_sites, pieces_of
from areal_lora.types import AdapterStructure, ExpertLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Sizes of one adapter version.

    ``parameters`` in ``tensors`` go over the wire. They stand for ``names`` Hugging Face names, which hold
    ``file_parameters`` in a PEFT file because shared tensors are repeated there.
    They change ``weights`` parameters of the base, which are what travels where versions are merged.
    """

    parameters: int
    file_parameters: int
    weights: int
    tensors: int
    names: int

    def nbytes(self, dtype: str) -> int:
        return self.parameters * DTYPE_BYTES[dtype]


def adapter_size(shape: ModelShape, spec: AdapterStructure) -> AdapterSize:
    """Count the unique numbers of an adapter (canonical targets).

    ``linear_qkv`` and ``linear_fc1`` are fused: one lora_A [rank, in] serves q, k, v (gate, up). It is counted
    and sent once, while every Hugging Face name needs its own. What the experts of a layer share (`ExpertLayout`) is
    counted once, too.
    """
    parameters = file_parameters = weights = tensors = names = 0
    for key in linear_sites(shape):
        if not key.covered(spec.target_modules):
            continue
        pieces = pieces_of(shape, key)
        rank, inputs, outputs = spec.rank_of(pieces[0].name), pieces[0].in_features, sum(p.out_features for p in pieces)
        modules = shape.experts if key.scope is Scope.EXPERT else 1
        n_a, n_b = distinct(spec.expert_layout, key.linear, modules)
        parameters += rank * (n_a * inputs + n_b * outputs)
        file_parameters += rank * modules * (len(pieces) * inputs + outputs)
        weights += modules * inputs * outputs
        tensors += n_a + n_b * len(pieces)
        names += 2 * modules * len(pieces)
    return AdapterSize(
        parameters=parameters, file_parameters=file_parameters, weights=weights, tensors=tensors, names=names
    )


def distinct(expert_layout: ExpertLayout, linear: str, modules: int) -> tuple[int, int]:
    """How many lora_A and lora_B so many experts of one linear layer have."""
    match expert_layout:
        case ExpertLayout.PER_EXPERT:
            return modules, modules
        case ExpertLayout.SHARED:
            return 1, 1
        case ExpertLayout.SHARED_OUTER:
            return (1, modules) if linear == "linear_fc1" else (modules, 1)

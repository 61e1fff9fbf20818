"""Adapter tensors between this rank's shards and whole Hugging Face tensors.

``plan`` says who owns which wire tensor without talking to anybody; ``export`` joins the
shards of a tensor-parallel group on its owner; ``load`` cuts whole tensors into shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from areal_lora.engine.base import AdapterPlan, PlannedTensor
from areal_lora.engine.megatron_utils.convert.registry import (
    Dims,
    Family,
    Piece,
    Scope,
    SiteKey,
    to_hf,
    to_megatron,
    wire_names,
)
from areal_lora.engine.megatron_utils.layout import Layout
from areal_lora.engine.megatron_utils.lora import AdapterSite, Linear
from areal_lora.errors import AdapterError, UnknownTensorError
from areal_lora.types import AdapterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """A model's family, sizes and layout: what every rank knows about every adapter tensor."""

    family: Family
    dims: Dims
    layout: Layout

    def pieces(self, site: AdapterSite) -> list[Piece]:
        in_attention = site.linear in (Linear.QKV, Linear.PROJ)
        scope = Scope.ATTENTION if in_attention else Scope.MLP if site.expert is None else Scope.EXPERT
        key = SiteKey(linear=site.linear, layer=site.layer, scope=scope, expert=site.expert)
        return self.family.pieces(self.dims, key)

    def plan(self, spec: AdapterSpec, targets: set[Linear]) -> AdapterPlan:
        """Who sends what for an adapter on ``targets``; the same on every rank."""
        sources: dict[int, list[PlannedTensor]] = {}
        aliases: dict[str, str] = {}
        for key in self.family.sites(self.dims, range(self.layout.layers), spec.expert_layout):
            if key.linear not in targets:
                continue
            shapes, shared = wire_names(self.family.pieces(self.dims, key))
            aliases |= shared
            sources.setdefault(self.layout.owner(key.layer, key.expert), []).extend(
                PlannedTensor(name=name, shape=tuple(spec.rank if n < 0 else n for n in shape))
                for name, shape in shapes.items()
            )
        return AdapterPlan(sources={rank: tuple(t) for rank, t in sorted(sources.items())}, aliases=aliases)


def export(converter: Converter, sites: Sequence[AdapterSite], rank: int) -> dict[str, Tensor]:
    """Whole wire tensors that ``rank`` owns; collective over its tensor-parallel groups."""
    tensors: dict[str, Tensor] = {}
    for site in sites:
        lora_a = _join(site, site.module.lora_A.detach(), site.a_split)
        lora_b = _join(site, site.module.lora_B.detach(), site.b_split)
        if converter.layout.owner(site.layer, site.expert) == rank:
            tensors |= to_hf(converter.pieces(site), lora_a, lora_b)
    return tensors


def load(converter: Converter, sites: Sequence[AdapterSite], plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> None:
    """Copy this rank's shards out of whole tensors.

    Raises:
        UnknownTensorError: a name that is neither in the plan nor an alias, or one missing.
        AdapterError: a wrong shape, or an alias that differs from the tensor it stands for.
    """
    planned = {t.name: t.shape for owned in plan.sources.values() for t in owned}
    whole = _checked(planned, plan.aliases, tensors)
    for site in sites:
        lora_a, lora_b = to_megatron(converter.pieces(site), whole)
        with torch.no_grad():
            site.module.lora_A.copy_(_cut(site, lora_a, site.a_split))
            site.module.lora_B.copy_(_cut(site, lora_b, site.b_split))


def _checked(
    planned: Mapping[str, tuple[int, ...]], aliases: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    missing = sorted(planned.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - planned.keys() - aliases.keys())
    if missing or unknown:
        kind, names = ("missing", missing) if missing else ("unknown", unknown)
        what = f"{len(names)} {kind}, first {names[0]}"
        raise UnknownTensorError(f"adapter tensors do not fit this model: {what}")
    for name, tensor in tensors.items():
        shape = planned[aliases.get(name, name)]
        if tuple(tensor.shape) != shape:
            raise AdapterError(f"adapter tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if name in aliases and not torch.equal(tensor, tensors[aliases[name]]):
            raise AdapterError(f"adapter tensor {name} differs from {aliases[name]}; Megatron keeps one for both")
    return {name: tensors[name] for name in planned}


def _group(site: AdapterSite) -> dist.ProcessGroup:
    if site.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def _halves(site: AdapterSite, dim: int) -> int:
    """fc1 keeps its part of the gate rows, then its part of the up rows, on every rank."""
    return 2 if site.linear == Linear.FC1 and dim == 0 else 1


def _join(site: AdapterSite, local: Tensor, dim: int | None) -> Tensor:
    """The whole tensor from every rank's part; replicated tensors are whole already."""
    group = _group(site)
    world = dist.get_world_size(group)
    if dim is None or world == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local.contiguous(), group=group)
    blocks = [part.chunk(_halves(site, dim), dim) for part in parts]
    return torch.cat([block[half] for half in range(_halves(site, dim)) for block in blocks], dim)


def _cut(site: AdapterSite, whole: Tensor, dim: int | None) -> Tensor:
    """Inverse of `_join`: this rank's part of a whole tensor."""
    group = _group(site)
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    if dim is None or world == 1:
        return whole
    return torch.cat([half.chunk(world, dim)[rank] for half in whole.chunk(_halves(site, dim), dim)], dim)

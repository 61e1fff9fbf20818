"""LoRA on Megatron modules, wrapped with Bridge's PEFT class.

The adapters are not Bridge's, for three reasons: they stay in fp32 on a bf16 base, their numbers share one
flat memory (`arena`), and their gradients are exact under tensor parallelism. Bridge's own
adapter splits lora_A over the rank and, in experts with expert tensor parallelism, never sums
the gradient that flows back through it.

One rule holds for every layout: a tensor that is split over (expert) tensor-parallel ranks has
its whole gradient there; a tensor that is replicated over them has a part of it on each.

A layer is wrapped once, whatever number of adapters it has (`residents`).
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import get_adapter_attributes_from_linear
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import Bank
from areal_lora.engine.common.micro_batches import OutputSite
from areal_lora.engine.layers.expert_mlp import ActiveAdapter, ExpertLora, kept
from areal_lora.engine.megatron_utils.base_weights import LINEAR, scope_of
from areal_lora.engine.megatron_utils.modules import GroupedLinear
from areal_lora.errors import UnknownTensorError
from areal_lora.families.family import Scope


class ParallelAdapter(nn.Module):  # type: ignore[misc]
    """``scale * B A x`` next to a parallel linear layer, fp32 parameters, computed in the input's type.

    Column-parallel base (qkv, fc1): ``lora_A`` [r, in] replicated, ``lora_B`` [out / tp, r] split.
    Row-parallel base (proj, fc2): ``lora_A`` [r, in / tp] split, ``lora_B`` [out, r] replicated.
    The adapters of routed experts are part of `lora`.
    """

    def __init__(
        self,
        lora_a: nn.Parameter,
        lora_b: nn.Parameter,
        scale: float,
        site: int,
        *,
        gather: bool,
        scatter: bool,
        split: bool,
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B, self.scale, self.site = lora_a, lora_b, scale, site
        self._gather, self._scatter = gather, scatter  # over the sequence, before and after lora_A
        self._split = split  # over the inputs

    def add_to(self, output: Tensor, x: Tensor, active: ActiveAdapter) -> Tensor:
        """``output`` [..., out] plus the adapter's share for the layer's input ``x`` [..., in]."""
        if self._gather:
            x = gather_from_sequence_parallel_region(x)
        if active.dropout is not None:
            x = self._dropped(x, active)
        hidden = functional.linear(x, self.lora_A.to(x.dtype))
        if self._scatter:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden)
        lora_b = self.lora_B.to(x.dtype).t()
        return torch.addmm(
            output.reshape(-1, output.shape[-1]),
            hidden.reshape(-1, hidden.shape[-1]),
            lora_b,
            alpha=self.scale * active.factor,
        ).view(output.shape)

    def _dropped(self, x: Tensor, active: ActiveAdapter) -> Tensor:
        """Of the whole sequence; a row-parallel layer has features from the rank's first on."""
        first = parallel_state.get_tensor_model_parallel_rank() * x.shape[-1] if self._split else 0
        keep = active.keep(self.site, x.shape[-1], first)
        return kept(x.reshape(-1, x.shape[-1]), keep).view(x.shape)


class AdaptedLinear(LoRALinear):  # type: ignore[misc]
    """Bridge's wrapper of a linear layer, with its part of each resident adapter.

    The active adapter's product is added in place of a separate sum. Bridge's own place for one adapter is empty.
    """

    def __init__(self, base: nn.Module, active: ActiveAdapter) -> None:
        super().__init__(base, nn.Identity())
        self.active = active
        self.residents: dict[str, ParallelAdapter] = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias, normed = self.base_linear_forward(x, *args, **kwargs)
        adapter = self.residents.get(self.active.name or "")
        return (output if adapter is None else adapter.add_to(output, normed.contiguous(), self.active)), bias


_SITE = re.compile(rf"(?:^|\.)decoder\.layers\.(?P<layer>\d+)\.{LINEAR}$")

Site = AdaptedLinear | GroupedLinear


def attach(model: nn.Module, memory: AdapterMemory, active: ActiveAdapter) -> None:
    """Make the adapter in ``memory`` resident: wrap its target layers where none is wrapped yet.

    Raises UnknownTensorError if the model lacks a layer that the adapter has on this rank.
    """
    first = memory.model.layout.layers_of(memory.rank).start
    banks = {(bank.layer, bank.scope, bank.linear): bank for bank in memory.arena.banks}
    found_keys = set()
    for path, module in list(model.named_modules()):
        if (found := _SITE.search(path)) is None:
            continue
        for scope in (Scope.EXPERT, Scope.ALL_EXPERTS) if found["experts"] else (scope_of(found),):
            key = (first + int(found["layer"]), scope, found["attention"] or found["mlp"])
            if (bank := banks.get(key)) is None:
                continue
            found_keys.add(key)
            _add(_wrap(model, path, module, active), memory, bank)
    if banks.keys() - found_keys:
        layer, scope, linear = sorted(banks.keys() - found_keys)[0]
        raise UnknownTensorError(f"layer {layer}: the model has no {scope}.{linear} to adapt")


def take_output(model: nn.Module, active: ActiveAdapter) -> OutputSite | None:
    """Let an `OutputSite` compute what the model's last stage returns; None on other stages.

    Each tensor-parallel rank computes the values of its part of the sequence, so the gradient of the replicated head
    is a part on each, like that of other replicated tensors.
    """
    if not parallel_state.is_pipeline_last_stage():
        return None
    return OutputSite(model.get_submodule("output_layer"), active, _whole_sequence)


def _whole_sequence(values: Tensor) -> tuple[Tensor, None]:
    """Values [t / tp, 1, 1] as the output layer returns logits: of all tokens, and no bias."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        # Every rank differentiates the same loss: each takes its own part of the gradient.
        values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
    return values, None


def detach(model: nn.Module, name: str) -> None:
    """Forget the adapter ``name``; layers stay wrapped."""
    for module in model.modules():
        if isinstance(module, Site):
            module.residents.pop(name, None)


def _wrap(model: nn.Module, path: str, module: nn.Module, active: ActiveAdapter) -> Site:
    if isinstance(module, AdaptedLinear):
        return module
    if isinstance(module, GroupedLinear):
        module.active = active
        return module
    site = AdaptedLinear(module, active)
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, site)
    return site


def _add(site: Site, memory: AdapterMemory, bank: Bank) -> None:
    name, (scale, sites) = memory.spec.name, memory.scale_and_sites(bank)
    if isinstance(site, GroupedLinear):
        lora_a, lora_b = memory.parameters(bank, None if bank.experts else 0)
        site.residents[name] = ExpertLora(lora_a, lora_b, scale, torch.tensor(sites, device=lora_a.device))
        return
    lora_a, lora_b = memory.parameters(bank, 0)
    # Bridge also makes Transformer Engine's layers return their normalised input, which lora_A reads.
    over_sequence = not get_adapter_attributes_from_linear(site.to_wrap).disable_sequence_parallel_comm
    site.residents[name] = ParallelAdapter(
        lora_a,
        lora_b,
        scale,
        sites[0],
        gather=over_sequence and bank.column_parallel,
        scatter=over_sequence and not bank.column_parallel,
        split=not bank.column_parallel,
    )

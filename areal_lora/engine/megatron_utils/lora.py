"""LoRA on Megatron modules, wrapped with Bridge's PEFT class.

The adapters are not Bridge's, for three reasons: they stay in fp32 on a bf16 base, their numbers share one
flat memory (`arena`), and their gradients are exact under tensor parallelism. Bridge's own
adapter splits lora_A over the rank and, in experts with expert tensor parallelism, never sums
the gradient that flows back through it.

One rule holds for every layout: a tensor that is split over (expert) tensor-parallel ranks has
its whole gradient there; a tensor that is replicated over them has a part of it on each.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import get_adapter_attributes_from_linear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.engine.megatron_utils.adapter_memory import AdapterMemory
from areal_lora.engine.megatron_utils.arena import Bank
from areal_lora.engine.megatron_utils.experts import GroupedLinear
from areal_lora.errors import UnknownTensorError
from areal_lora.families.family import Scope


class ParallelAdapter(nn.Module):  # type: ignore[misc]
    """``scale * B A x`` next to a parallel linear layer, fp32 parameters, computed in the input's type.

    Column-parallel base (qkv, fc1): ``lora_A`` [r, in] replicated, ``lora_B`` [out / tp, r] split.
    Row-parallel base (proj, fc2): ``lora_A`` [r, in / tp] split, ``lora_B`` [out, r] replicated.
    The adapters of routed experts are part of `experts`.
    """

    def __init__(
        self, lora_a: nn.Parameter, lora_b: nn.Parameter, scale: float, *, gather: bool, scatter: bool
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B, self.scale = lora_a, lora_b, scale
        self._gather, self._scatter = gather, scatter  # over the sequence, before and after lora_A

    def add_to(self, output: Tensor, x: Tensor) -> Tensor:
        """``output`` [..., out] plus the adapter's share for the layer's input ``x`` [..., in]."""
        if self._gather:
            x = gather_from_sequence_parallel_region(x)
        hidden = functional.linear(x, self.lora_A.to(x.dtype))
        if self._scatter:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden)
        lora_b = self.lora_B.to(x.dtype).t()
        return torch.addmm(
            output.reshape(-1, output.shape[-1]), hidden.reshape(-1, hidden.shape[-1]), lora_b, alpha=self.scale
        ).view(output.shape)


class AdaptedLinear(LoRALinear):  # type: ignore[misc]
    """Bridge's wrapper of a linear layer, with the adapter's product added in place of a separate sum."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias, normed = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return output, bias
        return self.adapter.add_to(output, normed.contiguous()), bias


_SITE = re.compile(
    r"(?:^|\.)decoder\.layers\.(?P<layer>\d+)\."
    r"(?:self_attention\.(?P<attention>linear_qkv|linear_proj)"
    r"|mlp\.(?:(?P<shared>shared_experts)\.|(?P<experts>experts)\.)?"
    r"(?P<mlp>linear_fc1|linear_fc2))$"
)


def attach(model: nn.Module, memory: AdapterMemory) -> nn.Module:
    """Freeze ``model`` and wrap its target layers with adapters in ``memory``.

    Raises UnknownTensorError if the model lacks a layer that the adapter has on this rank.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    first = memory.model.layout.layers_of(memory.rank).start
    banks = {(bank.layer, bank.scope, bank.linear): bank for bank in memory.arena.banks}
    found_keys = set()
    for path, module in list(model.named_modules()):
        if (found := _SITE.search(path)) is None:
            continue
        scopes = (
            (Scope.EXPERT, Scope.ALL_EXPERTS)
            if found["experts"]
            else (Scope.SHARED_EXPERT if found["shared"] else Scope.ATTENTION if found["attention"] else Scope.MLP,)
        )
        for scope in scopes:
            key = (first + int(found["layer"]), scope, found["attention"] or found["mlp"])
            if (bank := banks.get(key)) is None:
                continue
            found_keys.add(key)
            if isinstance(module, GroupedLinear):
                lora_a, lora_b = memory.parameters(bank, None if bank.experts else 0)
                module.adapt(lora_a, lora_b, memory.spec.scale)
            else:
                _replace(model, path, AdaptedLinear(module, _adapter(memory, bank, module)))
    if banks.keys() - found_keys:
        layer, scope, linear = sorted(banks.keys() - found_keys)[0]
        raise UnknownTensorError(f"layer {layer}: the model has no {scope}.{linear} to adapt")
    return model


def _adapter(memory: AdapterMemory, bank: Bank, base: nn.Module) -> ParallelAdapter:
    lora_a, lora_b = memory.parameters(bank, 0)
    # Bridge also makes Transformer Engine's layers return their normalised input, which lora_A reads.
    over_sequence = not get_adapter_attributes_from_linear(base).disable_sequence_parallel_comm
    return ParallelAdapter(
        lora_a,
        lora_b,
        memory.spec.scale,
        gather=over_sequence and bank.column_parallel,
        scatter=over_sequence and not bank.column_parallel,
    )


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def set_enabled(model: nn.Module, enabled: bool) -> None:
    """Switch all adapters of this rank on or off; off is the frozen base (contract C11)."""
    for module in model.modules():
        if isinstance(module, GroupedLinear):
            module.adapter_enabled = enabled
        elif isinstance(module, LoRALinear):
            if enabled:
                module.enable_adapter_layers()
            else:
                module.disable_adapter_layers()

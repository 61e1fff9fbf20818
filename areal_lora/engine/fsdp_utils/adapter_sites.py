"""The places of a Hugging Face model where adapters act, and the adapters at each place by name.

A place is wrapped once, however many adapters come: a linear layer gets a forward hook, a layer's fused experts are
computed by `experts.grouped_experts`. The parameters of adapters are no parameters of the modules, so `fully_shard`
never sees them: they stay whole and fp32 on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from areal_lora.engine.layers.dropout import kept
from areal_lora.engine.layers.expert_mlp import ExpertLora
from areal_lora.engine.layers.residents import ActiveAdapter
from areal_lora.families.sites import RowRanges


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLora:
    """``scale * B A x`` of one projection: ``lora_a`` [r, in], and the rows ``rows`` of ``lora_b`` [*, r], fp32."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    rows: RowRanges
    scale: float
    site: int

    def add_to(self, output: Tensor, x: Tensor, active: ActiveAdapter) -> Tensor:
        """``output`` [..., out] plus the adapter's share for the layer's input ``x`` [..., in]."""
        rows = x.reshape(-1, x.shape[-1])
        hidden = functional.linear(kept(rows, active.keep(self.site, rows.shape[-1])), self.lora_a.to(x.dtype))
        parts = [self.lora_b[start:stop] for start, stop in self.rows]
        lora_b = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(x.dtype)
        return torch.addmm(
            output.reshape(-1, output.shape[-1]), hidden, lora_b.t(), alpha=self.scale * active.factor
        ).view(output.shape)


class LinearSite:
    """The forward hook of a linear layer."""

    def __init__(self, module: nn.Module, active: ActiveAdapter) -> None:
        self._active = active
        self.adapters: dict[str, LinearLora] = {}
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Sequence[Tensor], output: Tensor) -> Tensor:
        lora = self.adapters.get(self._active.name or "")
        return output if lora is None else lora.add_to(output, args[0], self._active)


@dataclass(slots=True)
class ExpertsSite:
    """The adapters of a layer's fused experts: fc1 (gate and up) and fc2 (down) by adapter."""

    active: ActiveAdapter
    fc1: dict[str, ExpertLora] = field(default_factory=dict)
    fc2: dict[str, ExpertLora] = field(default_factory=dict)

    def current(self) -> tuple[ExpertLora, ExpertLora]:
        """The parts of the active adapter; empty ones if there is none."""
        name = self.active.name or ""
        return self.fc1.get(name, ExpertLora()), self.fc2.get(name, ExpertLora())

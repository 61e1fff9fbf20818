"""`layers.attention` as Megatron's core attention, with rotary positions.

Megatron's own layers take a mask [s, s] or need Transformer Engine for packed sequences, and neither knows branches.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from areal_lora.engine.layers.attention import AttentionPlan, attend
from areal_lora.engine.layers.expert_mlp import ActiveAdapter


class Rotary:
    """Rotary embedding (Su et al., arXiv 2104.09864) of heads of width d, from its d / 2 inverse frequencies, fp32."""

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype) -> None:
        self._inv_freq, self._dtype = inv_freq, dtype

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [t, 1, d] of ``positions`` [t]."""
        angles = torch.outer(positions.float(), self._inv_freq)
        both = torch.cat([angles, angles], dim=-1)[:, None]
        return both.cos().to(self._dtype), both.sin().to(self._dtype)


class Packing:
    """The attention plans of the micro-batches in progress; all layers of a model share one object.

    Megatron hands a layer one tensor for attention, in the forward pass and when it recomputes it: the number of the
    micro-batch.
    """

    def __init__(self, rotary: Rotary) -> None:
        self._rotary = rotary
        self._plans: dict[int, tuple[AttentionPlan, Tensor, Tensor]] = {}
        self._keys: dict[int, Tensor] = {}
        self._added = 0

    def add(self, plan: AttentionPlan, keys: Tensor) -> Tensor:
        """Hold ``plan`` and ``keys`` [t] until :meth:`keep`; the result is Megatron's ``attention_mask``."""
        number, self._added = self._added, self._added + 1
        self._plans[number] = (plan, *self._rotary.tables(plan.positions))
        self._keys[number] = keys
        return torch.tensor([number], device=torch.device("cpu"))

    def keep(self, newest: int) -> None:
        """Forget all micro-batches but the ``newest``."""
        for number in [number for number in self._plans if number < self._added - newest]:
            del self._plans[number], self._keys[number]

    def follow(self, model: nn.Module, active: ActiveAdapter) -> None:
        """Give ``active`` the keys of the micro-batch that a layer of ``model`` computes or recomputes."""

        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            active.keys = self._keys[int(kwargs["attention_mask"])]

        for module in model.modules():
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(start, with_kwargs=True)

    def plan(self, number: Tensor) -> AttentionPlan:
        return self._plans[int(number)][0]

    def rotate(self, number: Tensor, x: Tensor) -> Tensor:
        """Heads ``x`` [t, h, d] at their positions."""
        _, cos, sin = self._plans[int(number)]
        first, second = x.chunk(2, dim=-1)
        return torch.addcmul(x * cos, torch.cat([-second, first], dim=-1), sin)


class PackedAttention(nn.Module):  # type: ignore[misc]
    """Megatron's ``core_attention``: query [t, 1, h, d], key and value [t, 1, g, d] to context [t, 1, h * d]."""

    def __init__(self, config: Any, *_: object, softmax_scale: float | None = None, **__: object) -> None:
        super().__init__()
        self._scale = softmax_scale
        self.packing: Packing | None = None  # set once the model is built

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object) -> Tensor:
        assert self.packing is not None
        query = self.packing.rotate(attention_mask, query[:, 0])
        key = self.packing.rotate(attention_mask, key[:, 0])
        plan = self.packing.plan(attention_mask)
        return attend(plan, query, key, value[:, 0], scale=self._scale)[:, None]


def bind(model: nn.Module, packing: Packing) -> None:
    """Give all attention layers of ``model`` the plans of ``packing``."""
    for module in model.modules():
        if isinstance(module, PackedAttention):
            module.packing = packing

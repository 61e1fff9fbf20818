"""Our modules in Megatron's places: `layers.attention` with rotary positions, `layers.expert_mlp` for routed experts.

Megatron's own attention takes a mask [s, s] or needs Transformer Engine for packed sequences, and neither knows
branches. Its experts are computed one by one, or all at once with Transformer Engine; an adapter beside each linear
layer then adds modules, copies and passes over memory per expert. Here all experts of a layer of one rank are computed
with their adapters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from areal_lora.engine.layers.attention import AttentionPlan, attend
from areal_lora.engine.layers.expert_mlp import ActiveAdapter, ExpertLora, expert_mlp, from_lanes, to_lanes


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
        """Give the attention layers of ``model`` these plans, and ``active`` the keys of what a layer (re)computes."""

        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            active.keys = self._keys[int(kwargs["attention_mask"])]

        for module in model.modules():
            if isinstance(module, PackedAttention):
                module.packing = self
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
        self.packing: Packing | None = None  # set by `Packing.follow`

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object) -> Tensor:
        assert self.packing is not None
        query = self.packing.rotate(attention_mask, query[:, 0])
        key = self.packing.rotate(attention_mask, key[:, 0])
        plan = self.packing.plan(attention_mask)
        return attend(plan, query, key, value[:, 0], scale=self._scale)[:, None]


class GroupedLinear(nn.Module):  # type: ignore[misc]
    """One of the two linear layers of all experts: ``weight`` [n, out, in] of this rank, and its adapters by name.

    ``active`` is the model's; `lora.attach` sets it.
    """

    def __init__(self, n: int, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n_out, n_in, dtype=dtype))
        self.residents: dict[str, ExpertLora] = {}
        self.active = ActiveAdapter()

    def lora(self) -> ExpertLora:
        """The part of the active adapter; an empty one if there is none."""
        return self.residents.get(self.active.name or "", ExpertLora())


class GroupedExperts(nn.Module):  # type: ignore[misc]
    """Megatron's ``experts`` module. Features are divided over the expert-tensor-parallel ranks.

    fc1 is divided by outputs and fc2 by inputs; the token dispatcher sums the partial outputs.
    """

    def __init__(self, num_local_experts: int, config: Any, *_: object, pg_collection: Any, **__: object) -> None:
        super().__init__()
        hidden, (width, rest) = config.hidden_size, divmod(config.moe_ffn_hidden_size, pg_collection.expt_tp.size())
        if rest:
            size = pg_collection.expt_tp.size()
            raise ValueError(f"expert tensor parallel size {size} does not divide {config.moe_ffn_hidden_size} columns")
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, 2 * width, config.params_dtype)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, hidden, config.params_dtype)
        self._first_column = pg_collection.expt_tp.rank() * width
        self.row_keys: Tensor | None = None
        """[T] of the rows that `forward` gets, set by `follow_tokens` where an adapter drops inputs."""

    @property
    def active(self) -> ActiveAdapter:
        """The object that counts; a layer without adapters has one of its own, which names none."""
        return self.linear_fc1.active if self.linear_fc1.residents else self.linear_fc2.active

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """``x`` [T, h] sorted by expert, ``probs`` [T]: (outputs [T, h], no bias)."""
        fc1, fc2 = self.linear_fc1.lora(), self.linear_fc2.lora()
        weights = self.linear_fc1.weight, self.linear_fc2.weight
        # Megatron's dispatchers have the counts on the host: a copy of n numbers, which waits for nothing.
        ends = tokens_per_expert.cumsum(0).to(x.device, torch.int32, non_blocking=True)
        return expert_mlp(x, probs, (fc1, fc2), weights, ends, self.active, self.row_keys, self._first_column), None


def follow_tokens(model: nn.Module) -> None:
    """While an adapter drops inputs, let the tokens' keys go to the experts of ``model`` as the tokens do."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.router.register_forward_hook(partial(_routed, layer))


def _routed(layer: MoELayer, _: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Runs in every pass and recomputation, before the tokens are dispatched."""
    experts, (probs, routing_map) = layer.experts, output
    active = experts.active
    experts.row_keys = None
    if active.dropout is not None:
        with torch.no_grad():
            experts.row_keys = _dispatched(layer.token_dispatcher, active.keys, args[0].shape[0], probs, routing_map)


def _dispatched(dispatcher: Any, keys: Tensor, own: int, probs: Tensor, routing_map: Tensor) -> Tensor:
    """``keys`` [t] of the whole micro-batch to [T] of this rank's rows; a rank may have ``own`` tokens only."""
    first = parallel_state.get_tensor_model_parallel_rank() * own if own < keys.shape[0] else 0
    lanes = to_lanes(keys[first : first + own])[:, None]
    lanes, probs = dispatcher.dispatch_preprocess(lanes, routing_map, probs)
    lanes, probs = dispatcher.token_dispatch(lanes, probs)
    rows, _, _ = dispatcher.dispatch_postprocess(lanes, probs)
    return from_lanes(rows)

"""A rank's routed experts as one module in Megatron's place.

Megatron computes experts one by one, or all at once with Transformer Engine; an adapter beside each linear layer then
adds modules, copies and passes over memory per expert. Here `expert_mlp` computes all experts of a layer with their
adapters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from areal_lora.engine.layers.expert_mlp import ActiveAdapter, ExpertLora, ExpertMlp, Groups, from_lanes, to_lanes


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
        groups, active, keys = Groups.of(tokens_per_expert.tolist()), self.active, self.row_keys
        y: Tensor = ExpertMlp.apply(
            x,
            probs.to(x.dtype),
            fc1.a,
            fc1.b,
            fc2.a,
            fc2.b,
            self.linear_fc1.weight,
            self.linear_fc2.weight,
            groups,
            (fc1.scale * active.factor, fc2.scale * active.factor),
            (
                fc1.keep(active.dropout, keys, groups, x.shape[1]),
                fc2.keep(active.dropout, keys, groups, self.linear_fc2.weight.shape[2], self._first_column),
            ),
        )
        return y, None


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

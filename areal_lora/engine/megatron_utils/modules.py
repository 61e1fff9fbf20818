"""Our modules in Megatron's places: `layers.attention` with rotary positions, `layers.expert_mlp` for routed experts.

Megatron's own attention takes a mask [s, s] or needs Transformer Engine for packed sequences, and neither knows
branches. Its experts are computed one by one, or all at once with Transformer Engine; an adapter beside each linear
layer then adds modules, copies and passes over memory per expert. Here all experts of a layer of one rank are computed
with their adapters.

Linear layers are wrapped with Bridge's PEFT class. The adapters are not Bridge's, for three reasons: weights and
gradients stay in fp32 on a bf16 base, their numbers share one flat memory (`arena`), and their gradients are exact
under tensor parallelism. Bridge's own adapter splits lora_A over the rank and, in experts with expert tensor
parallelism, never sums the gradient that flows back through it.

One rule holds for every layout: a tensor that is split over (expert) tensor-parallel ranks has
its whole gradient there; a tensor that is replicated over them has a part of it on each.

A layer is wrapped once, whatever number of adapters it has (`residents`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import get_adapter_attributes_from_linear
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import Bank
from areal_lora.engine.layers.active import ActiveAdapters, PackedTokens, from_lanes, to_lanes
from areal_lora.engine.layers.attention import AttentionPlan, attend, rotate
from areal_lora.engine.layers.expert_mlp import ExpertLora, expert_mlp
from areal_lora.engine.layers.grouped_lora import Groups, UpProjection, down_projection
from areal_lora.engine.layers.output import OutputSite
from areal_lora.engine.layers.router_replay import replay
from areal_lora.engine.megatron_utils.base_weights import LINEAR, scope_of
from areal_lora.engine.megatron_utils.exchange_sizes import CountedDispatcher, SizedTokens, own_part
from areal_lora.errors import UnknownTensorError
from areal_lora.families.family import Scope


class Packing:
    """The attention plans of the micro-batches in progress; all layers of a model share one object.

    Megatron hands a layer one tensor for attention, in the forward pass and when it recomputes it: the number of the
    micro-batch. Heads of width d are rotated by d / 2 inverse frequencies, fp32.
    """

    def __init__(self, inv_freq: Tensor, dtype: torch.dtype) -> None:
        self._inv_freq, self._dtype = inv_freq, dtype
        self._plans: dict[int, tuple[AttentionPlan, Tensor, Tensor]] = {}
        self._tokens: dict[int, PackedTokens] = {}
        self._added = 0

    def add(self, plan: AttentionPlan, tokens: PackedTokens) -> Tensor:
        """Hold ``plan`` and ``tokens`` until :meth:`keep`; the result is Megatron's ``attention_mask``."""
        number, self._added = self._added, self._added + 1
        angles = torch.outer(plan.positions.float(), self._inv_freq)
        both = torch.cat([angles, angles], dim=-1)  # [t, d]
        self._plans[number] = (plan, both.cos().to(self._dtype), both.sin().to(self._dtype))
        self._tokens[number] = tokens
        return torch.tensor([number], device=torch.device("cpu"))

    def keep(self, newest: int) -> None:
        """Forget all micro-batches but the ``newest``."""
        for number in [number for number in self._plans if number < self._added - newest]:
            del self._plans[number], self._tokens[number]

    def follow(self, model: nn.Module, active: ActiveAdapters) -> None:
        """Give the attention layers of ``model`` these plans, its routers the routes, and ``active`` the tokens that a
        layer (re)computes."""

        def start(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            active.tokens = self._tokens[int(kwargs["attention_mask"])]

        routers = [layer.router for layer in model.modules() if isinstance(layer, MoELayer)]
        for layer, router in enumerate(routers):
            router.router_replay = RouterChoice(active, layer)
        for module in model.modules():
            if isinstance(module, PackedAttention):
                module.packing = self
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(start, with_kwargs=True)

    def plan(self, number: Tensor) -> tuple[AttentionPlan, Tensor, Tensor]:
        """With cosines and sines [t, d] of its positions."""
        return self._plans[int(number)]


class PackedAttention(nn.Module):  # type: ignore[misc]
    """Megatron's ``core_attention``: query [t, 1, h, d], key and value [t, 1, g, d] to context [t, 1, h * d]."""

    def __init__(self, config: Any, *_: object, softmax_scale: float | None = None, **__: object) -> None:
        super().__init__()
        self._scale = softmax_scale
        self.packing: Packing | None = None  # set by `Packing.follow`

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **_: object) -> Tensor:
        assert self.packing is not None
        plan, *angles = self.packing.plan(attention_mask)
        query, key = rotate(query[:, 0], key[:, 0], *angles)
        return attend(plan, query, key, value[:, 0], scale=self._scale)[:, None]


class GroupedLinear(nn.Module):  # type: ignore[misc]
    """One of the two linear layers of all experts: ``weight`` [n, out, in] of this rank, and its adapters by name.

    ``active`` is the model's; `attach` sets it.
    """

    def __init__(self, n: int, n_in: int, n_out: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n_out, n_in, dtype=dtype))
        self.residents: dict[str, ExpertLora] = {}
        self.active = ActiveAdapters()

    def loras(self, active: ActiveAdapters) -> list[ExpertLora]:
        """The part of each adapter in use; an empty one if there is none."""
        return [self.residents.get(name, ExpertLora()) for name in active.each]


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
        self.rows: PackedTokens | None = None
        """Those that `forward` gets, sorted by expert alone; set by `follow_tokens` where several adapters are in use
        or inputs are dropped."""

    @property
    def active(self) -> ActiveAdapters:
        """The object that counts; a layer without adapters has one of its own, which names none."""
        return self.linear_fc1.active if self.linear_fc1.residents else self.linear_fc2.active

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """``x`` [T, h] sorted by expert, ``probs`` [T]: (outputs [T, h], no bias)."""
        active = self.active
        loras = list(zip(self.linear_fc1.loras(active), self.linear_fc2.loras(active), strict=True))
        weights = self.linear_fc1.weight, self.linear_fc2.weight
        # A dispatcher that exchanges has the counts on the host: a copy of n numbers, which waits for nothing.
        ends = tokens_per_expert.cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        rows, back = self.rows, None
        if rows is not None and rows.owners is not None:
            each, numbers = len(active.each), torch.arange(max(len(x), len(ends) * len(active.each)), device=x.device)
            experts = torch.searchsorted(ends, numbers[: len(x)], right=True)
            cells, order = (experts * each + rows.owners).sort(stable=True)
            rows = PackedTokens(
                keys=rows.keys.index_select(0, order),
                ends=torch.searchsorted(cells, numbers[: len(ends) * each], right=True, out_int32=True),
                owners=rows.owners.index_select(0, order),
            )
            x, probs, back = x.index_select(0, order), probs.index_select(0, order), order.argsort()
        out = expert_mlp(x, probs, loras, weights, ends, active, rows, self._first_column)
        return (out if back is None else out.index_select(0, back)), None


@dataclass(frozen=True, slots=True)
class RouterChoice:
    """In the place of Megatron's ``RouterReplay`` in a router, which knows neither micro-batches nor own choices.

    ``layer`` counts the stage's layers with experts. The router makes weights of the scores that it gets.
    """

    active: ActiveAdapters
    layer: int

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: Any, group_topk: Any, default_compute_topk: Any
    ) -> tuple[Tensor, Tensor]:
        """Scores and numbers [t, topk] of the experts chosen of ``scores`` [t, E]; t: all tokens, or this rank's."""
        found, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if (routes := self.active.routes(self.layer)) is None:
            return found, own
        routes = own_part(routes, len(scores))
        return (found, own) if self.active.chosen(own, routes) else replay(scores, own, routes)


def follow_tokens(model: nn.Module) -> None:
    """While an adapter drops inputs or several are in use, let keys and adapters' numbers go to the experts of
    ``model`` as the tokens do."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.router.register_forward_hook(partial(_routed, layer))
            if isinstance(layer.token_dispatcher, MoEAlltoAllTokenDispatcher):
                layer.token_dispatcher.__class__ = CountedDispatcher  # a layer knows its dispatchers by name only


def exchanging(model: nn.Module) -> CountedDispatcher | None:
    """One of the dispatchers of ``model``, which are alike, if they exchange rows with other ranks."""
    found = (layer.token_dispatcher for layer in model.modules() if isinstance(layer, MoELayer))
    return next((each for each in found if isinstance(each, CountedDispatcher) and each.exchanges), None)


def _routed(layer: MoELayer, _: nn.Module, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    """Runs in every pass and recomputation, before the tokens are dispatched."""
    experts, (probs, routing_map) = layer.experts, output
    active, choice = experts.active, layer.router.router_replay
    experts.rows = layer.token_dispatcher.counts = None
    if isinstance(choice.active.tokens, SizedTokens):
        layer.token_dispatcher.expect(choice.active.tokens, choice.layer)
    if active.drops or len(active.each) > 1:
        assert active.tokens is not None
        lanes, owners = to_lanes(active.tokens.keys), active.tokens.owners
        lanes = lanes if owners is None else torch.cat([lanes, owners[:, None].float()], dim=1)
        with torch.no_grad():
            rows = _dispatched(layer.token_dispatcher, lanes, args[0].shape[0], probs, routing_map)
        experts.rows = PackedTokens(keys=from_lanes(rows), owners=None if owners is None else rows[:, -1].long())


def _dispatched(dispatcher: Any, lanes: Tensor, own: int, probs: Tensor, routing_map: Tensor) -> Tensor:
    """``lanes`` [t, n] of the whole micro-batch to [T, n] of this rank's rows; a rank may have ``own`` tokens only."""
    lanes, probs = dispatcher.dispatch_preprocess(own_part(lanes, own)[:, None], routing_map, probs)
    lanes, probs = dispatcher.token_dispatch(lanes, probs)
    rows, dispatcher.counts, _ = dispatcher.dispatch_postprocess(lanes, probs)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAdapter:
    """``scale * B A x`` next to a parallel linear layer, parameters in the input's type, gradients fp32.

    Column-parallel base (qkv, fc1): ``lora_a`` [r, in] replicated, ``lora_b`` [out / tp, r] split.
    Row-parallel base (proj, fc2): ``lora_a`` [r, in / tp] split, ``lora_b`` [out, r] replicated.
    The adapters of routed experts are in `GroupedLinear`.
    """

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float
    site: int
    gather: bool
    """Over the sequence, after lora_A, which reads the rank's part of it."""
    scatter: bool
    """Over the sequence, after lora_A."""
    split: bool
    """Over the inputs."""


class AdaptedLinear(LoRALinear):  # type: ignore[misc]
    """Bridge's wrapper of a linear layer, with its part of each resident adapter.

    The products of the adapters in use are added in place of a separate sum. Bridge's own place for one is empty.
    """

    def __init__(self, base: nn.Module, active: ActiveAdapters) -> None:
        super().__init__(base, nn.Identity())
        self.active = active
        self.residents: dict[str, ParallelAdapter] = {}

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, bias, normed = self.base_linear_forward(x, *args, **kwargs)
        parts = [self.residents.get(name) for name in self.active.each]
        return (self._add(output, normed.contiguous(), parts) if any(parts) else output), bias

    def _add(self, output: Tensor, x: Tensor, parts: Sequence[ParallelAdapter | None]) -> Tensor:
        """``output`` [..., out] plus the adapters' products for the layer's input ``x`` [..., in].

        Collectives are for all adapters at once; those of the site are alike.
        """
        active, kind = self.active, next(part for part in parts if part)
        x, rows, rank = x.reshape(-1, x.shape[-1]), active.tokens, parallel_state.get_tensor_model_parallel_rank()
        own = rows and rows.part(rank * len(x), len(x)) if kind.gather else rows
        # A row-parallel layer has features from the rank's on.
        keep = active.keep(own, kind.site, x.shape[1], rank * x.shape[1] if kind.split else 0)
        hidden = down_projection(x, own, keep, [part.lora_a if part else None for part in parts])
        if kind.gather:
            hidden = gather_from_sequence_parallel_region(hidden)
        elif kind.scatter:  # over the ranks' parts of the sequence
            hidden = reduce_scatter_to_sequence_parallel_region(hidden)
            rows = rows and rows.part(rank * len(hidden), len(hidden))
        scale = active.scale([part.scale if part else 1.0 for part in parts], rows)
        if len(parts) == 1:
            found = torch.addmm(output.reshape(-1, output.shape[-1]), hidden, kind.lora_b.t(), alpha=scale)
            return found.view(output.shape)
        lora_b = [part.lora_b[None] if part else None for part in parts]
        grads = [part.lora_b.grad[None] if part and part.lora_b.grad is not None else None for part in parts]
        return output + UpProjection.apply(hidden, Groups.of(rows), scale, lora_b, grads).view(output.shape)


SITE = re.compile(rf"^(?P<chunk>\d+)\.decoder\.layers\.(?P<layer>\d+)\.{LINEAR}$")

Site = AdaptedLinear | GroupedLinear


def attach(model: nn.Module, memory: AdapterMemory, active: ActiveAdapters) -> None:
    """Make the adapter in ``memory`` resident: wrap its target layers where none is wrapped yet.

    Raises UnknownTensorError if the model lacks a layer that the adapter has on this rank.
    """
    chunks = memory.model.layout.chunks_of(memory.rank)
    banks = {(bank.layer, bank.scope, bank.linear): bank for bank in memory.arena.banks}
    found_keys = set()
    for path, module in list(model.named_modules()):
        if (found := SITE.search(path)) is None:
            continue
        for scope in (Scope.EXPERT, Scope.ALL_EXPERTS) if found["experts"] else (scope_of(found),):
            layer = chunks[int(found["chunk"])][int(found["layer"])]
            key = (layer, scope, found["attention"] or found["mlp"])
            if (bank := banks.get(key)) is None:
                continue
            found_keys.add(key)
            _add(_wrap(model, path, module, active), memory, bank)
    if banks.keys() - found_keys:
        layer, scope, linear = sorted(banks.keys() - found_keys)[0]
        raise UnknownTensorError(f"layer {layer}: the model has no {scope}.{linear} to adapt")


def take_output(last: nn.Module, active: ActiveAdapters) -> OutputSite | None:
    """Let an `OutputSite` compute what the model's last stage returns, the ``last`` chunk there; None on other stages.

    Each tensor-parallel rank computes the values of its part of the sequence, so the gradient of the replicated head
    is a part on each, like that of other replicated tensors.
    """
    if not parallel_state.is_pipeline_last_stage():
        return None
    group, layer = parallel_state.get_tensor_model_parallel_group(), last.get_submodule("output_layer")
    # As the layer returns logits: [p, 1, *], and no bias.
    return OutputSite(layer, active, lambda found: (found[:, None], None), group=group, whole=_whole_sequence)


def _whole_sequence(rows: Tensor, parts: bool) -> Tensor:
    """``rows`` [t / tp, 1, n] of every rank. Without ``parts`` each rank takes its own of the gradient of all."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        return rows
    return gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=parts)


def detach(model: nn.Module, name: str) -> None:
    """Forget the adapter ``name``; layers stay wrapped."""
    for module in model.modules():
        if isinstance(module, Site):
            module.residents.pop(name, None)


def _wrap(model: nn.Module, path: str, module: nn.Module, active: ActiveAdapters) -> Site:
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
    name = memory.spec.name
    if isinstance(site, GroupedLinear):
        site.residents[name] = memory.experts(bank)
        return
    (lora_a, lora_b), (scale, sites) = memory.parameters(bank, 0), memory.scale_and_sites(bank)
    # Bridge also makes Transformer Engine's layers return their normalised input, which lora_A reads: of the whole
    # sequence. From version 2.4 on their backward pass drops the gradient of that, and adds the one of a rank's part.
    linear, found = site.to_wrap, get_adapter_attributes_from_linear(site.to_wrap)
    linear.return_layernorm_output_gathered = False
    over_sequence = linear.config.sequence_parallel and not found.disable_tensor_parallel_comm
    site.residents[name] = ParallelAdapter(
        lora_a=lora_a,
        lora_b=lora_b,
        scale=scale,
        site=sites[0],
        gather=over_sequence and bank.column_parallel,
        scatter=over_sequence and not bank.column_parallel,
        split=not bank.column_parallel,
    )

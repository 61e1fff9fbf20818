"""The FSDP2 engine: one rank of a Hugging Face model whose frozen weights are sharded.

Data and context parallelism only: every rank computes packed token trees [1, t], or its part of them, with the same
gathered layers. Adapters are whole on every rank, in fp32, their moments divided over all ranks; rank 0 publishes them.
Importing this file imports transformers' modelling code.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.data.collate import MicroPlan
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.adapter_optimizer import GradientClass
from areal_lora.engine.common.arena import Bank, ParallelLayout, Range, ShardedModel, is_routed
from areal_lora.engine.common.micro_batches import BatchJudge, Result
from areal_lora.engine.fsdp_utils.model import build_model, take_experts, take_logit_scale
from areal_lora.engine.layers.active import ActiveAdapters
from areal_lora.engine.layers.attention import PackedMicroBatch
from areal_lora.engine.layers.grouped_lora import Groups, UpProjection, down_projection
from areal_lora.engine.layers.output import OutputSite
from areal_lora.engine.layers.router_replay import refused
from areal_lora.engine.layers.served_weights import MergedPart, ServedSite
from areal_lora.errors import ConfigError, UnknownTensorError
from areal_lora.families.shape import read_shape
from areal_lora.families.sites import RowRanges, linear_sites
from areal_lora.platforms.device import collective_of, profiler_range


class SharedInput:
    """``A x`` of the ``projections`` that read the same input: computed by the first of them for all adapters in use.

    ``lora_a`` has the [r, in] of each resident adapter; ``site`` is the layer's number for dropout. The product is
    forgotten with the last projection, so that it outlives no layer's pass.
    """

    def __init__(self, projections: int, site: int) -> None:
        self.lora_a: dict[str, nn.Parameter] = {}
        self._projections, self._site = projections, site
        self._known: tuple[Tensor, Tensor] | None = None
        self._left = 0

    def hidden(self, x: Tensor, active: ActiveAdapters) -> Tensor:
        """[t, r] of the layer's input ``x`` [..., in]; r is one adapter's rank, or as in `stacked`."""
        if self._known is None or self._known[0] is not x:
            flat, lora_a = x.reshape(-1, x.shape[-1]), [self.lora_a.get(name) for name in active.each]
            keep = active.keep(active.tokens, self._site, flat.shape[1])
            found = down_projection(flat, active.tokens, keep, lora_a)
            self._known, self._left = (x, found), self._projections
        hidden, self._left = self._known[1], self._left - 1
        if not self._left:
            self._known = None
        return hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLora:
    """``scale * B h`` of one projection: ``lora_b`` and its gradient [runs, rows of a run, r]."""

    lora_b: Tensor
    grad: Tensor | None
    scale: float

    @classmethod
    def of(cls, memory: AdapterMemory, bank: Bank, rows: RowRanges, scale: float) -> "LinearLora":
        """With ``rows`` of a bank's lora_B, in runs that are equally long and equally far apart.

        A frozen adapter has no gradient.
        """
        (start, stop), *others = rows
        r = bank.b_shape[2]
        pitch = others[0][0] - start if others else stop - start
        view = (len(rows), stop - start, r), (pitch * r, r, 1), bank.b + start * r
        grad = None if memory.frozen else memory.grads.as_strided(*view)
        return cls(lora_b=memory.cast.as_strided(*view), grad=grad, scale=scale)


class _AddProduct(torch.autograd.Function):  # type: ignore[misc]
    """Add one adapter's ``scale * hidden B'`` to ``output`` in its place: no backward pass of a frozen layer reads it.

    The rows of B lie apart in memory; torch would add their gradients run by run. `UpProjection` would be a product and
    a sum, and round apart.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, hidden: Tensor, lora_b: Tensor, grad: Tensor | None, scale: float) -> Tensor:
        weight = lora_b.flatten(0, 1)
        ctx.save_for_backward(hidden, weight)
        ctx.mark_dirty(output)
        ctx.grad, ctx.scale = grad, scale
        output.view(-1, output.shape[-1]).addmm_(hidden, weight.t(), alpha=scale)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (hidden, weight) = grads, ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        ctx.grad.add_((rows.t() @ hidden).view(ctx.grad.shape), alpha=ctx.scale)
        return dy, torch.addmm(hidden, rows, weight, beta=0, alpha=ctx.scale), None, None, None


class LinearSite:
    """The forward hook of a linear layer, one of those that read the input ``shared``."""

    def __init__(self, module: nn.Module, shared: SharedInput, active: ActiveAdapters) -> None:
        self.shared, self._active = shared, active
        self.adapters: dict[str, LinearLora] = {}
        module.register_forward_hook(self)

    def __call__(self, module: nn.Module, args: Sequence[Tensor], output: Tensor) -> Tensor:
        active = self._active
        parts = [self.adapters.get(name) for name in active.each]
        if not any(parts):
            return output
        hidden, rows = self.shared.hidden(args[0], active), active.tokens
        scale = active.scale([part.scale if part else 1.0 for part in parts], rows)
        lora_b = [part.lora_b if part else None for part in parts]
        grads = [part.grad if part else None for part in parts]
        if len(parts) == 1:
            added: Tensor = _AddProduct.apply(output, hidden, *lora_b, *grads, scale)
            return added
        return output.add_(UpProjection.apply(hidden, Groups.of(rows), scale, lora_b, grads).view_as(output))


class FsdpModel:
    """The frozen base on this rank, and the adapters attached to it. Every call but `detach` is collective."""

    def __init__(self, module: nn.Module, sharded: ShardedModel, active: ActiveAdapters) -> None:
        self.groups: Mapping[Range, dist.ProcessGroup] = {}  # no adapter tensor is split
        self._sharded, self.module, self.active = sharded, module, active
        self._linears: dict[str, LinearSite] = {}
        self._experts = take_experts(self.module, self.active)
        head, scale = self.module.get_output_embeddings(), take_logit_scale(self.module)
        # No view: FSDP watches for the backward pass of what a module returns.
        self.output = OutputSite(head, self.active, lambda found: found[None].clone(), scale=scale)

    def attach(self, memory: AdapterMemory) -> list[GradientClass]:
        """Add the adapter in ``memory`` to the sites of its banks.

        Raises UnknownTensorError for a bank whose layers the model lacks or computes in a way that takes no adapter.
        """
        for bank in memory.arena.banks:
            if is_routed(bank.scope):
                self._attach_experts(memory, bank)
            else:
                self._attach_linear(memory, bank)
        if head := memory.value_head():
            self.output.heads[memory.spec.name] = head
        everywhere = [dist.group.WORLD] if self._sharded.layout.world > 1 else []
        return [GradientClass(start=0, end=memory.arena.size, groups=everywhere)]

    def detach(self, name: str) -> None:
        for linear in self._linears.values():
            linear.adapters.pop(name, None)
            linear.shared.lora_a.pop(name, None)
        for experts in self._experts.values():
            experts.fc1.pop(name, None)
            experts.fc2.pop(name, None)
        self.output.heads.pop(name, None)

    def served_sites(self, merged: AdapterMemory | None) -> Iterator[ServedSite]:
        name, modules = merged.spec.name if merged else "", dict(self.module.named_modules())
        for key in linear_sites(self._sharded.shape):
            pieces = () if is_routed(key.scope) else self._sharded.pieces(key)
            linears = {p.name: m for p in pieces if isinstance(m := modules.get(p.name), nn.Linear)}
            for path, module in linears.items():
                part, site = None, self._linears.get(path)
                if merged and site and (own := site.adapters.get(name)):
                    part = MergedPart.of(merged.weights, site.shared.lora_a[name], own.lora_b, own.scale)
                yield ServedSite(module=module, owner=module, fused=tuple(linears.values()), part=part)
        for path, experts in self._experts.items():
            for which, adapters in (("gate_up_proj", experts.fc1), ("down_proj", experts.fc2)):
                part = None
                if merged and (its := adapters.get(name)):
                    part = MergedPart.of(merged.weights, its.a, its.b, its.scale)
                yield ServedSite(module=modules[path], owner=modules[path], name=which, part=part)

    def run(
        self, batches: Iterator[PackedMicroBatch], plans: Sequence[MicroPlan], judge: BatchJudge, *, train: bool
    ) -> list[Result]:
        def step(packed: PackedMicroBatch) -> list[Result]:
            self.active.tokens = packed.tokens
            if packed.tokens.routes is not None and packed.tokens.routes.shape[1] != len(self._experts):
                raise refused(type(self.module).__name__)
            self.output.expect(packed, judge.readout)
            with profiler_range("forward"):
                output = self.module(
                    input_ids=packed.token_ids,
                    position_ids=packed.attention.positions[None],
                    use_cache=False,
                    packing=packed.attention,
                )
                loss, results = judge(packed, output.logits[0])
            if train:
                with profiler_range("backward"):
                    loss.backward()
            return results

        # Not a loop, whose variable would outlive the making of the next micro-batch.
        return list(chain.from_iterable(map(step, batches)))

    def _attach_linear(self, memory: AdapterMemory, bank: Bank) -> None:
        (key,), (scale, sites) = bank.keys, memory.scale_and_sites(bank)
        pieces, (lora_a, _) = self._sharded.pieces(key), memory.parameters(bank, 0)
        known = self._linears.get(pieces[0].name)
        shared = known.shared if known else SharedInput(len(pieces), sites[0])
        shared.lora_a[memory.spec.name] = lora_a
        for piece in pieces:
            if piece.name not in self._linears:
                try:
                    module = self.module.get_submodule(piece.name)
                except AttributeError:
                    raise UnknownTensorError(f"the model has no module {piece.name} to adapt") from None
                if not isinstance(module, nn.Linear):
                    raise UnknownTensorError(f"{piece.name} is a {type(module).__name__} and no linear layer")
                self._linears[piece.name] = LinearSite(module, shared, self.active)
            self._linears[piece.name].adapters[memory.spec.name] = LinearLora.of(memory, bank, piece.rows, scale)

    def _attach_experts(self, memory: AdapterMemory, bank: Bank) -> None:
        sites = [site for path, site in self._experts.items() if f".layers.{bank.layer}." in path]
        if len(sites) != 1:
            raise UnknownTensorError(f"layer {bank.layer}: {len(sites)} groups of fused experts that take an adapter")
        (sites[0].fc1 if bank.column_parallel else sites[0].fc2)[memory.spec.name] = memory.experts(bank)


class FsdpEngine(AdapterEngine):
    """`AdapterEngine` on `fully_shard`. Joins torch.distributed unless the caller has."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, device: torch.device, longest: int = 0) -> None:
        """``longest``: `rollout.max_model_len`, by which servers choose the factors of LongRoPE.

        Raises ConfigError for parallel sizes other than 1, or a model that cannot train on packed sequences.
        """
        for key in ("tp", "pp", "ep", "etp"):
            if (size := getattr(trainer, key)) != 1:
                reason = f"{size} with trainer.engine = fsdp, which only shards"
                raise ConfigError(f"trainer.{key}", reason, "set it to 1")
        shape = read_shape(Path(model.folder))
        layout = ParallelLayout.of(trainer, layers=shape.layers, experts=shape.experts)
        sharded = ShardedModel(shape=shape, layout=layout)
        if not dist.is_initialized():
            dist.init_process_group(collective_of(device))
        active = ActiveAdapters()
        module = build_model(model, trainer, longest, dist.get_rank(), device, active)
        super().__init__(FsdpModel(module, sharded, active), sharded, model, trainer, device)

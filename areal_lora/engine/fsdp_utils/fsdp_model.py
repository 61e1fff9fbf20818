"""The sharded model run over packed token trees [1, t], and the adapters attached to it.

Data parallelism only: every rank computes its own trees with the same gathered layers. Importing this file imports
transformers' modelling code.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.data.collate import MicroPlan
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.adapter_memory import AdapterMemory, GradientClass
from areal_lora.engine.common.arena import Bank, Range, ShardedModel, is_routed
from areal_lora.engine.common.micro_batches import Readout, Result, finish, plans_of, sum_over_ranks, whole_scores
from areal_lora.engine.fsdp_utils.model import LinearLora, LinearSite, build_model, take_experts, take_output
from areal_lora.engine.layers.attention import pack
from areal_lora.engine.layers.expert_mlp import ActiveAdapter, Dropout, ExpertLora
from areal_lora.errors import UnknownTensorError
from areal_lora.platforms.device import platform_of
from areal_lora.types import TrainBatch


class FsdpModel:
    """The frozen base on this rank, and the adapters attached to it. Every call but `detach` is collective."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, sharded: ShardedModel, device: torch.device) -> None:
        """Join torch.distributed unless the caller has, build the model and load this rank's part of the base."""
        if not dist.is_initialized():
            dist.init_process_group(platform_of(device).collective)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.groups: dict[Range, dist.ProcessGroup] = {}  # no adapter tensor is split
        self._trainer, self._layout, self._sharded, self._device = trainer, sharded.layout, sharded, device
        self.module = build_model(model, trainer, self.rank, device)
        self._active = ActiveAdapter()
        self._linears: dict[str, LinearSite] = {}
        self._experts = take_experts(self.module, self._active)
        self._output = take_output(self.module, self._active)

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
            self._output.heads[memory.spec.name] = head
        everywhere = [dist.group.WORLD] if self.world_size > 1 else []
        return [GradientClass(start=0, end=memory.arena.size, groups=everywhere, counted=self.rank == 0)]

    def detach(self, name: str) -> None:
        """Forget an attached adapter (not collective)."""
        for linear in self._linears.values():
            linear.adapters.pop(name, None)
        for experts in self._experts.values():
            experts.fc1.pop(name, None)
            experts.fc2.pop(name, None)
        self._output.heads.pop(name, None)

    def score(self, batch: TrainBatch, adapter: str | None, readout: Readout) -> Tensor:
        """See `Compute.score`."""
        with torch.no_grad(), self._active.using(adapter):
            results = [self._micro_batch(batch, plan, None, readout) for plan in self._plans(batch)]
        return whole_scores(batch, results, reports=True)

    def forward_backward(
        self,
        batch: TrainBatch,
        adapter: str,
        loss_fn: LossFn,
        readout: Readout,
        *,
        need_entropy: bool,
        dropout: Dropout | None,
        scores: Tensor | None,
    ) -> dict[str, float]:
        """See `TrainEngine.forward_backward`."""
        sums: Counter[str] = Counter()
        results: list[Result] = []
        with self._active.using(adapter, dropout):
            for plan in self._plans(batch):
                results.append(self._micro_batch(batch, plan, loss_fn, readout, need_entropy=need_entropy))
                sums.update({name: float(value) for name, value in results[-1][1].items()})
        if scores is not None:
            scores.copy_(whole_scores(batch, results, reports=True))
        return sum_over_ranks(sums, range(self.world_size))

    def _plans(self, batch: TrainBatch) -> list[MicroPlan]:
        return plans_of(batch, self._layout, self._trainer.max_tokens_per_microbatch)

    def _micro_batch(
        self,
        batch: TrainBatch,
        plan: MicroPlan,
        loss_fn: LossFn | None,
        readout: Readout,
        *,
        need_entropy: bool = False,
    ) -> Result:
        """Compute this rank's trees, and differentiate if there is a ``loss_fn``."""
        packed = pack(batch, plan, self.rank, self._device)
        self._active.keys = packed.keys
        output = self.module(
            input_ids=packed.token_ids,
            position_ids=packed.attention.positions[None],
            use_cache=False,
            logits_to_keep=packed.sources,
            packing=packed.attention,
        )
        logits = output.logits[0]
        rows = torch.arange(len(logits), device=logits.device)
        loss, sums, scores = finish(packed, logits, rows, loss_fn, readout, need_entropy=need_entropy, group=None)
        if loss_fn is not None:
            loss.backward()
        return packed.sequences, sums, scores

    def _attach_linear(self, memory: AdapterMemory, bank: Bank) -> None:
        lora_a, lora_b = memory.parameters(bank, 0)
        (key,) = bank.keys
        for piece in self._sharded.pieces(key):
            if piece.name not in self._linears:
                try:
                    module = self.module.get_submodule(piece.name)
                except AttributeError:
                    raise UnknownTensorError(f"the model has no module {piece.name} to adapt") from None
                if not isinstance(module, nn.Linear):
                    raise UnknownTensorError(f"{piece.name} is a {type(module).__name__} and no linear layer")
                self._linears[piece.name] = LinearSite(module, self._active)
            self._linears[piece.name].adapters[memory.spec.name] = LinearLora(
                lora_a=lora_a, lora_b=lora_b, rows=piece.rows, scale=memory.scale(bank), site=memory.sites(bank)[0]
            )

    def _attach_experts(self, memory: AdapterMemory, bank: Bank) -> None:
        lora_a, lora_b = memory.parameters(bank, None if bank.experts else 0)
        sites = [site for path, site in self._experts.items() if f".layers.{bank.layer}." in path]
        if len(sites) != 1:
            raise UnknownTensorError(f"layer {bank.layer}: {len(sites)} groups of fused experts that take an adapter")
        lora = ExpertLora(lora_a, lora_b, memory.scale(bank), memory.sites(bank))
        (sites[0].fc1 if bank.column_parallel else sites[0].fc2)[memory.spec.name] = lora

"""This rank's part of the model, run through Megatron's pipeline schedule as packed token trees [1, t].

`packed` explains why no result depends on the packing. Importing this file imports Megatron: the caller
must have applied `engine.megatron_utils.cpu_patches` on a machine without GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.data.collate import MicroPlan
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.adapter_memory import AdapterMemory, GradientClass
from areal_lora.engine.common.arena import Range, ShardedModel
from areal_lora.engine.common.micro_batches import Readout, Result, finish
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.layers.attention import PackedMicroBatch
from areal_lora.engine.layers.expert_mlp import ActiveAdapter
from areal_lora.engine.megatron_utils.base_weights import load_base
from areal_lora.engine.megatron_utils.lora import attach, detach, take_output
from areal_lora.engine.megatron_utils.model import build_model, initialize_parallel
from areal_lora.types import ExpertLayout


def classify(memory: AdapterMemory) -> list[GradientClass]:
    """The groups over which the gradients of each range of a rank's memory must be summed.

    Split tensors are whole after the sum over their replicas, replicated ones need their tensor-parallel
    ranks' parts as well (see `lora`). The gradient of what all experts share covers this rank's experts only: its
    replicas include the expert-parallel ranks. With ``shared_outer`` these are the whole matrices, and the split ones
    are each expert's own. Each element counts once in the norm.
    """
    layout, rank = memory.model.layout, memory.rank
    dense = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
    experts = [parallel_state.get_expert_data_parallel_group()]
    first_dense, first_expert = layout.dp_rank(rank) == 0, layout.edp_rank(rank) == 0
    every = [*experts, parallel_state.get_expert_model_parallel_group()]
    first_of_all = first_expert and layout.ep_rank(rank) == 0
    shared = memory.spec.expert_layout
    split, first_split = (every, first_of_all) if shared is ExpertLayout.SHARED else (experts, first_expert)
    whole, first_whole = (experts, first_expert) if shared is ExpertLayout.PER_EXPERT else (every, first_of_all)
    tp, etp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    rows = (
        (Range.DENSE_SPLIT, dense, first_dense),
        (Range.DENSE_WHOLE, [tp, *dense], first_dense and layout.tp_rank(rank) == 0),
        (Range.EXPERT_SPLIT, split, first_split),
        (Range.EXPERT_WHOLE, [etp, *whole], first_whole and layout.etp_rank(rank) == 0),
    )
    classes = []
    for part, groups, counted in rows:
        start, end = memory.arena.extent(part)
        if end > start:
            needed = [group for group in groups if dist.get_world_size(group) > 1]
            classes.append(GradientClass(start=start, end=end, groups=needed, counted=counted))
    return classes


class MegatronModel:
    """The `Compute` of the Megatron engine."""

    def __init__(
        self,
        model: ModelConfig,
        trainer: TrainerConfig,
        sharded: ShardedModel,
        hf: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        """Join torch.distributed unless the caller has, build the model and load the base."""
        tp_group, etp_group = initialize_parallel(trainer, device)
        self.groups = {Range.DENSE_SPLIT: tp_group, Range.EXPERT_SPLIT: etp_group}
        self.active = ActiveAdapter()
        self.module: nn.Module
        self.module, self._packing = build_model(model, trainer, sharded.layout, hf, device)
        load_base(self.module, ModelFolder.of(model), sharded, dist.get_rank())
        self._output = take_output(self.module, self.active)
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self._packing.follow(self.module, self.active)

    def attach(self, memory: AdapterMemory) -> list[GradientClass]:
        """Make the adapter in ``memory`` resident."""
        attach(self.module, memory, self.active)
        if head := memory.value_head():
            assert self._output is not None, "a value head is on the last stage"
            self._output.heads[memory.spec.name] = head
        return classify(memory)

    def detach(self, name: str) -> None:
        """Forget a resident adapter (not collective)."""
        detach(self.module, name)
        if self._output:
            self._output.heads.pop(name, None)

    def run(
        self,
        batches: Iterator[PackedMicroBatch],
        plans: Sequence[MicroPlan],
        loss_fn: LossFn | None,
        readout: Readout,
        *,
        need_entropy: bool,
    ) -> list[Result]:
        """Through Megatron's pipeline schedule."""
        results: list[Result] = []
        # One forward, one backward: the last stage has differentiated a micro-batch before it computes the next one,
        # each stage before it has one more in progress.
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        later = stages - 1 - parallel_state.get_pipeline_model_parallel_rank()
        in_progress = 0 if loss_fn is None else later

        def forward_step(iterator: Iterator[PackedMicroBatch], module: nn.Module) -> tuple[Tensor, Any]:
            self._packing.keep(in_progress)
            packed = next(iterator)
            # Positions are part of the attention plan; the model's embedding takes none.
            predictions = module(packed.token_ids, None, self._packing.add(packed.attention, packed.keys))

            def judge(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                group = parallel_state.get_tensor_model_parallel_group()
                loss, sums, scores = finish(
                    packed, output[0], packed.sources, loss_fn, readout, need_entropy=need_entropy, group=group
                )
                results.append((packed.sequences, sums, scores))
                return loss, torch.ones((), dtype=torch.int32, device=output.device), {}

            return predictions, judge

        try:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=batches,
                model=self.module,
                num_microbatches=len(plans),
                seq_length=plans[0].n_tokens,
                micro_batch_size=1,
                forward_only=loss_fn is None,
            )
        finally:
            self._packing.keep(0)
        return results

"""Micro-batches through Megatron's forward-backward schedule, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from areal_lora.data.packing import MicroPlan
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.micro_batches import Result, finish
from areal_lora.engine.common.output import Readout
from areal_lora.engine.layers.packed import PackedMicroBatch
from areal_lora.engine.megatron_utils.core_attention import Packing


def run_schedule(
    model: nn.Module,
    packing: Packing,
    batches: Iterator[PackedMicroBatch],
    plans: Sequence[MicroPlan],
    loss_fn: LossFn | None,
    *,
    readout: Readout,
    need_entropy: bool,
) -> list[Result]:
    """Run every micro-batch; the results on the last stage, elsewhere nothing.

    With a ``loss_fn`` gradients of its plain sums are accumulated; without one nothing is differentiated.
    """
    results: list[Result] = []
    # One forward, one backward: the last stage has differentiated a micro-batch before it computes the next one, each
    # stage before it has one more in progress.
    ahead = parallel_state.get_pipeline_model_parallel_world_size() - parallel_state.get_pipeline_model_parallel_rank()
    in_progress = 0 if loss_fn is None else ahead - 1

    def forward_step(iterator: Iterator[PackedMicroBatch], module: nn.Module) -> tuple[Tensor, Any]:
        packing.keep(in_progress)
        packed = next(iterator)
        # Positions are part of the attention plan; the model's embedding takes none.
        predictions = module(packed.token_ids, None, packing.add(packed.attention, packed.keys))

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
            model=model,
            num_microbatches=len(plans),
            seq_length=plans[0].n_tokens,
            micro_batch_size=1,
            forward_only=loss_fn is None,
        )
    finally:
        packing.keep(0)
    return results

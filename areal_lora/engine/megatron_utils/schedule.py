"""Micro-batches through Megatron's forward-backward schedule, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from areal_lora.data.packing import MicroPlan
from areal_lora.engine.base import LossFn
from areal_lora.engine.megatron_utils.attention import Packing
from areal_lora.engine.megatron_utils.packed import Packed, to_sequences
from areal_lora.engine.megatron_utils.vocab_logprobs import vocab_logprobs

Result = tuple[Packed, Mapping[str, float | Tensor] | Tensor]


def run_schedule(
    model: nn.Module,
    packing: Packing,
    batches: Iterator[Packed],
    plans: Sequence[MicroPlan],
    loss_fn: LossFn | None,
    *,
    temperature: float,
    need_entropy: bool,
) -> list[Result]:
    """Run every micro-batch; on the last stage return (packed, stats), elsewhere nothing.

    With a ``loss_fn`` gradients of its plain sums are accumulated and stats are its sums plus
    ``loss``; without one nothing is differentiated and stats are the log-probabilities [t].
    """
    results: list[Result] = []

    def forward_step(iterator: Iterator[Packed], module: nn.Module) -> tuple[Tensor, Any]:
        packed = next(iterator)
        # Positions are part of the attention plan; the model's embedding takes none.
        output = module(packed.token_ids, None, packing.add(packed.attention))

        def finish(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, result = _finish(packed, logits, loss_fn, temperature, need_entropy)
            results.append((packed, result))
            return loss, torch.ones((), dtype=torch.int32, device=logits.device), {}

        return output, finish

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
        packing.clear()
    return results


def _finish(
    packed: Packed, logits: Tensor, loss_fn: LossFn | None, temperature: float, need_entropy: bool
) -> tuple[Tensor, Mapping[str, float | Tensor] | Tensor]:
    """Scalar to differentiate, and what to report, from logits [1, t, V / tp]."""
    group = parallel_state.get_tensor_model_parallel_group()
    chosen = logits[0].index_select(0, packed.sources)
    predicted, entropy = vocab_logprobs(chosen, packed.targets, temperature=temperature, group=group)
    logprobs = to_sequences(predicted, packed)
    if loss_fn is None:
        return logprobs.sum(), logprobs
    if packed.micro is None:
        # Padding only: the backward pass must still run, its collectives are shared with other ranks.
        return logits.sum() * 0.0, {}
    sums = loss_fn(packed.micro, logprobs, to_sequences(entropy, packed) if need_entropy else None)
    # Keep every rank's graph alive even if no token of this micro-batch is on the mask.
    return sums.loss + predicted.sum() * 0.0, {"loss": sums.loss.detach(), **sums.stats}

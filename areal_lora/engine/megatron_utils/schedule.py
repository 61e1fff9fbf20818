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
from areal_lora.engine.megatron_utils.rows import Rows, causal_mask, next_token_targets, packed_from_rows
from areal_lora.engine.megatron_utils.vocab_logprobs import vocab_logprobs

Result = tuple[Rows, Mapping[str, float | Tensor] | Tensor]


def run_schedule(
    model: nn.Module,
    batches: Iterator[Rows],
    plans: Sequence[MicroPlan],
    loss_fn: LossFn | None,
    *,
    temperature: float,
    need_entropy: bool,
) -> list[Result]:
    """Run every micro-batch; on the last stage return (rows, stats), elsewhere nothing.

    With a ``loss_fn`` gradients of its plain sums are accumulated and stats are its sums plus
    ``loss``; without one nothing is differentiated and stats are the log-probabilities [t].
    """
    results: list[Result] = []

    def forward_step(iterator: Iterator[Rows], module: nn.Module) -> tuple[Tensor, Any]:
        rows = next(iterator)
        mask = causal_mask(rows.token_ids.shape[1], rows.token_ids.device)
        output = module(rows.token_ids, rows.position_ids, mask)

        def finish(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            loss, result = _finish(rows, logits, loss_fn, temperature, need_entropy)
            results.append((rows, result))
            return loss, torch.ones((), dtype=torch.int32, device=logits.device), {}

        return output, finish

    first = plans[0]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=len(plans),
        seq_length=first.width,
        micro_batch_size=first.n_rows,
        forward_only=loss_fn is None,
    )
    return results


def _finish(
    rows: Rows, logits: Tensor, loss_fn: LossFn | None, temperature: float, need_entropy: bool
) -> tuple[Tensor, Mapping[str, float | Tensor] | Tensor]:
    """Scalar to differentiate, and what to report, from logits [b, s, V / tp]."""
    group = parallel_state.get_tensor_model_parallel_group()
    b, s = rows.token_ids.shape
    predicted, entropy = vocab_logprobs(
        logits.reshape(b * s, -1), next_token_targets(rows.token_ids).reshape(-1), temperature=temperature, group=group
    )
    logprobs = packed_from_rows(predicted.view(b, s), rows)
    if loss_fn is None:
        return logprobs.sum(), logprobs
    if rows.micro is None:
        # Padding only: the backward pass must still run, its collectives are shared with other ranks.
        return predicted.sum() * 0.0, {}
    sums = loss_fn(rows.micro, logprobs, packed_from_rows(entropy.view(b, s), rows) if need_entropy else None)
    # Keep every rank's graph alive even if no token of this micro-batch is on the mask.
    return sums.loss + predicted.sum() * 0.0, {"loss": sums.loss.detach(), **sums.stats}

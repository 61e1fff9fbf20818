"""A step with sequences that have no gradient, computed with and without their backward pass: what each rank does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lora.engine.base import LossSums
from areal_lora.types import TrainBatch
from tests.support.distributed.engine_ranks import Case, build, export_gradients, make_batch, make_rows, own_part


def loss_fn(micro: TrainBatch, logprobs: Tensor, entropy: Tensor | None) -> LossSums:
    assert micro.advantages is not None
    seen = torch.where(micro.loss_mask, logprobs.detach(), 0.0)
    stats = {"tokens": micro.loss_mask.sum().float(), "logprobs": seen.sum(), "squares": seen.square().sum()}
    return LossSums(loss=(micro.loss_mask * micro.advantages * logprobs).sum(), stats=stats)


def compared(path: str, case: Case, adapter: dict[str, np.ndarray], whole: bool) -> dict[str, Any]:
    """By whether the engine knows of them: gradients, sums, scores, and micro-batches with a backward pass and without.

    The sequences are those of every other group, or all (``whole``).
    """
    engine = build(path, case)
    engine.load_adapter("a", {name: torch.from_numpy(values) for name, values in adapter.items()})
    plain = make_batch(make_rows())
    groups = plain.group_ids.unique()
    chosen = groups if whole else groups[::2]
    zero = torch.isin(plain.group_ids, chosen)
    assert plain.advantages is not None
    advantages = plain.advantages * ~zero.repeat_interleave(plain.cu_seqlens.diff())
    run, passes, found = engine._model.run, list[tuple[int, bool]](), {}

    def counted(batches: Any, plans: Any, judge: Any, *, train: bool) -> Any:
        passes.append((len(plans), train))
        assert torch.is_grad_enabled() == train
        return run(batches, plans, judge, train=train)

    engine._model.run = counted
    for known in (False, True):
        marked = replace(plain, advantages=advantages, zero_advantage=zero if known else None)
        batch = own_part(engine, marked)
        passes.clear()
        scores = torch.zeros(batch.n_tokens)
        sums = engine.forward_backward(batch, loss_fn, scores=scores)
        grads = {name: t.numpy() for name, t in export_gradients(engine)}
        counts = {train: sum(n for n, how in passes if how == train) for train in (True, False)}
        alone = engine.logprobs(batch, adapter="a").numpy()
        found[known] = {"grads": grads, "sums": sums, "scores": scores.numpy(), "passes": counts, "alone": alone}
    return found

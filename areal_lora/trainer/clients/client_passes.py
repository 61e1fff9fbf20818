"""A client's pass as a batch of the trainer, its loss, and the answer. Faults of its data are found before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from areal_lora.algorithms.token_losses import Bounds, Targets, bounds_of, token_loss
from areal_lora.config.models import Config
from areal_lora.data.collate import HOST
from areal_lora.engine.base import LossFn, LossSums, MicroBatch, TrainEngine
from areal_lora.families.shape import ModelShape
from areal_lora.operations.protocol import Datum, Loss, Pass, PassResult
from areal_lora.types import TrainBatch

FLOATS = ("weights", "logprobs", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Tokens are below ``vocabulary``, sequences have at most ``longest`` of them."""

    vocabulary: int
    longest: int

    @classmethod
    def of(cls, config: Config, shape: ModelShape) -> Limits:
        longest = config.trainer.max_tokens_per_microbatch
        return cls(vocabulary=shape.vocab, longest=min(longest, shape.max_positions or longest))


def problem(request: Pass, limits: Limits) -> str:
    """Why the pass cannot be computed; empty if it can."""
    if not request.data:
        return "a pass without data"
    settings = request.settings
    given = [x for x in (settings.clip_low, settings.clip_high, settings.beta) if x is not None]
    if not all(np.isfinite(given)) or any(x < 0 for x in given):
        return "a setting of the loss is negative or not finite"
    bounds = bounds_of(request.loss, settings)
    if bounds.low > bounds.high:
        return f"the lower bound {bounds.low:g} of the ratio is above the upper one {bounds.high:g}"
    for number, datum in enumerate(request.data):
        if wrong := _wrong(datum, request.loss, limits):
            return f"datum {number}: {wrong}"
    return ""


def _wrong(datum: Datum, loss: Loss, limits: Limits) -> str:
    if len(datum.tokens) % 4 or any(len(getattr(datum, name)) % 4 for name in FLOATS):
        return "an array is cut off"
    tokens = np.frombuffer(datum.tokens, "<i4")
    if not 2 <= len(tokens) <= limits.longest:
        return f"{len(tokens)} tokens, between 2 and {limits.longest} are possible"
    if tokens.min() < 0 or tokens.max() >= limits.vocabulary:
        return f"token {int(tokens.min()) if tokens.min() < 0 else int(tokens.max())} is not in the vocabulary"
    for name in FLOATS:
        values = np.frombuffer(getattr(datum, name), "<f4")
        needed = name == "weights" or loss is not Loss.CROSS_ENTROPY
        if needed and len(values) != len(tokens) - 1:
            return f"{len(values)} {name} for {len(tokens) - 1} targets"
        if not np.isfinite(values).all():
            return f"{name} that are not finite"
    return ""


def batch_of(request: Pass, adapter: str) -> TrainBatch:
    """The data in their order. Entry t of every array refers to token t, so that the arrays start with a 0."""
    tokens = [np.frombuffer(datum.tokens, "<i4").astype(np.int64) for datum in request.data]
    lengths = torch.tensor([0, *map(len, tokens)], device=HOST)
    weights = _packed([datum.weights for datum in request.data])
    sampled = request.loss is not Loss.CROSS_ENTROPY
    zeros = torch.zeros_like(weights)
    n = len(tokens)
    mask = weights != 0
    return TrainBatch(
        token_ids=torch.from_numpy(np.concatenate(tokens)),
        cu_seqlens=lengths.cumsum(0),
        loss_mask=mask,
        rollout_logprobs=_packed([datum.logprobs for datum in request.data]) if sampled else zeros,
        versions=torch.where(mask, 0, -1),
        rewards=torch.zeros(n, device=HOST),
        group_ids=torch.arange(n, device=HOST),
        sample_ids=torch.arange(n, device=HOST),
        given=torch.zeros(n, dtype=torch.bool, device=HOST),
        adapters=(adapter,) * n,
        advantages=_packed([datum.advantages for datum in request.data]) if sampled else zeros,
        weights=weights,
    )


def _packed(rows: Sequence[bytes]) -> Tensor:
    """[T] fp32 of arrays that lack the entry of each first token."""
    first = np.zeros(1, np.float32)
    return torch.from_numpy(np.concatenate([part for row in rows for part in (first, np.frombuffer(row, "<f4"))]))


def make_loss(loss: Loss, bounds: Bounds) -> LossFn:
    def sums(micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None) -> LossSums:
        assert micro.advantages is not None
        assert micro.weights is not None
        targets = Targets(
            logprobs=logprobs,
            sampled=micro.rollout_logprobs,
            advantages=micro.advantages,
            weights=micro.weights,
            cu_seqlens=micro.cu_seqlens,
        )
        return LossSums(loss=token_loss(loss, bounds, targets))

    return sums


def carry_out(engine: TrainEngine, request: Pass, adapter: str) -> PassResult:
    """Compute a pass that has no `problem`; with ``backward`` its gradients are added to the adapter's. Collective."""
    batch = batch_of(request, adapter)
    loss_fn = make_loss(request.loss, bounds_of(request.loss, request.settings))
    if request.backward:
        scores = torch.zeros(batch.n_tokens, device=HOST)
        loss = engine.forward_backward(batch, loss_fn, scores=scores)["loss"]
    else:
        scores = engine.logprobs(batch, adapter=adapter)
        loss = float(loss_fn(batch, scores, None).loss)
    flat = scores.numpy().astype("<f4")
    rows = (flat[a + 1 : b].tobytes() for a, b in pairwise(batch.cu_seqlens.tolist()))
    return PassResult(logprobs=tuple(rows), loss=loss)

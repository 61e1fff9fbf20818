"""A critic's part of a training step: one optimizer step on each minibatch, on values and returns of `annotate`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from areal_lora.algorithms.losses import value_loss
from areal_lora.algorithms.reduce import Reduction, denominator, spread, token_weights
from areal_lora.algorithms.registry import CriticTerms
from areal_lora.engine.base import LossFn, LossSums, MicroBatch, TrainEngine
from areal_lora.trainer.adapter import Adapter
from areal_lora.trainer.companions import critic_of
from areal_lora.types import TrainBatch


def make_value_loss(terms: CriticTerms, reduction: Reduction) -> LossFn:
    """Build the critic's objective for the engine. Given answers have no share in it."""

    def loss(micro: MicroBatch, values: Tensor, entropy: Tensor | None) -> LossSums:
        assert micro.values is not None, "annotate() comes before learning"
        assert micro.returns is not None, "annotate() comes before learning"
        sums = value_loss(
            terms.clip,
            values=values,
            before=micro.values,
            returns=micro.returns,
            weights=token_weights(_sampled(micro), micro.cu_seqlens, reduction),
        )
        return LossSums(loss=sums.loss, stats=sums.stats)

    return loss


def improve(engine: TrainEngine, adapter: Adapter, minibatch: TrainBatch, lr: float) -> dict[str, float]:
    """Take one optimizer step of the adapter's critic, if it has one. Collective. Returns sums, see `value_loss`.

    ``lr`` is the policy's. Without a sampled token nothing happens: momentum alone would move the critic.
    """
    critic, terms, config = critic_of(adapter), adapter.algorithm.critic, adapter.config
    sampled = _sampled(minibatch)
    if critic is None or terms is None or not bool(sampled.any()):
        return {}
    reduction = config.algorithm.reduction
    own = replace(minibatch, adapters=(critic.name,) * minibatch.n_sequences)
    sums = engine.forward_backward(own, make_value_loss(terms, reduction))
    n_sequences = int((~minibatch.given).sum())
    divisor = denominator(sampled, n_sequences, reduction, config.sampling.max_new_tokens)
    stats = engine.optim_step(critic.name, divisor, lr * critic.rate).values
    named = {name: value for name, value in sums.items() if name != "loss"}
    return named | {"value_steps": 1.0, "value_grad_norms": stats["grad_norm"], "value_skipped": stats["skipped"]}


def _sampled(batch: TrainBatch) -> Tensor:
    """[T] bool: the mask without given answers."""
    return batch.loss_mask & ~spread(batch.given, batch.cu_seqlens)

"""What each rank of a test of clients' operations does: passes and steps on real engines, and digests of the result."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from areal_lora.algorithms.token_losses import Targets, bounds_of, token_loss
from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.base import AdamValues, LossSums, MicroBatch
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.operations.protocol import Datum, Loss, LossSettings, Pass
from areal_lora.trainer.clients.client_passes import batch_of, carry_out
from tests.support.distributed.engine_ranks import Case, build, make_rows, make_spec
from tests.support.operations.client import datum, floats

ADAM = OptimizerConfig(lr=1.0, eps=1e-6, weight_decay=0.01, max_grad_norm=0.05)
VALUES = AdamValues.of(ADAM)
UNCLIPPED = AdamValues(beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, max_grad_norm=None)
OTHER = OptimizerConfig(lr=1.0, eps=1.0, max_grad_norm=1e-9)
STEPS = 8
VOCABULARY = 40
RATE = 0.02
DEFAULTS = LossSettings()


def data() -> tuple[Datum, ...]:
    """Sequences of many lengths with random arrays; a third of the weights is 0."""
    generator = torch.Generator().manual_seed(21)
    found = []
    for row in ([token % VOCABULARY for token in text] for text in make_rows()):
        n = len(row) - 1
        weights = torch.rand(n, generator=generator) * (torch.rand(n, generator=generator) > 0.33)
        sampled, advantages = -3 * torch.rand(n, generator=generator), torch.randn(n, generator=generator)
        found.append(datum(row, weights.tolist(), sampled.tolist(), advantages.tolist()))
    return tuple(found)


def digest(engine: AdapterEngine, adapter: str) -> str:
    """Of this rank's weights, moments and clock."""
    flats = [engine.resident(adapter).memory.weights, *engine.resident(adapter).trained().moments.values()]
    raw = b"".join(flat.numpy().tobytes() for flat in flats)
    return hashlib.sha256(raw + str(engine.resident(adapter).trained().step_count).encode()).hexdigest()


def weights(engine: AdapterEngine, adapter: str) -> Any:
    return engine.resident(adapter).memory.weights.clone().numpy()


def by_hand(loss: Loss, settings: LossSettings = DEFAULTS) -> Any:
    """An engine's loss that is written out here."""

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
        return LossSums(loss=token_loss(loss, bounds_of(loss, settings), targets))

    return sums


def exercise(path: str, case: Case) -> dict[str, Any]:
    engine = build(path, case)
    for name, config in (("ops", OTHER), ("plain", ADAM), ("whole", ADAM), ("chunks", ADAM)):
        engine.add_adapter(make_spec(name, path, case), config, seed=4)
    every, found = data(), dict[str, Any]()
    neighbour = digest(engine, "a")
    losses = list(Loss)
    for step in range(STEPS):
        asked = Pass(data=every, loss=losses[step % len(losses)])
        scored = carry_out(engine, {"ops": asked})["ops"]
        engine.optim_step("ops", 1.0, RATE, VALUES)
        engine.forward_backward(batch_of({"plain": asked}), by_hand(asked.loss))
        engine.optim_step("plain", 1.0, RATE)
    found["ops"], found["plain"] = digest(engine, "ops"), digest(engine, "plain")
    found["neighbour"] = (neighbour, digest(engine, "a"))

    # A pass whose gradients are forgotten; then the window continues as if it had not been.
    before = digest(engine, "ops")
    carry_out(engine, {"ops": Pass(data=every, loss=Loss.PPO)})["ops"]
    engine.discard_gradients("ops")
    found["poisoned"] = (before, digest(engine, "ops"))
    for name in ("ops", "plain"):
        carry_out(engine, {name: Pass(data=every[:3], loss=Loss.DRO)})[name]
        engine.optim_step(name, 1.0, RATE, UNCLIPPED)
    found["after"] = (digest(engine, "ops"), digest(engine, "plain"))

    # Chunks, and scores of a training pass beside those of a scoring pass.
    carry_out(engine, {"whole": Pass(data=every, loss=Loss.CROSS_ENTROPY)})["whole"]
    chunks = [every[:4], every[4:5], every[5:]]
    parts = [carry_out(engine, {"chunks": Pass(data=chunk, loss=Loss.CROSS_ENTROPY)})["chunks"] for chunk in chunks]
    for name in ("whole", "chunks"):
        engine.optim_step(name, 1.0, RATE, UNCLIPPED)
    found["whole"], found["chunks"] = weights(engine, "whole"), weights(engine, "chunks")
    score = Pass(data=every, loss=Loss.DRO, backward=False)
    looked, learned = carry_out(engine, {"plain": score})["plain"], carry_out(engine, {"plain": Pass(data=every, loss=Loss.DRO)})["plain"]
    found["scores"] = tuple([floats(row) for row in scored.logprobs] for scored in (looked, learned))
    found["losses"] = (looked.loss, learned.loss)
    alone = engine.logprobs(batch_of({"plain": score}), adapter="plain")
    found["alone"] = alone.tolist()
    found["parts"] = sum(part.loss for part in parts)
    found["last"] = scored.loss
    return found

"""What each rank of a test of clients' operations does: passes and steps on real engines, and digests of the result."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from areal_lora.algorithms.token_losses import Targets, bounds_of, token_loss
from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.base import AdamValues, LossSums, MicroBatch
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.operations.protocol import Datum, Loss, LossSettings, Pass
from areal_lora.trainer.clients.client_passes import batch_of, carry_out
from tests.support.distributed.engine_ranks import Case, build, export_gradients, make_rows, make_spec, numpy_of
from tests.support.operations.client import datum, floats

ADAM = OptimizerConfig(lr=1.0, weight_decay=0.01, max_grad_norm=0.05)
VALUES = AdamValues.of(ADAM)
UNCLIPPED = AdamValues(beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, max_grad_norm=None)
OTHER = OptimizerConfig(lr=1.0, max_grad_norm=1e-9)
STEPS = len(Loss)
VOCABULARY = 40
RATE = 0.02
DEFAULTS = LossSettings()


def data() -> tuple[Datum, ...]:
    """Sequences of many lengths with random arrays; a third of the weights is 0."""
    generator = torch.Generator().manual_seed(21)
    found = []
    for row in ([token % VOCABULARY for token in text] for text in make_rows()[:9]):
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


def joined(engine: AdapterEngine, path: str, case: Case) -> list[dict[str, Any]]:
    """Of three adapters in one pass, and in passes of their own: scores, loss and gradients of each.

    They have different ranks, layers, dropout and losses; one has a single sequence, which one data-parallel rank has.
    """
    every = data()
    asked = {
        "x": Pass(data=every[:6], loss=Loss.PPO),
        "y": Pass(data=every[6:7], loss=Loss.CROSS_ENTROPY),
        "z": Pass(data=every[7:], loss=Loss.DRO),
    }
    plain = {"rank_pattern": (), "alpha_pattern": ()}
    specs = (
        replace(make_spec("x", path, case), dropout=0.4),
        replace(make_spec("y", path, case, ("linear_qkv",)), rank=3, dropout=0.2, **plain),
        replace(make_spec("z", path, case, ("linear_proj", "linear_fc1")), rank=5, **plain),
    )
    draw = torch.Generator().manual_seed(8)
    for seed, spec in enumerate(specs):
        engine.add_adapter(spec, ADAM, seed=seed)
        tensors = (t for shard in engine.adapter_layout(spec.name).shards for t in shard.tensors)
        engine.load_adapter(spec.name, {t.name: torch.randn(t.shape, generator=draw) / 8 for t in tensors})
    found = []
    for groups in ([asked], [{name: request} for name, request in asked.items()]):
        learned = {name: one for group in groups for name, one in carry_out(engine, group).items()}
        looks = ({name: without_gradients(one) for name, one in group.items()} for group in groups)
        looked = {name: one for group in looks for name, one in carry_out(engine, group).items()}
        found.append(
            {
                name: {
                    "scores": [floats(row) for row in learned[name].logprobs],
                    "looks": [floats(row) for row in looked[name].logprobs],
                    "losses": (learned[name].loss, looked[name].loss),
                    "gradients": numpy_of(export_gradients(engine, name)),
                }
                for name in asked
            }
        )
    return found


def without_gradients(request: Pass) -> Pass:
    """The same without gradients."""
    return structs.replace(request, backward=False)


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
    carry_out(engine, {"ops": Pass(data=every, loss=Loss.PPO)})
    engine.discard_gradients("ops")
    found["poisoned"] = (before, digest(engine, "ops"))
    for name in ("ops", "plain"):
        carry_out(engine, {name: Pass(data=every[:3], loss=Loss.DRO)})
        engine.optim_step(name, 1.0, RATE, UNCLIPPED)
    found["after"] = (digest(engine, "ops"), digest(engine, "plain"))

    # Chunks, and scores of a training pass beside those of a scoring pass.
    carry_out(engine, {"whole": Pass(data=every, loss=Loss.CROSS_ENTROPY)})
    chunks = [every[:4], every[4:5], every[5:]]
    parts = [carry_out(engine, {"chunks": Pass(data=chunk, loss=Loss.CROSS_ENTROPY)})["chunks"] for chunk in chunks]
    for name in ("whole", "chunks"):
        engine.optim_step(name, 1.0, RATE, UNCLIPPED)
    found["whole"], found["chunks"] = weights(engine, "whole"), weights(engine, "chunks")
    score = Pass(data=every, loss=Loss.DRO, backward=False)
    looked, learned = (
        carry_out(engine, {"plain": asked})["plain"] for asked in (score, Pass(data=every, loss=Loss.DRO))
    )
    found["scores"] = tuple([floats(row) for row in scored.logprobs] for scored in (looked, learned))
    found["losses"] = (looked.loss, learned.loss)
    alone = engine.logprobs(batch_of({"plain": score}), adapter="plain")
    found["alone"] = alone.tolist()
    found["parts"] = sum(part.loss for part in parts)
    found["last"] = scored.loss
    found["together"], found["by_itself"] = joined(engine, path, case)
    return found

"""The steps of an SDK program on an engine, by its verbs alone, beside the states that the program has saved."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from areal_lora.config.recorded import read_config
from areal_lora.engine.base import AdamValues
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.operations.protocol import LoadState, Loss, LossSettings, Pass
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.clients.client_passes import batch_of, load_saved
from areal_lora.types import AdapterSpec
from tests.support.distributed.engine_ranks import OPTIMIZER
from tests.support.distributed.operations_ranks import by_hand, digest
from tests.support.operations.client import datum
from tests.support.solo_exchange import SoloExchange
from tests.support.tinker.offline import LOSS_RATE, LOSSES, advantages, sampler_scores

ADAM = AdamValues(beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, max_grad_norm=None)
SEED = 5


SETTINGS = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high", "beta": "beta"}


def sdk_and_engine(
    run_folder: Path, saved: tuple[str, str], branched: tuple[str, str], texts: list[str], rate: float, steps: int
) -> tuple[list[float], list[float], list[str]]:
    """Losses of the engine's own steps, on texts and then of other losses from there with new moments; digests of
    weights, moments and clock: the engine's and those ``saved``, the engine's and those ``branched``.
    """
    folder = RunFolder.of(run_folder)
    config = read_config(folder)
    assert config.service is not None
    engine = MegatronEngine(config.model, config.trainer, torch.device("cpu"))
    for name in ("engine", "sdk", "branch", "sdk branch"):
        targets = tuple(config.service.target_modules)
        spec = AdapterSpec(name=name, base_model=config.model.path, rank=4, alpha=32.0, target_modules=targets)
        engine.add_adapter(spec, OPTIMIZER, seed=SEED)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows = [tokenizer.encode(text) for text in texts]
    data = Pass(data=tuple(datum(row, [1.0] * (len(row) - 1)) for row in rows), loss=Loss.CROSS_ENTROPY)
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(batch_of({"engine": data}), by_hand(Loss.CROSS_ENTROPY))["loss"])
        engine.optim_step("engine", 1.0, rate, ADAM)
    solo = SoloExchange()
    load_saved(engine, folder, LoadState(adapter=saved[0], label=saved[1], optimizer=True), "sdk", solo)
    load_saved(engine, folder, LoadState(adapter=saved[0], label=saved[1], optimizer=False), "branch", solo)
    load_saved(engine, folder, LoadState(adapter=branched[0], label=branched[1], optimizer=True), "sdk branch", solo)
    lengths = [len(row) - 1 for row in rows]
    sampled = [datum(row, [1.0] * n, sampler_scores(n), advantages(n)) for row, n in zip(rows, lengths, strict=True)]
    others = []
    for text, given in LOSSES:
        loss, settings = Loss(text), LossSettings(**{SETTINGS[key]: value for key, value in given.items()})
        asked = Pass(data=tuple(sampled), loss=loss, settings=settings)
        others.append(engine.forward_backward(batch_of({"branch": asked}), by_hand(loss, settings))["loss"])
        engine.optim_step("branch", 1.0, LOSS_RATE, ADAM)
    return losses, others, [digest(engine, name) for name in ("engine", "sdk", "branch", "sdk branch")]

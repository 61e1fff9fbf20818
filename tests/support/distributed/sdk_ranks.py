"""The eight steps of an SDK program on an engine, by its verbs alone, beside the state that the program has saved."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from areal_lora.config.recorded import read_config
from areal_lora.engine.base import AdamValues
from areal_lora.engine.megatron_engine import MegatronEngine
from areal_lora.operations.messages import LoadState, Loss, Pass
from areal_lora.run_folder.paths import RunFolder
from areal_lora.trainer.passes import batch_of
from areal_lora.trainer.saved_states import load_saved
from areal_lora.types import AdapterSpec
from tests.support.distributed.engine_ranks import OPTIMIZER
from tests.support.distributed.operations_ranks import by_hand, digest
from tests.support.operations.client import datum

ADAM = AdamValues(beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, max_grad_norm=None)
SEED = 5


def sdk_and_engine(
    run_folder: Path, adapter: str, label: str, texts: list[str], rate: float, steps: int
) -> tuple[list[float], str, str]:
    """Losses of the engine's own steps; digests of its weights, moments and clock, and of those saved."""
    folder = RunFolder.of(run_folder)
    config = read_config(folder)
    assert config.service is not None
    engine = MegatronEngine(config.model, config.trainer, torch.device("cpu"))
    for name in ("engine", "sdk"):
        targets = tuple(config.service.target_modules)
        spec = AdapterSpec(name=name, base_model=config.model.path, rank=4, alpha=32.0, target_modules=targets)
        engine.add_adapter(spec, OPTIMIZER, seed=SEED)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows = [tokenizer.encode(text) for text in texts]
    data = Pass(data=tuple(datum(row, [1.0] * (len(row) - 1)) for row in rows), loss=Loss.CROSS_ENTROPY)
    losses = []
    for _ in range(steps):
        losses.append(engine.forward_backward(batch_of(data, "engine"), by_hand(Loss.CROSS_ENTROPY))["loss"])
        engine.optim_step("engine", 1.0, rate, ADAM)
    load_saved(engine, folder, LoadState(adapter=adapter, label=label, optimizer=True), "sdk")
    return losses, digest(engine, "engine"), digest(engine, "sdk")

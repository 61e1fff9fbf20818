"""One trainer rank scores and differentiates the tiny model: ``python -m tests.support.gpu.engines ... FILE``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.config.sections.run import Recompute
from areal_lora.platforms.device import collective_of, own_device
from areal_lora.types import AdapterSpec
from tests.support.distributed.engine_ranks import TARGETS, TEMPERATURE, loss_fn, make_batch, make_rows
from tests.support.paths import EXAMPLES

RANK = 8


def alone(
    folder: Path, engine: str, dtype: str, recompute: Recompute, device: str, python: str | Path = sys.executable
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and gradient of a random adapter, from a process of its own: engines keep global state."""
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    file = folder / f"{engine}-{dtype}-{recompute}.npz"
    command = [python, "-m", __name__, engine, dtype, recompute, device, str(file)]
    subprocess.run(command, env=os.environ | world, check=True, timeout=280)
    with np.load(file) as found:
        return found["logprobs"], found["gradient"]


def main(engine_name: str, dtype: str, recompute: Recompute, kind: str, file: str) -> None:
    device = own_device(kind, 0)
    store = f"file://{file}.store"  # it needs no port
    dist.init_process_group(collective_of(device), init_method=store, rank=0, world_size=1)
    trainer = TrainerConfig(engine=engine_name, world_size=1, max_tokens_per_microbatch=256, recompute=recompute)
    from areal_lora.engine.fsdp_engine import FsdpEngine
    from areal_lora.engine.megatron_engine import MegatronEngine

    kind = {"megatron": MegatronEngine, "fsdp": FsdpEngine}[engine_name]
    engine = kind(ModelConfig(path=str(EXAMPLES / "tiny_model"), dtype=dtype), trainer, device)
    spec = AdapterSpec(name="a", base_model="tiny", rank=RANK, alpha=RANK, target_modules=TARGETS)
    engine.add_adapter(spec, OptimizerConfig(lr=1e-3), 1)
    generator = torch.Generator().manual_seed(7)
    tensors = dict(engine.export_adapter("a"))
    for name, tensor in tensors.items():
        tensors[name] = 0.05 * torch.randn(tensor.shape, generator=generator)
    engine.load_adapter("a", tensors)
    vocabulary = 40  # of the tiny model's characters
    batch = make_batch([[token % vocabulary for token in row] for row in make_rows()])
    logprobs = engine.logprobs(batch, temperature=TEMPERATURE, adapter="a")
    engine.forward_backward(batch, loss_fn, temperature=TEMPERATURE, need_entropy=True)
    gradient = engine.resident("a").memory.grads
    np.savez(file, logprobs=logprobs.cpu().numpy(), gradient=gradient.cpu().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])

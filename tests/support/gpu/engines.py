"""One trainer rank scores and differentiates the tiny model: ``python -m tests.support.gpu.engines ... FILE``.

Every token goes to all experts: where two are equally good, rounding chooses, and moves a token's log-probability by
whole nats. Rows are problems with their answers: of random tokens each logit is large, and so is its rounding.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.config.sections.run import Recompute
from areal_lora.platforms.device import collective_of, own_device
from areal_lora.tasks.word_problems import word_problem
from areal_lora.types import AdapterSpec
from tests.support.distributed.engine_ranks import TARGETS, loss_fn, make_batch
from tests.support.paths import EXAMPLES

RANK, STD, LR = 8, 0.04, 1e-3
LIMITS = (0.008, 1.2e-3)
"""Of bfloat16 against float32: mean difference of log-probabilities (nats), and 1 - cosine of the gradients.

CPUs gave 0.0037 and 4.9e-4 with Megatron, 0.0039 and 5.0e-4 with FSDP; with one expert's adapter zero 0.005 and 3.1e-3,
of another version 0.031 and 1.7e-2. Each limit is twice what is right; each fault passes one of them twice over.
"""
RIGHT, FAULTS = "right", ("one expert zero", "another version")


def evened(model: Path, folder: Path) -> Path:
    """A copy of a mixture in ``folder`` whose tokens all go to all experts."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": config["num_local_experts"]}))
    return folder


def alone(
    folder: Path,
    engine: str,
    dtype: str,
    recompute: Recompute,
    device: str,
    python: str | Path = sys.executable,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Log-probabilities of trained tokens and gradient of a random adapter, and of the same with each of the `FAULTS`.

    From a process of its own: engines keep global state.
    """
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    model, file = folder / "even", folder / f"{engine}-{dtype}-{recompute}.npz"
    if not model.exists():
        evened(EXAMPLES / "tiny_model", model)
    command = [python, "-m", __name__, str(model), engine, dtype, recompute, device, str(file)]
    subprocess.run(command, env={**environment, **world}, check=True, timeout=280)
    with np.load(file) as found:
        return {name: (found[f"{name} logprobs"], found[f"{name} gradient"]) for name in (RIGHT, *FAULTS)}


def differences(
    found: dict[str, tuple[np.ndarray, np.ndarray]], exact: dict[str, tuple[np.ndarray, np.ndarray]]
) -> dict[str, tuple[float, float]]:
    """What `LIMITS` are for, of each adapter in ``found`` from the right one in ``exact``."""
    logprobs, truth = exact[RIGHT]
    made = {}
    for name, (logp, grad) in found.items():
        cosine = np.dot(grad, truth) / np.linalg.norm(grad) / np.linalg.norm(truth)
        made[name] = float(np.abs(logp - logprobs).mean()), float(1 - cosine)
    return made


def judge(differing: dict[str, tuple[float, float]]) -> None:
    """The right adapter is within both `LIMITS`, and each fault twice as far away as one of them."""
    shares = {name: max(np.divide(both, LIMITS)) for name, both in differing.items()}
    assert shares[RIGHT] <= 1, differing
    assert all(shares[fault] >= 2 for fault in FAULTS), differing


def main(model: str, engine_name: str, dtype: str, recompute: Recompute, kind: str, file: str) -> None:
    device = own_device(kind, 0)
    store = f"file://{file}.store"  # it needs no port
    dist.init_process_group(collective_of(device), init_method=store, rank=0, world_size=1)
    trainer = TrainerConfig(engine=engine_name, world_size=1, max_tokens_per_microbatch=256, recompute=recompute)
    from transformers import AutoTokenizer

    from areal_lora.engine.fsdp_engine import FsdpEngine
    from areal_lora.engine.megatron_engine import MegatronEngine

    kind = {"megatron": MegatronEngine, "fsdp": FsdpEngine}[engine_name]
    engine = kind(ModelConfig(path=model, dtype=dtype), trainer, device)
    spec = AdapterSpec(name="a", base_model="tiny", rank=RANK, alpha=RANK, target_modules=TARGETS)
    engine.add_adapter(spec, OptimizerConfig(lr=LR), 1)
    generator = torch.Generator().manual_seed(7)
    drawn = {n: STD * torch.randn(t.shape, generator=generator) for n, t in engine.export_adapter("a")}
    zeroed = {n: t * (".experts.3." not in n or "lora_B" not in n) for n, t in drawn.items()}
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"{it.prompt}{it.answer}" for it in (word_problem(0, "eval", i) for i in range(12))]
    batch = make_batch([tokenizer(text)["input_ids"] for text in texts])
    found: dict[str, np.ndarray] = {}
    waits, run = Counter[str](), engine._model.run

    def counted(*args: Any, **known: Any) -> Any:
        """What the host waits for in the passes over micro-batches, on an emulated device."""
        before = counts()
        results = run(*args, **known)
        waits.update({name: n for name, n in (counts() - before).items() if name.startswith("waits")})
        return results

    def look(name: str) -> None:
        found[f"{name} logprobs"] = engine.logprobs(batch, adapter="a")[batch.loss_mask].double().cpu().numpy()
        engine.forward_backward(batch, loss_fn, need_entropy=True)
        found[f"{name} gradient"] = engine.resident("a").memory.grads.double().cpu().numpy()

    engine.load_adapter("a", zeroed)
    look(FAULTS[0])
    if os.environ.get("EMULATED"):  # from here on: the first passes make tables
        from tests.support.gpu.emulated.cuda import counts

        engine._model.run = counted
    engine.discard_gradients("a")
    engine.load_adapter("a", drawn)
    look(RIGHT)
    engine.optim_step("a", float(batch.loss_mask.sum()), LR)
    look(FAULTS[1])
    assert not waits, waits
    np.savez(file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

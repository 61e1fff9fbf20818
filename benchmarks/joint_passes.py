"""One training pass of several clients' adapters against a pass of each; every client has one datum.

    python benchmarks/joint_passes.py [--clients 8] [--tokens 64]

Launches of a layer, forward and backward: a slice of Qwen3-30B-A3B on torch's ``meta`` device (`real_sizes`). CPU
seconds: the tiny model, FSDP engine, one rank, one thread; the median of rounds, in which both take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from real_sizes import measure, total
from size_slices import QWEN3_30B, RANK, TARGETS, Case

from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.base import LossSums, MicroBatch
from areal_lora.engine.fsdp_engine import FsdpEngine
from areal_lora.types import AdapterSpec, TrainBatch

TINY = Path(__file__).resolve().parents[1] / "examples" / "math" / "tiny_model"
VOCABULARY, ROUNDS, WARM_UP = 40, 15, 2


def batch_of(names: list[str], tokens: int) -> TrainBatch:
    """A sequence of each adapter, in a group of its own."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (len(names), tokens), generator=draw).tolist()
    return replace(scoring_batch(rows, ""), adapters=tuple(names), group_ids=torch.arange(len(names)))


def launches(names: list[str], tokens: int) -> int:
    case = Case(name="", model=QWEN3_30B, prompt=0, answers=(tokens,) * len(names), adapters=tuple(names))
    one, two = (total(measure(case, layers), "launches") for layers in (1, 2))
    return two - one


def summed(micro: MicroBatch, logprobs: torch.Tensor, _: object) -> LossSums:
    return LossSums(loss=logprobs.sum())


def cpu_seconds(engine: FsdpEngine, passes: list[list[str]], tokens: int) -> float:
    began = time.process_time()
    for names in passes:
        batch = batch_of(names, tokens)
        engine.forward_backward_of_each(batch, dict.fromkeys(names, summed), scores=torch.zeros(batch.n_tokens))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    chosen = parser.parse_args()
    names = [f"client-{i}" for i in range(chosen.clients)]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, trainer = ModelConfig(path=str(TINY), dtype="float32"), TrainerConfig(engine="fsdp", world_size=1)
    engine = FsdpEngine(model, trainer, torch.device("cpu"))
    for name in names:
        spec = AdapterSpec(name=name, base_model="m", rank=RANK, alpha=RANK, target_modules=TARGETS)
        engine.add_adapter(spec, OptimizerConfig(lr=0.1), seed=1)
    kinds = {"joint": [names], "one by one": [[name] for name in names]}
    rounds = [{kind: cpu_seconds(engine, kinds[kind], chosen.tokens) for kind in kinds} for _ in range(ROUNDS)][
        WARM_UP:
    ]
    print(f"{chosen.clients} clients, {chosen.tokens} tokens each: launches of a layer, CPU ms of the tiny model")
    for kind, passes in kinds.items():
        total = launches(passes[0], chosen.tokens) * len(passes)
        print(f"{kind:12}{total:8}{1e3 * statistics.median(row[kind] for row in rounds):10.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Peak memory of an FSDP rank against its shard and one layer: a random Llama of 24 layers on two gloo ranks.

    python benchmarks/fsdp_memory.py [--layers 24] [--ranks 2] [--hidden 512]

A model with hardly any weights shows what the process itself needs: modules, hooks, imports of the first pass. Private
memory (anonymous pages) is sampled every millisecond: while the base is loaded, and in a forward and backward
pass of a batch so small that activations do not count.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# glibc would keep freed tensors: the question is what is alive.
os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.table import Table

MIB = 2**20
VOCABULARY, HEADS = 512, 8
LEAST_HIDDEN = 64
PAGE = os.sysconf("SC_PAGE_SIZE")


def private_bytes() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(resident) - int(shared)) * PAGE


class Peak:
    """The highest private memory while the block runs."""

    def __enter__(self) -> Peak:
        self.value, self._over = private_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.value = max(self.value, private_bytes())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def one_rank(path: str, ranks: int) -> dict[str, float]:
    from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
    from areal_lora.data.collate import scoring_batch
    from areal_lora.engine.base import LossSums
    from areal_lora.engine.fsdp_engine import FsdpEngine
    from areal_lora.types import AdapterSpec

    before = private_bytes()
    trainer = TrainerConfig(engine="fsdp", world_size=ranks, recompute="full")
    with Peak() as loading:
        engine = FsdpEngine(ModelConfig(path=path, dtype="float32"), trainer, torch.device("cpu"))
    spec = AdapterSpec(name="a", base_model=path, rank=1, alpha=1.0, target_modules=("linear_proj",))
    engine.add_adapter(spec, OptimizerConfig(lr=0.1), seed=1)
    batch = scoring_batch([[1, 2, 3, 4]] * ranks, "a")
    with Peak() as training:
        for _ in range(3):
            engine.forward_backward(batch, lambda _, logprobs, __: LossSums(loss=logprobs.sum()))
    return {"loading": loading.value - before, "training": training.value - before}


def write_model(folder: Path, layers: int, hidden: int) -> str:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=HEADS,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return str(folder / "model")


def peaks(layers: int, hidden: int, ranks: int) -> dict[str, float]:
    """Bytes of the rank that needs most, by phase."""
    from tests.support.distributed.spawn import run_ranks

    with tempfile.TemporaryDirectory() as name:
        path = write_model(Path(name), layers, hidden)
        seen: list[Any] = run_ranks(one_rank, ranks, Path(name), (path, ranks), timeout_s=300.0)
    return {phase: max(rank[phase] for rank in seen) for phase in ("loading", "training")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    chosen = parser.parse_args()
    began = time.monotonic()
    h, v = chosen.hidden, VOCABULARY
    layer = 4 * (4 * h * h + 3 * h * 4 * h + 2 * h)
    shard = (chosen.layers * layer + 4 * (2 * v * h + h)) / chosen.ranks
    rows = {"shard": shard, "shard + one layer": shard + layer}
    rows |= {f"peak, {phase}": n for phase, n in peaks(chosen.layers, h, chosen.ranks).items()}
    rows["peak, training, without weights"] = peaks(chosen.layers, LEAST_HIDDEN, chosen.ranks)["training"]
    title = f"{chosen.layers} layers of {layer / MIB:.0f} MiB, {chosen.ranks} ranks"
    table = Table("MiB of a rank", "bytes", "of shard + one layer", title=title)
    for what, value in rows.items():
        table.add_row(what, f"{value / MIB:,.0f}", f"{value / (shard + layer):.3f}")
    Console().print(table, f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

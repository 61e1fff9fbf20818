"""Start of trainer ranks with and without `model.shared_memory`: bytes read from disk and seconds to load the base.

    python benchmarks/base_reading.py [--gib 1.0] [--ranks 2 4] [--repeats 3] [--engine fsdp | megatron]

A random Llama in files of 128 MB. Before each start the kernel forgets the files, so every byte comes from the disk;
the variants alternate. A second start without forgetting (page cache or shared memory) is measured as well.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console
from rich.table import Table

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "vocab_size": 512}
LAYER_BYTES = 4 * (4 * 1024 * 1024 + 3 * 1024 * 4096)
RANK = """
import os, sys, time
import torch
import torch.distributed as dist
from areal_lora.config.models import ModelConfig, TrainerConfig
path, engine, world, shared, store = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "True", sys.argv[5]
if engine == "fsdp":
    from areal_lora.engine.fsdp_engine import FsdpEngine as Engine
else:
    from areal_lora.engine.megatron_utils import cpu_patches
    from areal_lora.engine.megatron_engine import MegatronEngine as Engine
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
from areal_lora.engine.common.model_folder import ModelFolder
took = []
of = ModelFolder.of.__func__
def timed(cls, model):
    dist.barrier()
    took.append(time.monotonic())
    return of(cls, model)
ModelFolder.of = classmethod(timed)
model = ModelConfig(path=path, dtype="float32", shared_memory=shared)
Engine(model, TrainerConfig(engine=engine, world_size=world), torch.device("cpu"))
dist.barrier()
seconds = time.monotonic() - took[0]
read = next(int(line.split()[1]) for line in open("/proc/self/io") if line.startswith("read_bytes"))
print(f"{read} {seconds}", flush=True)
sys.stdin.read()
dist.destroy_process_group()
"""


def forget(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def start(folder: Path, engine: str, ranks: int, *, shared: bool) -> tuple[float, float]:
    """(bytes that all ranks have read from the disk, seconds of the slowest rank)."""
    store = Path(tempfile.mkdtemp()) / "store"
    processes = []
    for rank in range(ranks):
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"}
        argv = [sys.executable, "-c", RANK, str(folder), engine, str(ranks), str(shared), str(store)]
        env = os.environ | {key: str(value) for key, value in variables.items()}
        processes.append(subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    found = [p.stdout.readline().split() for p in processes if p.stdout]
    for process in processes:
        process.communicate()
    return sum(float(read) for read, _ in found), max(float(seconds) for _, seconds in found)


def write_model(folder: Path, gib: float) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    layers = max(1, round(gib * 2**30 / LAYER_BYTES))
    config = LlamaConfig(**SIZES, num_hidden_layers=layers, max_position_embeddings=64, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="128MB")
    os.sync()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", choices=["fsdp", "megatron"], default="fsdp")
    chosen = parser.parse_args()
    began = time.monotonic()
    table = Table("ranks", "shared", "disk", "GiB read", "seconds: min", "p50", "max", title=chosen.engine)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, chosen.gib)
        for ranks in chosen.ranks:
            seen: dict[tuple[bool, str], list[tuple[float, float]]] = {}
            for _ in range(chosen.repeats):
                for shared in (False, True):
                    forget(folder)
                    for disk in ("cold", "warm"):
                        found = start(folder, chosen.engine, ranks, shared=shared)
                        seen.setdefault((shared, disk), []).append(found)
            for (shared, disk), runs in sorted(seen.items()):
                times = [seconds for _, seconds in runs]
                figures = [statistics.median(read for read, _ in runs) / 2**30, min(times), statistics.median(times)]
                row = [f"{value:.2f}" for value in (*figures, max(times))]
                table.add_row(str(ranks), "yes" if shared else "no", disk, *row)
    Console().print(table, f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

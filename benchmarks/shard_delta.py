"""Bytes and speed of versions as differences to the one before: ``python benchmarks/shard_delta.py RUN``.

RUN keeps its checkpoints (``checkpoint.keep_last``). Frames go over a line of 1 Gbit/s while others are made and read,
so the slowest of the three counts; one core a side.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from areal_lora.checkpoint.checkpoint_store import versions_in
from areal_lora.checkpoint.recover import pick_version
from areal_lora.cli.find_run import open_run
from areal_lora.engine.vllm_ext.remote.shards import HEAD, PART_BYTES, frame, part_of

LINE_BYTES_PER_S = 1e9 / 8
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
REPEATS = 5


def best_s(call: Callable[[], object]) -> float:
    """Least seconds of some calls."""
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    folder, config = open_run(parser.parse_args().run)
    name = config.adapters[0].name
    adapters = []
    for version in sorted(versions_in(folder.adapter_checkpoints(name)))[1:]:  # lora_B of the first is zero
        with tempfile.TemporaryDirectory() as temporary:
            pick_version(folder, config, str(version), name).export(Path(temporary) / "peft")
            adapters.append(load_file(Path(temporary) / "peft" / "adapter_model.safetensors"))
    sent_once = {tensor.numpy().tobytes(): name for name, tensor in sorted(adapters[-1].items())}.values()
    table = Table("dtype", "base", "ratio (min / p50 / max)", "made, MB/s", "read, MB/s", "at 1 Gbit/s")
    for title, dtype in DTYPES.items():
        flat = [torch.cat([each[tensor].to(dtype).ravel() for tensor in sent_once]) for each in adapters]
        parts = [each.view(torch.uint8).numpy()[:PART_BYTES] for each in flat]
        for base in ("none", "version before"):
            ratios, made, read = list[float](), list[float](), list[float]()
            for before, part in pairwise(parts):
                whole = part, None if base == "none" else before, dtype.itemsize
                sent = frame(*whole)
                back = sent[HEAD.size :], len(part), *whole[1:]
                assert part_of(*back).tobytes() == part.tobytes()
                ratios.append(len(part) / len(sent))
                made.append(len(part) / best_s(partial(frame, *whole)))
                read.append(len(part) / best_s(partial(part_of, *back)))
            ratio = median(ratios)
            gain = min(median(made), median(read), ratio * LINE_BYTES_PER_S) / LINE_BYTES_PER_S
            spread = f"{min(ratios):.2f} / {ratio:.2f} / {max(ratios):.2f}"
            table.add_row(title, base, spread, f"{median(made) / 1e6:.0f}", f"{median(read) / 1e6:.0f}", f"{gain:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

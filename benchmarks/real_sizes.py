"""What a training micro-batch at real widths would launch, copy and wait for on a GPU, counted without one.

    python benchmarks/real_sizes.py [--json figures.json] [--names]

Slices of two layers of Qwen3-30B-A3B and Qwen3-8B with LoRA on attention and experts, in bfloat16 on torch's ``meta``
device (`size_slices.py`): the FSDP engine's model on one rank, a rank of the Megatron engine, and transformers with
PEFT. Every operator is dispatched with its real shapes and nothing is computed. A dispatch mode (`size_meter.py`)
counts, forward and backward:

- launches: operators that compute (no views, no allocations, no collectives). The figures of a layer are the difference
  of two layers and one, so that embeddings and logits are not in them.
- copies from the host, and synchronisations: operators that need a tensor's value on the host, or whose output's size
  depends on it. On ``meta`` most of these raise, so that a new one is found by the line that has it.
- the largest tensor but logits, in elements, beside tokens times tokens.
- the peak of what is allocated at once, without weights and gradients, by the part of the model that made it, and that
  of 64 micro-batches over that of one.
- FLOPs of matrix products over those of the model, which sees every prompt once for each answer.

Times are arithmetic: 5 us a launch, 10 us a synchronisation, 600 TFLOP/s of an H100.

A second table is of joint passes: one micro-batch with as many adapters, each with its own sequence. The sum of all
adapters' gradients is one operator; on GPUs one launch has those of up to 110 tensors of alike shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table
from size_meter import BACKWARD, REST, Counts, Meter
from size_slices import ENGINES, QWEN3_8B, QWEN3_30B, RANK, TARGETS, Case

from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import PassSizes
from areal_lora.types import AdapterStructure

GIB = 2**30
LAUNCH_S, FLOPS_PER_S = 5e-6, 600e12
MANY = 64
LONG = (8000, 8000, 8000)
CASES = (
    Case(name="30B-A3B, 3 x 8 k", model=QWEN3_30B, prompt=512, answers=LONG),
    Case(name="30B-A3B, 8 x 2 k", model=QWEN3_30B, prompt=512, answers=(2000,) * 8),
    Case(name="30B-A3B with 16 experts, 3 x 8 k", model=QWEN3_30B | {"num_experts": 16}, prompt=512, answers=LONG),
    Case(name="8B, 3 x 8 k", model=QWEN3_8B, prompt=512, answers=LONG),
    Case(name="30B-A3B, Megatron, ep 8", model=QWEN3_30B, prompt=512, answers=LONG, engine="megatron", ep=8),
    Case(
        name="30B-A3B, Megatron, tp 2, ep 2", model=QWEN3_30B, prompt=512, answers=LONG, engine="megatron", tp=2, ep=2
    ),
    Case(name="8B, Megatron, tp 2", model=QWEN3_8B, prompt=512, answers=LONG, engine="megatron", tp=2),
    Case(name="30B-A3B, transformers and PEFT", model=QWEN3_30B, prompt=512, answers=LONG, engine="peft"),
    Case(name="8B, transformers and PEFT", model=QWEN3_8B, prompt=512, answers=LONG, engine="peft"),
)


JOINT = {
    f"{name}, {engine}": Case(name=name, model=dict(model) | {"vocab_size": 1024}, prompt=0, answers=(), engine=engine)
    for name, model in (("8B", QWEN3_8B), ("30B-A3B", QWEN3_30B))
    for engine in ("fsdp", "megatron")
}
"""With a small vocabulary: the figures of a layer do not depend on it."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Micro-batches of a slice: forward with packing and log-probabilities, backward. ``peak`` in bytes."""

    forward: Counts
    backward: Counts
    peak: int
    parts: dict[str, int]


def measure(case: Case, layers: int, micro_batches: int = 1) -> Passes:
    with ENGINES[case.engine](case, layers) as part:
        meter = Meter(int(case.model["vocab_size"]) // case.tp, part.held)
        meter.follow(part.module)
        forward, backward = meter.counts, Counts()

        def between() -> None:
            meter.counts, meter.part = backward, BACKWARD

        with meter:
            part.run(micro_batches, between)
    return Passes(forward, backward, meter.peak, meter.at_peak)


def flops(case: Case, layers: int, pairs: bool = True) -> float:
    """Of a rank's training pass over the answers, each with its prompt (`PassSizes.training`); ``pairs``: attention."""
    adapter = AdapterStructure(rank=RANK, alpha=1.0, target_modules=TARGETS)
    sizes = PassSizes.of(ModelShape.from_hf(dict(case.model) | {"num_hidden_layers": layers}), adapter)
    lengths = [case.prompt + answer for answer in case.answers]
    seen = sum(n * (n + 1) // 2 for n in lengths) if pairs else 0
    return float(sizes.training(sum(lengths), seen)) / case.tp


def growth(case: Case, micro_batches: int = MANY) -> float:
    """The peak of so many micro-batches of 704 tokens over that of one, two layers."""
    few = replace(case, prompt=64, answers=(320, 320))
    return measure(few, 2, micro_batches).peak / measure(few, 2).peak


def joint(case: Case, adapters: int, tokens: int = 1024) -> dict[str, int]:
    """Of a layer in a micro-batch of ``tokens`` in sequences of so many adapters."""
    names = tuple(f"client-{i}" for i in range(adapters))
    case = replace(case, answers=(tokens // adapters,) * adapters, adapters=names)
    one, two = measure(case, 1), measure(case, 2)
    forward, backward = two.forward.launches - one.forward.launches, two.backward.launches - one.backward.launches
    syncs = total(two, "syncs") - total(one, "syncs")
    return {"forward": forward, "backward": backward, "syncs": syncs, "host_copies": total(one, "host_copies")}


def total(passes: Passes, name: str) -> int:
    return int(getattr(passes.forward, name) + getattr(passes.backward, name))


def figures(case: Case) -> dict[str, float]:
    """Flat claims of a case."""
    one, two = measure(case, 1), measure(case, 2)
    forward, backward = two.forward.launches - one.forward.launches, two.backward.launches - one.backward.launches
    made = total(two, "products") - total(one, "products")
    return {
        "launches_forward_layer": forward,
        "launches_backward_layer": backward,
        "launches_ms_layer": (forward + backward) * LAUNCH_S * 1e3,
        "flops_ms_layer": (flops(case, 2) - flops(case, 1)) / FLOPS_PER_S * 1e3,
        "products_of_the_models": made / (flops(case, 2, pairs=False) - flops(case, 1, pairs=False)),
        "collectives_layer": total(two, "collectives") - total(one, "collectives"),
        "syncs_micro_batch": total(two, "syncs"),
        "host_copies_micro_batch": total(two, "host_copies"),
        "largest_elements": max(two.forward.largest, two.backward.largest),
        "tokens_times_tokens": case.tokens**2,
        "activations_gib_layer": (two.peak - one.peak) / GIB,
        **{f"peak_gib_{part}": two.parts.get(part, 0) / GIB for part in ("attention", "mlp", "output", REST, BACKWARD)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures of every case here")
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--names", action="store_true", help="print what a layer launches")
    chosen = parser.parse_args()
    cases = [case for case in CASES if chosen.only in case.name]
    found = {case.name: figures(case) | {f"peak_of_{MANY}_micro_batches": growth(case)} for case in cases}
    table = Table(
        "of a layer and micro-batch",
        *found,
        title=f"one rank, adapters of rank {RANK}, {MANY} micro-batches of 704 tokens",
    )
    for key in next(iter(found.values())):
        table.add_row(key, *(f"{row[key]:,.2f}".removesuffix(".00") for row in found.values()))
    Console(width=200).print(table)
    joined = Table(
        "adapters", *JOINT, title="launches forward/backward and synchronisations of a layer in joint passes"
    )
    for adapters in (1, 4, 16):
        each = [joint(case, adapters) for case in JOINT.values()]
        joined.add_row(str(adapters), *(f"{one['forward']}/{one['backward']}, {one['syncs']}" for one in each))
    Console(width=200).print(joined)
    if chosen.names:
        one, two = measure(cases[0], 1), measure(cases[0], 2)
        for part, more, less in (("forward", two.forward, one.forward), ("backward", two.backward, one.backward)):
            layer = (more.names - less.names).most_common()
            print(f"{part} of a layer:", ", ".join(f"{count} {name}" for name, count in layer))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

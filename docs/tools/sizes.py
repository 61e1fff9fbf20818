"""The tables of docs/en/scale.md about real sizes: memory and time of a rank, by arithmetic.

Memory is what the start-up check estimates. Times of a micro-batch, forward and backward: per token twice the weights
that it meets in each, and six times an adapter's (`step_flops` of the benchmarks); causal attention n^2 q multiply-adds
forward and twice that backward (Dao, arXiv 2307.08691, counts 2.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.sections.run import Recompute
from areal_lora.config.sizing.memory import GIB, PACKED, Memory, Part, job_memory
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import adapter_size

TARGET = Path("docs/en/scale.md")
FIRST, LAST = "<!-- made by docs/tools/sizes.py -->", "<!-- end -->"
TOKENS = 33 * 1024
"""An answer of 32 k after a prompt of 1 k: one micro-batch."""
FLOPS_PER_S, LAUNCH_S, BYTES_PER_S, LINK_BYTES_PER_S = 600e12, 5e-6, 3.35e12, 450e9
"""Of an H100 as in `benchmarks/real_sizes.py`: products, a launch, its memory, NVLink each way."""
LAUNCHES = {"experts": (60, 84), "dense": (33, 56)}
"""Of a layer, forward and backward, as Megatron launches with tp 2: `tests/benchmarks/test_real_sizes.py`."""


@dataclass(frozen=True, slots=True)
class Size:
    """An example with other sizes of ``trainer``, on ``nodes`` of eight GPUs."""

    name: str
    model: str
    example: str
    nodes: int
    trainer: Mapping[str, int]

    def config(self, recompute: Recompute) -> Config:
        sizes = {**self.trainer, "max_tokens_per_microbatch": TOKENS}
        overrides = [f"trainer.{key}={value}" for key, value in sizes.items()]
        overrides += [f"trainer.recompute={recompute}", f"cluster.nodes={self.nodes}", f"model.path={self.model}"]
        return load_config([Path(f"examples/math/{self.example}.yaml")], overrides)

    @property
    def shape(self) -> ModelShape:
        return ModelShape.from_hf(known_config(self.model) or {})

    def rank(self, recompute: Recompute) -> Memory:
        """The one that needs most with ``full``."""
        full, found = (job_memory(self.config(kind), self.shape) for kind in ("full", recompute))
        most = max((one for one in full if one.role == "trainer"), key=lambda rank: rank.device)
        return next(one for one in found if one.name == most.name)


_MOE, _DENSE = "gsm8k_grpo_megatron_lora_moe", "gsm8k_grpo_megatron_lora_72b"
SIZES = (
    Size("30B-A3B, 16 GPUs", "Qwen/Qwen3-30B-A3B", _MOE, 3, {"world_size": 16, "tp": 4, "ep": 8}),
    Size("72B, 64 GPUs", "Qwen/Qwen2.5-72B-Instruct", _DENSE, 10, {"world_size": 64, "tp": 8}),
    Size("235B-A22B, 256 GPUs", "Qwen/Qwen3-235B-A22B", _MOE, 33, {"world_size": 256, "tp": 4, "pp": 4, "ep": 8}),
)


def memory_rows() -> list[tuple[str, ...]]:
    """GiB of a rank: its parts, and the sum, by kind of recompute."""
    by_kind = {kind: [size.rank(kind) for size in SIZES] for kind in get_args(Recompute)}

    def parts(name: str, kind: Recompute = "full") -> list[Part]:
        return [next((p for p in rank.parts if p.name == name), Part(name)) for rank in by_kind[kind]]

    def gib(name: str, numbers: list[int]) -> tuple[str, ...]:
        return (name, *(f"{number / GIB:.1f}" for number in numbers))

    names = ["base weights", "adapter weights and gradients", "optimizer moments", "publish and checkpoint"]
    names += [PACKED, "process"]
    rows = [gib(name, [p.device for p in parts(name)]) for name in (*names, "buffers")]
    rows += [gib(f"activations, `{kind}`", [p.device for p in parts("activations", kind)]) for kind in by_kind]
    rows.append(gib("host, of `offload`", [p.host for p in parts("activations", "offload")]))
    return [*rows, *(gib(f"**sum**, `{kind}`", [rank.device for rank in ranks]) for kind, ranks in by_kind.items())]


def times(size: Size) -> dict[str, float]:
    """Seconds of a rank and micro-batch, forward and backward, each as if nothing else took time."""
    config, shape, n = size.config("full"), size.shape, TOKENS
    t, h, q, kv = config.trainer, shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers, rows = shape.layers / t.pp, shape.experts_per_token
    mlp = (
        3 * h * (rows * shape.expert_ffn + shape.shared_ffn) + h * shape.experts if shape.experts else 3 * h * shape.ffn
    )
    base, attention = h * (2 * q + 2 * kv) + mlp, 2 * q * n / 2
    adapter = adapter_size(shape, config.adapters[0].spec("")).parameters / shape.layers
    met = adapter * (rows / shape.experts if shape.experts else 1)  # nearly all of it is in experts where there are any
    flops_s = n * layers / t.tp / FLOPS_PER_S
    # Gathered or scattered around attention and a dense MLP; experts route each rank's part of the sequence.
    sequence = (4 if shape.experts else 8) * n * h * 2 * (t.tp - 1) / t.tp
    experts = 4 * rows * n / t.tp * h * 2 * (t.ep - 1) / t.ep if shape.experts else 0.0
    weights = size.rank("full").parts[0].device
    forward, backward = LAUNCHES["experts" if shape.experts else "dense"]
    return {
        "products": (4 * base + 6 * met) * flops_s,
        "attention": 6 * attention * flops_s,
        "again, `full`": (2 * base + 2 * attention) * flops_s,
        "again, `selective`": 2 * base * flops_s,
        "loss chunks": 6 * n * h * shape.vocab / t.tp / FLOPS_PER_S,
        "launches, without recompute": (forward + backward) * layers * LAUNCH_S,
        "launches, with it": (2 * forward + backward) * layers * LAUNCH_S,
        "weights read three times": 3 * weights / BYTES_PER_S,
        "between ranks over NVLink": layers * (sequence + experts) / LINK_BYTES_PER_S,
    }


def tables() -> str:
    """Both tables."""
    head = " | ".join(("", *(size.name for size in SIZES))).strip()
    rule = "|---" * (1 + len(SIZES)) + "|"
    sizes = "; ".join(
        f"{size.name}: {', '.join(f'{key} {value}' for key, value in size.trainer.items() if key != 'world_size')}"
        for size in SIZES
    )
    found = [times(size) for size in SIZES]
    seconds = [(name, *(f"{1e3 * row[name]:,.0f}" for row in found)) for name in found[0]]
    lines = [
        f"{sizes}. GiB of the rank that needs most:",
        "",
        f"| part | {head.removeprefix('| ')} |",
        rule,
        *(f"| {' | '.join(row)} |" for row in memory_rows()),
        "",
        "Milliseconds of a rank and micro-batch, each alone:",
        "",
        f"| work | {head.removeprefix('| ')} |",
        rule,
        *(f"| {' | '.join(row)} |" for row in seconds),
    ]
    return "\n".join(lines)


def render() -> str:
    """The page with new tables."""
    page = TARGET.read_text(encoding="utf-8")
    before, _, rest = page.partition(FIRST)
    return f"{before}{FIRST}\n\n{tables()}\n\n{LAST}{rest.partition(LAST)[2]}"

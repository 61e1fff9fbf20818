"""What a training micro-batch at real widths would launch, copy and wait for on a GPU, counted without one.

    python benchmarks/real_sizes.py [--json figures.json]

Slices of two layers of Qwen3-30B-A3B and Qwen3-8B with LoRA on attention and experts, transformers' modules with our
attention and experts (the FSDP engine's model, one rank), in bfloat16 on torch's ``meta`` device: every operator is
dispatched with its real shapes and nothing is computed. A dispatch mode counts, forward and backward:

- launches: operators that compute (no views, no allocations). The figures of a layer are the difference of two layers
  and one, so that embeddings and logits are not in them.
- copies from the host, and synchronisations: operators that need a tensor's value on the host, or whose output's size
  depends on it. On ``meta`` most of these raise, so that a new one is found by the line that has it.
- the largest tensor but logits, in elements, beside tokens times tokens.
- the peak of what is allocated at once, without weights.
- FLOPs, by formula.

Times are arithmetic: 5 us a launch, 10 us a synchronisation, 600 TFLOP/s of an H100.
"""

from __future__ import annotations

import argparse
import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_case import step_flops

from areal_lora.config.models import TrainerConfig
from areal_lora.data.collate import MicroPlan, Tree
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel
from areal_lora.engine.fsdp_engine import FsdpModel
from areal_lora.engine.fsdp_utils.model import ATTENTION, fuse_norms
from areal_lora.engine.layers.attention import PackedMicroBatch, pack
from areal_lora.engine.layers.expert_mlp import ActiveAdapter
from areal_lora.engine.layers.output import Readout
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec, TrainBatch

META, GIB = torch.device("meta"), 2**30
LAUNCH_S, SYNC_S, FLOPS_PER_S = 5e-6, 10e-6, 600e12
RANK = 32
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
NO_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view"}
SYNCS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount", "equal"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Answers of ``answers`` tokens after a shared prompt of ``prompt``, as one micro-batch of ``model``."""

    name: str
    model: Mapping[str, Any]
    prompt: int
    answers: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.prompt + sum(self.answers)


CASES = (
    Case(name="30B-A3B, 3 x 8 k", model=QWEN3_30B, prompt=512, answers=(8000, 8000, 8000)),
    Case(name="30B-A3B, 8 x 2 k", model=QWEN3_30B, prompt=512, answers=(2000,) * 8),
    Case(
        name="30B-A3B with 16 experts, 3 x 8 k", model=QWEN3_30B | {"num_experts": 16}, prompt=512, answers=(8000,) * 3
    ),
    Case(name="8B, 3 x 8 k", model=QWEN3_8B, prompt=512, answers=(8000, 8000, 8000)),
)


@dataclass(slots=True)
class Counts:
    """Of one pass."""

    launches: int = 0
    host_copies: int = 0
    syncs: int = 0
    largest: int = 0  # elements, of what is no logits
    names: Counter[str] = field(default_factory=Counter)


class Meter(TorchDispatchMode):
    """Counts operators, and the bytes of the tensors on the device that are alive."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.counts, self._vocabulary = Counts(), vocabulary
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        name, counts = func.overloadpacket.__name__, self.counts
        counts.syncs += name in SYNCS or (name == "repeat_interleave" and "output_size" not in (kwargs or {}))
        if any(x.is_meta for x in (*results, *inputs)):
            copied = any(x.device.type == "cpu" and x.dim() for x in inputs) and any(x.is_meta for x in results)
            counts.host_copies += copied
            if not (func.is_view or name in NO_LAUNCH or copied):
                counts.launches += 1
                counts.names[name] += 1
        for tensor in results:
            if tensor.is_meta:
                if self._vocabulary not in tensor.shape:
                    counts.largest = max(counts.largest, tensor.numel())
                self._watch(tensor)
        return out

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size

    @contextmanager
    def count(self) -> Iterator[Counts]:
        """Counts of the block alone."""
        self.counts = counts = Counts()
        yield counts
        self.counts = Counts()


class FusedNorm(torch.autograd.Function):
    """`functional.rms_norm` as a GPU computes it: one launch each way, its input is kept. ``meta`` takes it apart."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: object) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].clone(), None, None, None


def build(case: Case, layers: int) -> FsdpModel:
    """The slice with an adapter on every linear layer of attention, MLP and experts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {k: v for k, v in case.model.items() if k != "model_type"}
    config = AutoConfig.for_model(str(case.model["model_type"]), num_hidden_layers=layers, **kind)
    with META:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    model.eval().requires_grad_(False)
    fuse_norms(model)
    shape = ModelShape.from_hf(config.to_dict())
    one = ParallelLayout.of(TrainerConfig(world_size=1), layers=layers, experts=shape.experts)
    sharded = ShardedModel(shape=shape, layout=one)
    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=RANK, target_modules=TARGETS)
    adapted = FsdpModel(model, sharded, ActiveAdapter())
    adapted.attach(AdapterMemory(sharded, spec, 0, META, torch.bfloat16))
    adapted.active.name = "a"
    return adapted


def make_batch(case: Case) -> tuple[TrainBatch, MicroPlan]:
    n = len(case.answers)
    lengths = [case.prompt + answer for answer in case.answers]
    tokens = sum(lengths)
    mask = torch.ones(tokens, dtype=torch.bool)
    batch = TrainBatch(
        token_ids=torch.ones(tokens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)]),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(tokens),
        versions=torch.zeros(tokens, dtype=torch.int64),
        shared_starts=torch.full((n,), case.prompt),
        rewards=torch.zeros(n),
        group_ids=torch.zeros(n, dtype=torch.int64),
        sample_ids=torch.arange(n),
        given=torch.zeros(n, dtype=torch.bool),
        adapters=("a",) * n,
    )
    tree = Tree(sequences=tuple(range(n)), shared=case.prompt)
    return batch, MicroPlan(trees=((tree,),), n_tokens=case.tokens)


@dataclass(frozen=True, slots=True)
class Passes:
    """A micro-batch of a slice: packing it, forward with log-probabilities, backward. ``peak`` in bytes."""

    packing: Counts
    forward: Counts
    backward: Counts
    peak: int


def measure(case: Case, layers: int) -> Passes:
    model = build(case, layers)
    batch, plan = make_batch(case)
    meter = Meter(int(case.model["vocab_size"]))
    with meter, mock.patch.object(nn.functional, "rms_norm", FusedNorm.apply):
        with meter.count() as packing:
            packed: PackedMicroBatch = pack(batch, plan, 0, META)
        model.active.keys = packed.keys
        model.output.expect(packed, Readout())
        with meter.count() as forward:
            output = model.module(
                input_ids=packed.token_ids,
                position_ids=packed.attention.positions[None],
                use_cache=False,
                packing=packed.attention,
            )
            loss = output.logits.sum()
        with meter.count() as backward:
            loss.backward()
    return Passes(packing, forward, backward, meter.peak)


def flops(case: Case, layers: int) -> float:
    """Of a training pass over the answers, each with its prompt, see `train_case.step_flops`."""
    model = dict(case.model) | {"num_hidden_layers": layers}
    return step_flops(model, RANK, [case.prompt + answer for answer in case.answers])


def figures(case: Case) -> dict[str, float]:
    """Flat claims of a case."""
    one, two = measure(case, 1), measure(case, 2)
    layer_flops = flops(case, 2) - flops(case, 1)
    forward, backward = two.forward.launches - one.forward.launches, two.backward.launches - one.backward.launches
    return {
        "launches_forward_layer": forward,
        "launches_backward_layer": backward,
        "launches_ms_layer": (forward + backward) * LAUNCH_S * 1e3,
        "flops_ms_layer": layer_flops / FLOPS_PER_S * 1e3,
        "syncs_micro_batch": two.packing.syncs + two.forward.syncs + two.backward.syncs,
        "host_copies_micro_batch": two.packing.host_copies + two.forward.host_copies + two.backward.host_copies,
        "largest_elements": max(two.packing.largest, two.forward.largest, two.backward.largest),
        "tokens_times_tokens": case.tokens**2,
        "activations_gib_layer": (two.peak - one.peak) / GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures of every case here")
    parser.add_argument("--names", action="store_true", help="print what a layer launches")
    chosen = parser.parse_args()
    found = {case.name: figures(case) for case in CASES}
    table = Table("of a layer and micro-batch", *found, title="one rank, adapters of rank 32")
    for key in next(iter(found.values())):
        table.add_row(key, *(f"{row[key]:,.2f}".removesuffix(".00") for row in found.values()))
    Console(width=200).print(table)
    if chosen.names:
        one, two = measure(CASES[0], 1), measure(CASES[0], 2)
        for part, more, less in (("forward", two.forward, one.forward), ("backward", two.backward, one.backward)):
            layer = (more.names - less.names).most_common()
            print(f"{part} of a layer:", ", ".join(f"{count} {name}" for name, count in layer))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

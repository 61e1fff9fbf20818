"""Counts of a micro-batch at real widths: they do not depend on the number of experts, and may only fall."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from real_sizes import CASES, JOINT, figures, growth, joint, measure, total
from size_meter import META, Meter, products
from size_slices import ENGINES, Case, loss_of, make_batch

from areal_lora.config.load import load_config
from areal_lora.config.sizing.memory import HEAP_GPU, job_memory
from areal_lora.engine.layers.attention import to_device
from areal_lora.families.shape import ModelShape
from tests.support.paths import EXAMPLES

# A small vocabulary: one chunk of logits instead of 56, and no other number but those of the output layer changes.
SMALL = {case.name: replace(case, model=dict(case.model) | {"vocab_size": 1024}) for case in CASES}
LONG = SMALL["30B-A3B, 3 x 8 k"]
LIMITS = {"30B-A3B, 3 x 8 k": (60, 95, 18), "8B, 3 x 8 k": (42, 73, 18)}
"""Launches of a layer forward and backward, copies from the host of a micro-batch.

A dense MLP of FSDP computes SiLU again backward: one launch more, and 3 f of memory in place of 4.
"""
JOINT_LIMITS = {
    "8B, fsdp": (56, 94, 0, 20),
    "30B-A3B, fsdp": (74, 111, 0, 20),
    "8B, megatron": (41, 68, 0, 20),
    "30B-A3B, megatron": (93, 100, 0, 20),
}
"""Launches and waits of a layer, copies from the host of a micro-batch."""
MEASURED = [case for case in SMALL.values() if case.engine != "peft" and "8 x 2 k" not in case.name]


@cache
def found(name: str) -> dict[str, float]:
    return figures(SMALL[name])


def test_a_layer_launches_the_same_whatever_the_number_of_experts() -> None:
    layer, few = found(LONG.name), found("30B-A3B with 16 experts, 3 x 8 k")
    same = [name for name in layer if "launches" in name or "micro_batch" in name]
    assert {name: few[name] for name in same} == {name: layer[name] for name in same}


def test_nothing_waits_for_the_device_and_nothing_has_tokens_times_tokens() -> None:
    layer = found(LONG.name)
    assert layer["syncs_micro_batch"] == 0
    assert layer["largest_elements"] < layer["tokens_times_tokens"]


@pytest.mark.parametrize("kind", ["grpo", "gspo", "reinforce_pp", "cispo"])
def test_no_loss_waits_for_the_device(kind: str) -> None:
    batch, _ = make_batch(replace(LONG, answers=(5, 7)), 1)
    micro = replace(to_device(batch, META), prox_logprobs=torch.zeros(batch.n_tokens, device=META))
    meter, scores = Meter(7), torch.zeros(batch.n_tokens, device=META, requires_grad=True)
    with meter, meter.count() as counts:
        loss_of(kind)(micro, scores, None).loss.backward()
    assert counts.launches
    assert counts.syncs == 0


@pytest.mark.parametrize("name", LIMITS)
def test_a_count_does_not_grow(name: str) -> None:
    names = ("launches_forward_layer", "launches_backward_layer", "host_copies_micro_batch")
    for count, limit in zip((found(name)[key] for key in names), LIMITS[name], strict=True):
        assert count <= limit


@pytest.mark.parametrize(("name", "limit"), JOINT_LIMITS.items())
def test_a_joint_pass_launches_the_same_whatever_the_number_of_adapters(
    name: str, limit: tuple[int, int, int, int]
) -> None:
    few, many = (joint(JOINT[name], adapters) for adapters in (2, 16))
    assert few == many
    assert all(count <= most for count, most in zip(many.values(), limit, strict=True))


@pytest.mark.parametrize(
    ("name", "waits", "copies"), [("30B-A3B, 3 x 8 k", 0, 1), ("30B-A3B, Megatron, tp 2, ep 2", 1, -1)]
)
def test_a_replayed_choice_is_three_launches_and_no_layer_waits(name: str, waits: int, copies: int) -> None:
    """One copy of a micro-batch's routes. Scores are gathered and their gradients scattered, as without replay.

    Megatron's dispatcher gets the sizes of all exchanges after one wait, and no longer copies those of both layers.
    """
    case = replace(SMALL[name], routes=True)
    plain, routed = figures(SMALL[name]), figures(case)
    more = {key: value - plain[key] for key, value in routed.items()}
    assert more["launches_forward_layer"] <= 3
    assert more["launches_backward_layer"] == 0
    assert more["host_copies_micro_batch"] == copies
    assert [total(measure(case, layers), "syncs") for layers in (1, 4)] == [waits, waits]


def test_megatrons_router_computes_in_float32_beside_a_bfloat16_base() -> None:
    case, found = replace(SMALL["30B-A3B, Megatron, ep 8"], ep=1, answers=(5, 7)), []
    with ENGINES[case.engine](case, 1) as part:
        part.module.get_submodule("0.decoder.layers.0.mlp.router").register_forward_hook(
            lambda *call: found.append((call[1][0].dtype, call[2][0].dtype))
        )
        part.run(1, lambda: None)
    assert found == [(torch.bfloat16, torch.float32)]


def test_the_peak_of_many_micro_batches_is_that_of_one() -> None:
    assert growth(LONG, 8) < 1.1


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.name)
def test_the_memory_estimate_is_within_a_tenth_of_the_measured_peak(case: Case) -> None:
    """Activations and buffers of two layers, without the allocator's share; the slice's vocabulary is small."""
    passes = measure(case, 2)
    peak, dispatched = passes.peak, case.engine == "megatron" and case.sharded(2).shape.experts
    # Megatron's token dispatcher reads its counts once a layer.
    assert passes.forward.syncs + passes.backward.syncs == (2 if dispatched else 0)
    sizes = [f"{name}={getattr(case.trainer, name)}" for name in ("engine", "tp", "ep", "world_size")]
    sizes += ["recompute=none", f"max_tokens_per_microbatch={case.tokens}"]
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], [f"trainer.{size}" for size in sizes])
    shape = ModelShape.from_hf(dict(case.model) | {"num_hidden_layers": 2})
    rank = next(memory for memory in job_memory(config, shape) if memory.role == "trainer")
    estimate = sum(part.device for part in rank.parts if part.name in {"activations", "buffers"}) / HEAP_GPU
    print(f"{case.name}: measured {peak / 2**30:.2f} GiB, estimate {estimate / 2**30:.2f} GiB")
    assert estimate == pytest.approx(peak, rel=0.1)


def test_what_waits_for_the_device_is_found() -> None:
    meter = Meter(vocabulary=7)
    with meter, meter.count() as counts:
        torch.ones(3).nonzero()
        torch.arange(3).repeat_interleave(torch.ones(3, dtype=torch.int64))
        torch.arange(3).repeat_interleave(torch.ones(3, dtype=torch.int64), output_size=3)
    assert counts.syncs == 2
    with meter, pytest.raises((NotImplementedError, RuntimeError)):
        torch.ones(3, device="meta").sum().item()


def test_memory_is_what_is_alive_at_once_and_was_not_there_before() -> None:
    weight = torch.empty(500, device="meta")
    meter = Meter(7, [weight])
    with meter:
        for _ in range(5):
            meter.part = "attention"
            one = torch.empty(1000, device="meta")
            meter.part = "mlp"
            two = one.view(10, 100) + 1.0
            weight.view(5, 100)
            del one, two
    assert meter.alive == 0
    assert meter.peak == 8000
    assert meter.at_peak == {"attention": 4000, "mlp": 4000}


def test_products_are_those_of_every_row_once() -> None:
    meter = Meter(7)
    x, weight, ends = torch.empty(6, 8), torch.empty(3, 8, 16), torch.tensor([2, 4, 6], dtype=torch.int32)
    with meter, meter.count() as counts:
        x, weight, ends = (value.to("meta") for value in (x.bfloat16(), weight.bfloat16(), ends))
        y = torch.nn.functional.grouped_mm(x, weight, offs=ends)
        torch.nn.functional.grouped_mm(x.t(), y, offs=ends)
        x @ x.t()
    assert counts.products == 2 * 6 * 8 * 16 + 2 * 6 * 8 * 16 + 2 * 6 * 6 * 8
    assert products("add", [x, x], [x]) == 0

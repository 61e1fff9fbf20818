"""Counts of a micro-batch at real widths: they do not depend on the number of experts, and may only fall."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from real_sizes import CASES, Meter, figures

LIMITS = {"launches_forward_layer": 70, "launches_backward_layer": 111, "host_copies_micro_batch": 17}


@pytest.fixture(scope="module")
def layer() -> dict[str, float]:
    return figures(CASES[0])


def test_a_layer_launches_the_same_whatever_the_number_of_experts(layer: dict[str, float]) -> None:
    few = figures(replace(CASES[0], model=dict(CASES[0].model) | {"num_experts": 16}))
    same = [name for name in layer if "launches" in name or "micro_batch" in name]
    assert {name: few[name] for name in same} == {name: layer[name] for name in same}


def test_nothing_waits_for_the_device_and_nothing_has_tokens_times_tokens(layer: dict[str, float]) -> None:
    assert layer["syncs_micro_batch"] == 0
    assert layer["largest_elements"] < layer["tokens_times_tokens"]


@pytest.mark.parametrize("name", LIMITS)
def test_a_count_does_not_grow(layer: dict[str, float], name: str) -> None:
    assert layer[name] <= LIMITS[name]


def test_what_waits_for_the_device_is_found() -> None:
    meter = Meter(vocabulary=7)
    with meter, meter.count() as counts:
        torch.ones(3).nonzero()
        torch.arange(3).repeat_interleave(torch.ones(3, dtype=torch.int64))
        torch.arange(3).repeat_interleave(torch.ones(3, dtype=torch.int64), output_size=3)
    assert counts.syncs == 2
    with meter, pytest.raises((NotImplementedError, RuntimeError)):
        torch.ones(3, device="meta").sum().item()


def test_memory_is_what_is_alive_at_once() -> None:
    meter = Meter(vocabulary=7)
    with meter:
        for _ in range(5):
            one = torch.empty(1000, device="meta")
            two = one.view(10, 100) + 1.0
            del one, two
    assert meter.alive == 0
    assert meter.peak == 8000

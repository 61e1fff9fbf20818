"""Rounded weights against vLLM's own functions, bit for bit."""

from __future__ import annotations

import os
import random
from unittest import mock

import pytest
import torch

from areal_lora.algorithms.merging import fp8, magnitudes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def drawn(dtype: torch.dtype) -> torch.Tensor:
    """[3, 40, 24]: channels of many sizes, one of zeros, a tie, and subnormal numbers."""
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-5, 2, 120).view(3, 40, 1)
    weight = (torch.randn(3, 40, 24, generator=generator) * sizes).to(dtype)
    weight[0, 3], weight[1, 5, :3] = 0.0, torch.tensor([448.0, 17.0, -19.0])
    return weight


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_channel_is_rounded_as_vllm_rounds_it(dtype: torch.dtype) -> None:
    from vllm.model_executor.layers.quantization.online import fp8 as online

    weight = drawn(dtype)
    largest = magnitudes(weight, "fp8_per_channel")
    found = fp8(weight, largest, "fp8_per_channel")
    for matrix, rounded, its in zip(weight, found, largest, strict=True):
        amax = matrix.abs().amax(-1, keepdim=True)
        assert torch.equal(its, amax.float())
        scale = online._fp8_channel_scale(amax)
        assert torch.equal(rounded, online._fp8_quant_per_channel(matrix, scale).float() * scale)
    assert (found != weight.float()).float().mean() > 0.5
    assert torch.equal(found[0, 3], torch.zeros(24))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_matrix_is_rounded_as_vllm_rounds_it(dtype: torch.dtype) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.online import fp8 as online
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    weight = drawn(dtype)
    found = fp8(weight, magnitudes(weight, "fp8_per_tensor"), "fp8_per_tensor")
    # vLLM preloads libraries into its processes, which this one's would get, too.
    with mock.patch.dict(os.environ), set_current_vllm_config(VllmConfig()):
        quantise = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR)
    for matrix, rounded in zip(weight, found, strict=True):
        scale = online._fp8_scale(matrix.abs().amax().reshape(1))
        assert torch.equal(rounded, quantise.forward_native(matrix, scale)[0].float() * scale)
    zeros = torch.zeros(2, 4, 4)
    assert torch.equal(fp8(zeros, magnitudes(zeros, "fp8_per_tensor"), "fp8_per_tensor"), zeros)

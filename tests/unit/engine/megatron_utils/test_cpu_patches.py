"""What importing Megatron on a CPU leaves behind; the norm, in float64."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from areal_lora.engine.megatron_utils.cpu_patches import RmsNorm, install_cpu_patches

EPS = 1e-6


def test_megatron_is_imported_and_the_stand_in_of_transformer_engine_is_removed() -> None:
    install_cpu_patches()
    importlib.import_module("areal_lora.engine.megatron_utils.megatron_model")
    assert "megatron.bridge" in sys.modules
    assert "transformer_engine" not in sys.modules


@pytest.mark.parametrize("shape", [(5, 1, 128), (7, 1, 4, 32)])
def test_rms_norm_equals_its_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(11)
    print("seed 11")
    norm = RmsNorm(None, shape[-1], EPS)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(shape, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    want = exact / (exact.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.weight.detach().double()
    got, weights = norm(x), torch.randn(shape)
    (got * weights).sum().backward()
    (want * weights.double()).sum().backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_rms_norm_of_bf16_is_computed_in_fp32() -> None:
    torch.manual_seed(12)
    print("seed 12")
    x = torch.randn(3, 1, 64, dtype=torch.bfloat16)
    norm = RmsNorm(None, 64, EPS).to(torch.bfloat16)
    out = norm(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.nn.functional.rms_norm(x.float(), (64,), eps=EPS).bfloat16())

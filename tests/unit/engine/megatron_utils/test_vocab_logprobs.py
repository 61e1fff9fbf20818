"""Log-probabilities, entropy and their gradients against log_softmax in float64; two ranks for the sharded case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from areal_lora.engine.megatron_utils.vocab_logprobs import vocab_logprobs
from tests.support.distributed.spawn import run_ranks

N, VOCAB = 37, 24


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 20 * torch.randn(N, VOCAB, generator=generator)  # sharp and flat rows
    logits[0] = 0.0
    logits[1, 5] = 500.0  # exp overflows unless the maximum is taken out
    return (
        logits,
        torch.randint(0, VOCAB, (N,), generator=generator),
        torch.randn(N, generator=generator),
        torch.randn(N, generator=generator),
    )


def expected(temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, target, weight_p, weight_h = inputs()
    leaf = logits.double().requires_grad_()
    logp = (leaf / temperature).log_softmax(-1)
    picked = logp.gather(1, target[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (picked * weight_p + entropy * weight_h).sum().backward()
    assert leaf.grad is not None
    return picked.detach(), entropy.detach(), leaf.grad


def check(found: list[torch.Tensor], temperature: float) -> None:
    for value, truth in zip(found, expected(temperature), strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=2e-4 / temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_whole_vocabulary(temperature: float) -> None:
    logits, target, weight_p, weight_h = inputs()
    leaf = logits.clone().requires_grad_()
    logprob, entropy = vocab_logprobs(leaf, target, temperature=temperature, group=None)
    (logprob * weight_p + entropy * weight_h).sum().backward()
    assert leaf.grad is not None
    check([logprob.detach(), entropy.detach(), leaf.grad], temperature)


def test_bfloat16_logits_are_scored_in_fp32() -> None:
    logits, target, _, _ = inputs()
    logprob, entropy = vocab_logprobs(logits.bfloat16(), target, temperature=1.0, group=None)
    assert logprob.dtype == entropy.dtype == torch.float32
    truth = logits.bfloat16().double().log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), truth, rtol=1e-5, atol=2e-4)


def sharded(temperature: float) -> list[Any]:
    import torch.distributed as dist

    logits, target, weight_p, weight_h = inputs()
    leaf = logits.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    logprob, entropy = vocab_logprobs(leaf, target, temperature=temperature, group=dist.group.WORLD)
    (logprob * weight_p + entropy * weight_h).sum().backward()
    assert leaf.grad is not None
    return [logprob.detach().numpy(), entropy.detach().numpy(), leaf.grad.numpy()]


@pytest.mark.slow
def test_split_vocabulary(tmp_path: Path) -> None:
    ranks = run_ranks(sharded, 2, tmp_path, (0.6,), timeout_s=60.0)
    for value in (0, 1):
        assert np.array_equal(ranks[0][value], ranks[1][value])
    gradient = np.concatenate([ranks[0][2], ranks[1][2]], 1)
    check([torch.from_numpy(v) for v in (ranks[0][0], ranks[0][1], gradient)], 0.6)


def test_no_tensor_is_made_on_the_default_device() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    target = torch.tensor([0, 6, 3, 2, 1])
    torch.set_default_device("meta")
    try:
        logprobs, entropy = vocab_logprobs(logits, target, temperature=0.7, group=None)
        (logprobs.sum() + entropy.sum()).backward()
    finally:
        torch.set_default_device(None)
    assert {t.device.type for t in (logprobs, entropy, logits.grad)} == {"cpu"}
    want = (logits.detach() / 0.7).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert torch.allclose(logprobs.detach(), want, atol=1e-6)

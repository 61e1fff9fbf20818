"""Log-probabilities, entropy and their gradients against log_softmax in float64; two ranks for the sharded case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_lora.config.sizing import memory
from areal_lora.engine.common import micro_batches as module
from areal_lora.engine.common.micro_batches import vocab_logprobs
from tests.support.distributed.spawn import run_ranks

N, VOCAB = 37, 24
ROWS = torch.tensor([*range(N - 1), 3, 3, 8])  # one row of logits has no prediction, two have several


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = 20 * torch.randn(N, VOCAB, generator=generator)  # sharp and flat rows
    logits[0] = 0.0
    logits[1, 5] = 500.0  # exp overflows unless the maximum is taken out
    return (
        logits,
        torch.randint(0, VOCAB, (len(ROWS),), generator=generator),
        torch.randn(len(ROWS), generator=generator),
        torch.randn(len(ROWS), generator=generator),
    )


def expected(temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits, target, weight_p, weight_h = inputs()
    leaf = logits.double().requires_grad_()
    logp = (leaf[ROWS] / temperature).log_softmax(-1)
    picked = logp.gather(1, target[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(-1)
    (picked * weight_p + entropy * weight_h).sum().backward()
    assert leaf.grad is not None
    return picked.detach(), entropy.detach(), leaf.grad


def check(found: list[torch.Tensor], temperature: float) -> None:
    for value, truth in zip(found, expected(temperature), strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=2e-4 / temperature)


def computed(temperature: float, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    logits, target, weight_p, weight_h = inputs()
    leaf = logits.to(dtype).requires_grad_()
    logprob, entropy = vocab_logprobs(leaf, ROWS, target, temperature=temperature, group=None)
    (logprob * weight_p + entropy * weight_h).sum().backward()
    assert leaf.grad is not None
    return [logprob.detach(), entropy.detach(), leaf.grad]


@pytest.fixture(params=[1, 5 * VOCAB, 10_000], ids=["row by row", "five rows", "at once"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_whole_vocabulary(temperature: float, chunk: None) -> None:
    check(computed(temperature), temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = computed(0.6, dtype)
    monkeypatch.setattr(module, "CHUNK", 3 * VOCAB)
    for value, truth in zip(computed(0.6, dtype), whole, strict=True):
        torch.testing.assert_close(value, truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wanted", ["logprob", "entropy"])
def test_one_of_the_two_alone(wanted: str, chunk: None) -> None:
    logits, target, weight_p, weight_h = inputs()
    weight = weight_p if wanted == "logprob" else weight_h
    leaf, oracle = logits.clone().requires_grad_(), logits.double().requires_grad_()
    both = vocab_logprobs(leaf, ROWS, target, temperature=0.6, group=None)
    (both[wanted == "entropy"] * weight).sum().backward()
    logp = (oracle[ROWS] / 0.6).log_softmax(-1)
    truth = logp.gather(1, target[:, None])[:, 0] if wanted == "logprob" else -(logp.exp() * logp).sum(-1)
    (truth * weight).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), oracle.grad, rtol=1e-5, atol=2e-4)


def test_bfloat16_logits_are_scored_in_fp32() -> None:
    logits, target, _, _ = inputs()
    logprob, entropy = vocab_logprobs(logits.bfloat16(), ROWS, target, temperature=1.0, group=None)
    assert logprob.dtype == entropy.dtype == torch.float32
    truth = logits.bfloat16().double()[ROWS].log_softmax(-1).gather(1, target[:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), truth, rtol=1e-5, atol=2e-4)


class LargestMade(TorchDispatchMode):  # type: ignore[misc]
    """Sum of the fp32 tensors alive at a time that operations return, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return out


def test_memory_in_fp32_is_that_of_a_part() -> None:
    """512 rows at a vocabulary of 16,384 have 32 MiB in fp32; parts of 2^18 logits have 1 MiB."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(512, 16384, generator=generator).bfloat16().requires_grad_()
    target = torch.randint(0, 16384, (512,), generator=generator)
    rows, before = torch.arange(512), module.CHUNK
    module.CHUNK = 2**18
    try:
        with LargestMade() as made:
            logprob, entropy = vocab_logprobs(logits, rows, target, temperature=0.9, group=None)
            (logprob.sum() + entropy.sum()).backward()
    finally:
        module.CHUNK = before
    print(f"largest sum of fp32 tensors alive: {made.peak / 2**20:.1f} MiB")
    assert made.peak < (memory.LOGIT_PARTS + 0.1) * 2**18 * 4
    assert before == memory.CHUNK


def sharded(temperature: float) -> list[Any]:
    import torch.distributed as dist

    module.CHUNK = 5 * VOCAB
    logits, target, weight_p, weight_h = inputs()
    leaf = logits.chunk(2, 1)[dist.get_rank()].clone().requires_grad_()
    logprob, entropy = vocab_logprobs(leaf, ROWS, target, temperature=temperature, group=dist.group.WORLD)
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
    target, rows = torch.tensor([0, 6, 3, 2, 1]), torch.arange(5)
    torch.set_default_device("meta")
    try:
        logprobs, entropy = vocab_logprobs(logits, rows, target, temperature=0.7, group=None)
        (logprobs.sum() + entropy.sum()).backward()
    finally:
        torch.set_default_device(None)
    assert {t.device.type for t in (logprobs, entropy, logits.grad)} == {"cpu"}
    want = (logits.detach() / 0.7).log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert torch.allclose(logprobs.detach(), want, atol=1e-6)

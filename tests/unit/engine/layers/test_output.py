"""Predictions of an output layer and their gradients against log_softmax in float64; two ranks split the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lora.config.sizing import activations
from areal_lora.engine.layers import output as module
from areal_lora.engine.layers.output import Readout, predictions
from tests.support.distributed.spawn import run_ranks
from tests.support.engine.alive import Alive

N, WIDTH, VOCAB = 37, 8, 24
ROWS = torch.tensor([*range(N - 1), 3, 3, 8])  # one row has no prediction, two have several


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [N, WIDTH], weight, bias, targets, and weights of both columns in the loss."""
    generator = torch.Generator().manual_seed(3)
    hidden = 8 * torch.randn(N, WIDTH, generator=generator)  # sharp and flat rows
    hidden[0] = 0.0
    hidden[1] *= 30  # exp overflows unless the maximum is taken out
    weight, bias = torch.randn(VOCAB, WIDTH, generator=generator), torch.randn(VOCAB, generator=generator)
    targets = torch.randint(0, VOCAB, (len(ROWS),), generator=generator)
    return hidden, weight, bias, targets, torch.randn(len(ROWS), 2, generator=generator)


def expected(temperature: float, columns: int) -> list[Tensor]:
    hidden, weight, bias, targets, factors = inputs()
    leaf = hidden.double().requires_grad_()
    logp = ((leaf @ weight.double().T + bias.double())[ROWS] / temperature).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    found = torch.cat([logp.gather(1, targets[:, None]), entropy], 1)[:, :columns]
    (found * factors[:, :columns]).sum().backward()
    assert leaf.grad is not None
    return [found.detach(), leaf.grad]


def computed(temperature: float, columns: int = 2, rank: int = 0, ranks: int = 1, group: Any = None) -> list[Tensor]:
    hidden, weight, bias, targets, factors = inputs()
    leaf = hidden.requires_grad_()
    part = weight.chunk(ranks)[rank], bias.chunk(ranks)[rank]
    found = predictions(leaf, *part, ROWS, targets, Readout(temperature, columns == 2), group)
    assert found.dtype == torch.float32
    (found * factors[:, :columns]).sum().backward()
    assert leaf.grad is not None
    return [found.detach(), leaf.grad]


def check(found: list[Tensor], temperature: float, columns: int = 2) -> None:
    for value, truth in zip(found, expected(temperature, columns), strict=True):
        torch.testing.assert_close(value.double(), truth, rtol=1e-5, atol=2e-4 / temperature)


@pytest.fixture(params=[1, 5 * VOCAB, 10_000], ids=["row by row", "five rows", "at once"])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", request.param)


@pytest.mark.parametrize("columns", [1, 2], ids=["log-probabilities", "entropies too"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
def test_whole_vocabulary(temperature: float, columns: int, chunk: None) -> None:
    check(computed(temperature, columns), temperature, columns)


def test_bfloat16_logits_are_scored_in_fp32() -> None:
    hidden, weight, bias, targets, _ = inputs()
    half = [x.bfloat16() for x in (hidden, weight, bias)]
    found = predictions(*half, ROWS, targets, Readout(entropy=True))
    assert found.dtype == torch.float32
    logits = torch.nn.functional.linear(*half)
    truth = logits.double()[ROWS].log_softmax(-1).gather(1, targets[:, None])
    torch.testing.assert_close(found[:, :1].double(), truth, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_is_that_of_a_chunk(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rows at a vocabulary of 16,384 have 32 MiB of logits in fp32; chunks of 2^18 logits have 1 MiB."""
    before = module.CHUNK
    monkeypatch.setattr(module, "CHUNK", 2**18)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(512, 2, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(16384, 2, generator=generator).to(dtype)
    targets, rows = torch.randint(0, 16384, (512,), generator=generator), torch.arange(512)
    with Alive() as made:
        predictions(hidden, weight, None, rows, targets, Readout(0.9, entropy=True)).sum().backward()
    print(f"most bytes alive: {made.peak / 2**20:.1f} MiB")
    assert made.peak < activations.chunk_bytes(2**18, hidden.itemsize) + 2**18  # and small ones
    assert before == activations.CHUNK


def test_entropies_take_one_more_pass_over_the_logits_backward() -> None:
    hidden, weight, bias, targets, _ = inputs()

    class Passes(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            self.n += isinstance(made, Tensor) and made.shape == (len(ROWS), VOCAB)
            return made

    counts = []
    for entropy in (False, True):
        found = predictions(hidden.requires_grad_(), weight, bias, ROWS, targets, Readout(0.7, entropy))
        with Passes() as passes:
            found.sum().backward()
        counts.append(passes.n)
    plain, both = counts
    assert plain > 3
    assert both == plain + 1


def sharded(temperature: float) -> list[Any]:
    import torch.distributed as dist

    module.CHUNK = 5 * VOCAB
    return [x.numpy() for x in computed(temperature, 2, dist.get_rank(), 2, dist.group.WORLD)]


@pytest.mark.slow
def test_split_vocabulary(tmp_path: Path) -> None:
    ranks = run_ranks(sharded, 2, tmp_path, (0.6,), timeout_s=200.0)
    assert np.array_equal(ranks[0][0], ranks[1][0])
    check([torch.from_numpy(ranks[0][0]), torch.from_numpy(ranks[0][1] + ranks[1][1])], 0.6)


def test_no_tensor_is_made_on_the_default_device() -> None:
    hidden, weight, bias, targets, _ = inputs()
    leaf = hidden.requires_grad_()
    torch.set_default_device("meta")
    try:
        found = predictions(leaf, weight, bias, ROWS, targets, Readout(0.7, entropy=True))
        found.sum().backward()
    finally:
        torch.set_default_device(None)
    assert {t.device.type for t in (found, leaf.grad)} == {"cpu"}


def test_a_rank_of_padding_has_a_gradient_of_zeros() -> None:
    hidden, weight, bias, *_ = inputs()
    leaf, none = hidden.requires_grad_(), torch.empty(0, dtype=torch.int64)
    found = predictions(leaf, weight, bias, none, none, Readout())
    assert found.shape == (0, 1)
    found.sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad.any()

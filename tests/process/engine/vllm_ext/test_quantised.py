"""A server that rounds the base to fp8 while it loads, with adapters in slots, against transformers rounded alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from areal_lora.algorithms.merging import fp8, magnitudes
from tests.support.engine.vllm_ext.serving import (
    ALPHA,
    PROJECTIONS,
    RANK,
    RunningServer,
    Tensors,
    make_model,
    running_server,
    token_logprobs,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KIND = "fp8_per_channel"
ROWS = [[(37 * i * i + 11 * i * k + k) % 251 + 5 for i in range(240)] for k in range(6)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    folder = tmp_path_factory.mktemp("server") / "run"
    with running_server(folder, model, dtype="float16", engine_args={"quantization": KIND}) as running:
        yield running


def rounded(weight: Tensor) -> Tensor:
    """As the server, which loads it in 16 bits."""
    return fp8(weight.half(), magnitudes(weight.half(), KIND), KIND)


def forward(weight: Tensor, lora: tuple[Tensor, Tensor] | None, x: Tensor) -> Tensor:
    out = linear(x, weight)
    return out if lora is None else out + ALPHA / RANK * linear(linear(x, lora[0]), lora[1])


def truth(model: Path, tensors: Tensors | None, *, rounds: bool) -> list[float]:
    """Scores of `ROWS`, one behind the other, with an adapter that is never rounded."""
    hf: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for name, module in hf.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS:
            lora = tensors and (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"])
            module.forward = partial(forward, rounded(module.weight.data) if rounds else module.weight.data, lora)
    with torch.no_grad():
        return [x for row in ROWS for x in token_logprobs(hf(torch.tensor([row])).logits[0], row)]


def divergence(a: list[float], b: list[float]) -> float:
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / len(a) / 2


@pytest.mark.parametrize("b_scale", [0.0, 0.1])
def test_the_base_is_rounded_and_adapters_are_not(served: RunningServer, b_scale: float) -> None:
    """What remains is the rounding of activations, in which the smallest difference before it decides ties."""
    tensors = served.adapter(1, b_scale)
    ref = served.publish(tensors)
    base, got = ([x for row in ROWS for x in served.score(name, row)] for name in (None, ref))
    own, weights = (divergence(got, truth(served.model, tensors, rounds=rounds)) for rounds in (False, True))
    adapter = divergence(got, base)
    print(
        f"divergence from the trainer {own:.3g}, with the servers' weights {weights:.3g}, of the adapter {adapter:.3g}"
    )
    assert weights < 0.85 * own
    assert own < 1e-3
    assert adapter == 0.0 if b_scale == 0.0 else adapter > 100 * own

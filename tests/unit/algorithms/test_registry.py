"""Every algorithm x reduction on tensors that are not on torch's default device, as on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from areal_lora.algorithms.reduce import Reduction
from areal_lora.config.models import AlgorithmConfig
from areal_lora.trainer.learn import annotate, make_loss
from areal_lora.types import TrainBatch
from tests.support.trainer.recorded import RecordedEngine, make_adapter, make_batch

KINDS = get_args(get_args(AlgorithmConfig)[0])


def _loss(kind: type, reduction: str, minibatches: int, device: str | None) -> dict[str, float]:
    """All numbers and the gradient of one step, with tensors on the CPU while ``device`` is the default one."""
    adapter, batch = make_adapter(), make_batch()
    algorithm = kind(kl_coef=0.1, entropy_coef=0.01, reduction=reduction)
    adapter = replace_algorithm(adapter, algorithm, minibatches)
    logprobs = (batch.rollout_logprobs - 0.05).requires_grad_()
    entropy = torch.rand(batch.n_tokens, generator=torch.Generator().manual_seed(3))
    torch.set_default_device(device)
    try:
        annotated: TrainBatch = annotate(RecordedEngine(logprobs.detach(), batch), adapter, batch)
        sums = make_loss(adapter, 4)(annotated, logprobs, entropy)
        sums.loss.backward()
    finally:
        torch.set_default_device(None)
    assert {v.device.type for v in (annotated.advantages, sums.loss, logprobs.grad, *sums.stats.values())} == {"cpu"}
    seen = {name: float(value) for name, value in sums.stats.items()}
    return seen | {"loss": float(sums.loss.detach()), "gradient": logprobs.grad.tolist()}


def replace_algorithm(adapter, config, minibatches):
    from areal_lora.algorithms.registry import build_algorithm

    updated = adapter.config.model_copy(update={"algorithm": config, "minibatches": minibatches})
    return replace(adapter, config=updated, algorithm=build_algorithm(config, minibatches=minibatches))


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("reduction", get_args(Reduction))
@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_made_on_the_default_device(kind: type, reduction: str, minibatches: int) -> None:
    """As on a GPU, where the default device is not the one that the batch is on."""
    assert _loss(kind, reduction, minibatches, "meta") == _loss(kind, reduction, minibatches, None)

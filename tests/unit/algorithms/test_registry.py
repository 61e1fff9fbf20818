"""Every algorithm and every reduction on tensors that are not on torch's default device, as on a GPU."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch

from areal_lora.algorithms.advantages import ADVANTAGES
from areal_lora.algorithms.losses import ESTIMATORS, LOSSES, Reduction
from areal_lora.algorithms.registry import ReferenceTerms, build_algorithm
from areal_lora.config.sections.adapter import PRESETS, AdvantageName, AlgorithmConfig, Kind, LossName
from areal_lora.trainer.learn import annotate, make_loss
from areal_lora.types import TrainBatch
from tests.support.sizes import sample
from tests.support.trainer.recorded import RecordedEngine, make_adapter, make_batch


def _loss(kind: str, reduction: str, minibatches: int, device: str | None) -> dict[str, float]:
    """All numbers and the gradient of one step, with tensors on the CPU while ``device`` is the default one."""
    batch = make_batch()
    adapter = make_adapter(kind=kind, kl_coef=0.1, entropy_coef=0.01, reduction=reduction, minibatches=minibatches)
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


@pytest.mark.parametrize(
    ("kind", "reduction", "minibatches"), sample(itertools.product(get_args(Kind), get_args(Reduction), [1, 2]), 0, set)
)
def test_no_tensor_is_made_on_the_default_device(kind: str, reduction: str, minibatches: int) -> None:
    """As on a GPU, where the default device is not the one that the batch is on."""
    assert _loss(kind, reduction, minibatches, "meta") == _loss(kind, reduction, minibatches, None)


def test_the_names_of_the_configuration_are_the_rows_of_the_tables() -> None:
    assert set(get_args(AdvantageName)) == set(ADVANTAGES)
    assert set(get_args(LossName)) == set(LOSSES)
    assert set(get_args(AlgorithmConfig.model_fields["kl_estimator"].annotation)) == set(ESTIMATORS)
    assert set(get_args(Kind)) == set(PRESETS)


@pytest.mark.parametrize(
    ("config", "minibatches", "prox", "ref"),
    [
        ({"kind": "grpo"}, 1, False, False),
        ({"kind": "grpo"}, 2, True, False),
        ({"kind": "cispo"}, 2, False, False),  # nothing refers to the proximal policy
        ({"kind": "grpo", "kl_coef": 0.1}, 1, False, True),
        ({"kind": "reinforce_pp", "kl_coef": 0.1}, 1, False, True),
    ],
)
def test_only_passes_that_the_algorithm_needs_are_made(config, minibatches: int, prox: bool, ref: bool) -> None:
    batch = make_batch()
    adapter = make_adapter(**config, minibatches=minibatches)
    engine = RecordedEngine(batch.rollout_logprobs)
    annotated = annotate(engine, adapter, batch)
    assert engine.asked == ["gsm8k"] * prox + [None] * ref
    assert (annotated.prox_logprobs is not None, annotated.ref_logprobs is not None) == (prox, ref)


def test_a_critic_and_a_reference_are_asked_where_the_algorithm_has_them() -> None:
    batch = make_batch()
    adapter = make_adapter(kind="ppo", kl_coef=0.1, reference="initial", reference_refresh_steps=2)
    engine = RecordedEngine(batch.rollout_logprobs)
    annotated = annotate(engine, adapter, batch)
    assert engine.asked == ["gsm8k/reference", "gsm8k/critic"]
    assert annotated.values is not None
    assert annotated.returns is not None
    assert annotated.advantages is not None
    plain = annotate(engine, make_adapter(), batch)
    assert (plain.values, plain.returns) == (None, None)


@pytest.mark.parametrize(
    ("first", "every", "renewed"), [(0, None, [0]), (0, 3, [0, 3, 6, 9]), (4, None, [4]), (4, 2, [4, 6, 8])]
)
def test_the_versions_that_become_the_reference(first: int, every: int | None, renewed: list[int]) -> None:
    terms = ReferenceTerms(first=first, every=every)
    assert [version for version in range(10) if terms.renewed_at(version)] == renewed


def test_a_kl_divergence_in_the_reward_is_not_in_the_loss() -> None:
    config = AlgorithmConfig(kind="reinforce_pp", kl_coef=0.1)
    algorithm = build_algorithm(config, minibatches=1, max_new_tokens=8)
    assert (algorithm.terms.kl_coef, algorithm.shaping.kl_coef) == (0.0, 0.1)
    in_loss = config.model_copy(update={"kl_in": "loss"})
    algorithm = build_algorithm(in_loss, minibatches=1, max_new_tokens=8)
    assert (algorithm.terms.kl_coef, algorithm.shaping.kl_coef) == (0.1, 0.0)

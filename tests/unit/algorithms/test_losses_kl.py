"""KL estimators: values, expectation and gradient against an exact distribution."""

from __future__ import annotations

import pytest
import torch

from areal_lora.algorithms.losses import ESTIMATORS, adapted

POLICY = torch.tensor([0.3, -0.2, 1.1, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.4, 0.2, -0.3], dtype=torch.float64)


@pytest.mark.parametrize(("name", "value"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.1065307)])
def test_values(name: str, value: float) -> None:
    got = ESTIMATORS[name](torch.tensor([-1.0]), torch.tensor([-1.5]))
    assert float(got) == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_k1_and_k3_have_the_divergence_as_their_mean(name: str) -> None:
    policy, reference = POLICY.log_softmax(0), REFERENCE.log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    assert float((policy.exp() * ESTIMATORS[name](policy, reference)).sum()) == pytest.approx(float(exact))


def test_as_a_loss_k1_has_no_mean_gradient_and_k2_that_of_the_divergence() -> None:
    """The reason why the rules refuse k1 in the loss."""
    reference = REFERENCE.log_softmax(0)

    def gradient(name: str) -> torch.Tensor:
        logits = POLICY.clone().requires_grad_()
        policy = logits.log_softmax(0)
        (policy.exp().detach() * ESTIMATORS[name](policy, reference)).sum().backward()
        return logits.grad

    logits = POLICY.clone().requires_grad_()
    policy = logits.log_softmax(0)
    (policy.exp() * (policy - reference)).sum().backward()
    assert torch.allclose(gradient("k2"), logits.grad)
    assert torch.allclose(gradient("k1"), torch.zeros(4, dtype=torch.float64))


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (9.0, 1.02), (0.09, 0.99), (0.001, 0.98), (-3.0, 0.98)]
)
def test_an_adaptive_coefficient_follows_the_divergence_in_small_steps(kl: float, factor: float) -> None:
    assert adapted(0.5, kl, 0.1) == pytest.approx(0.5 * factor)
    assert adapted(0.5, kl, None) == 0.5, "without a target it is fixed"


@pytest.mark.parametrize("kl", [None, 0.0, float("nan"), float("inf")])
def test_a_step_that_measured_nothing_does_not_change_the_coefficient(kl: float | None) -> None:
    assert adapted(0.5, kl, 0.1) == 0.5

"""The decoupled PPO objective against a float64 loop, and its gradient against autograd of that loop."""

from __future__ import annotations

import math
import random

import pytest
import torch

from areal_lora.algorithms.losses import PolicyTerms, decoupled_ppo
from areal_lora.algorithms.reduce import denominator, token_weights

TERMS = PolicyTerms(eps_clip=0.2, eps_clip_high=0.28, behaviour_cap=2.0, kl_coef=0.1, entropy_coef=0.01)


def _loop(terms: PolicyTerms, cur, prox, roll, adv, wgt, ref, ent) -> float:
    """One token after the other, straight from the formula."""
    total = 0.0
    for c, p, b, a, w, r, h in zip(cur, prox, roll, adv, wgt, ref, ent, strict=True):
        if w == 0:
            continue
        behaviour = math.exp(p - b)
        if behaviour <= terms.behaviour_cap:
            ratio = math.exp(c - p)
            clipped = min(max(ratio, 1 - terms.eps_clip), 1 + terms.eps_clip_high)
            total -= w * behaviour * min(ratio * a, clipped * a)
        total += terms.kl_coef * w * (math.exp(r - c) - 1 - (r - c)) - terms.entropy_coef * w * h
    return total


def _case(seed: int, n: int = 60) -> dict[str, list[float]]:
    rng = random.Random(seed)
    prox = [-rng.random() * 3 for _ in range(n)]
    return {
        "cur": [p + rng.gauss(0, 0.3) for p in prox],
        "prox": prox,
        "roll": [p + rng.gauss(0, 0.5) for p in prox],
        "adv": [rng.gauss(0, 1) for _ in range(n)],
        "wgt": [float(rng.random() < 0.7) for _ in range(n)],
        "ref": [p + rng.gauss(0, 0.3) for p in prox],
        "ent": [rng.random() for _ in range(n)],
    }


def _ours(case: dict[str, list[float]], logprobs: torch.Tensor) -> torch.Tensor:
    t = {k: torch.tensor(v, dtype=torch.float64) for k, v in case.items()}
    return decoupled_ppo(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=t["prox"],
        rollout_logprobs=t["roll"],
        advantages=t["adv"],
        weights=t["wgt"],
        ref_logprobs=t["ref"],
        entropy=t["ent"],
    ).loss


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradient_equal_the_loop(seed: int) -> None:
    case = _case(seed)
    logprobs = torch.tensor(case["cur"], dtype=torch.float64, requires_grad=True)
    loss = _ours(case, logprobs)
    assert float(loss.detach()) == pytest.approx(_loop(TERMS, *case.values()), rel=1e-6), f"seed {seed}"
    loss.backward()
    step = 1e-6
    for i in range(0, len(case["cur"]), 7):
        up, down = dict(case), dict(case)
        up["cur"] = [*case["cur"][:i], case["cur"][i] + step, *case["cur"][i + 1 :]]
        down["cur"] = [*case["cur"][:i], case["cur"][i] - step, *case["cur"][i + 1 :]]
        numeric = (_loop(TERMS, *up.values()) - _loop(TERMS, *down.values())) / (2 * step)
        assert float(logprobs.grad[i]) == pytest.approx(numeric, abs=1e-6), f"seed {seed}, token {i}"


def test_shifting_the_mask_by_one_changes_the_loss() -> None:
    case = _case(11)
    before = _loop(TERMS, *case.values())
    shifted = {**case, "wgt": [0.0, *case["wgt"][:-1]]}
    assert float(_ours(shifted, torch.tensor(case["cur"], dtype=torch.float64))) != pytest.approx(before, rel=1e-3)


def test_masked_tokens_may_hold_anything() -> None:
    logprobs = torch.tensor([float("-inf"), -1.0, float("nan")], requires_grad=True)
    sums = decoupled_ppo(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=None,
        rollout_logprobs=torch.tensor([0.0, -1.0, 7.0]),
        advantages=torch.tensor([0.0, 2.0, 0.0]),
        weights=torch.tensor([0.0, 1.0, 0.0]),
    )
    sums.loss.backward()
    assert float(sums.loss.detach()) == pytest.approx(-2.0)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.0, 0.0])


def test_a_token_far_from_its_behaviour_policy_leaves_the_loss() -> None:
    logprobs = torch.tensor([-0.1, -0.1], requires_grad=True)
    sums = decoupled_ppo(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=None,
        rollout_logprobs=torch.tensor([-0.1, -3.0]),
        advantages=torch.ones(2),
        weights=torch.ones(2),
    )
    sums.loss.backward()
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert float(sums.stats["capped"]) == 1


def test_without_proximal_the_current_policy_stands_in() -> None:
    logprobs = torch.tensor([-0.5, -0.7], requires_grad=True)
    sums = decoupled_ppo(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=None,
        rollout_logprobs=torch.tensor([-0.6, -0.6]),
        advantages=torch.tensor([1.0, -1.0]),
        weights=torch.ones(2),
    )
    sums.loss.backward()
    want = [-math.exp(0.1), math.exp(-0.1)]
    assert logprobs.grad.tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("reduction", "weights", "divisor"),
    [("token", [0, 1, 1, 0, 1], 3.0), ("sequence", [0, 0.5, 0.5, 0, 1], 2.0), ("constant", [0, 1, 1, 0, 1], 20.0)],
)
def test_reductions(reduction: str, weights: list[float], divisor: float) -> None:
    mask = torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)
    cu_seqlens = torch.tensor([0, 3, 5])
    assert token_weights(mask, cu_seqlens, reduction).tolist() == weights
    assert denominator(mask, 2, reduction, max_new_tokens=10) == divisor


@pytest.mark.parametrize("prox", [None, torch.tensor([-2.0, -1.0])])
def test_a_masked_token_far_from_the_reference_leaves_no_trace_in_the_gradient(prox: torch.Tensor | None) -> None:
    """``exp(93)`` is infinite in fp32; computed before the mask it makes the gradient NaN while the loss is finite."""
    logprobs = torch.tensor([-95.0, -1.0], requires_grad=True)
    sums = decoupled_ppo(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=prox,
        rollout_logprobs=torch.tensor([-2.0, -1.0]),
        advantages=torch.tensor([0.0, 1.0]),
        weights=torch.tensor([0.0, 1.0]),
        ref_logprobs=torch.tensor([-2.0, -1.5]),
        entropy=torch.tensor([float("inf"), 0.5], requires_grad=True),
    )
    sums.loss.backward()
    assert math.isfinite(float(sums.loss.detach()))
    # r = 1, so d loss / d logp is -A from the ratio and kl_coef (1 - exp(ref - logp)) from k3.
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.0 + 0.1 * (1 - math.exp(-0.5))])


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_trained_token_that_moved_beyond_what_fp32_can_hold_has_a_finite_gradient(advantage: float) -> None:
    logprobs = torch.tensor([-2.0, -0.5], requires_grad=True)
    sums = decoupled_ppo(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=torch.tensor([-95.0, -0.5]),
        rollout_logprobs=torch.tensor([-95.0, -0.5]),
        advantages=torch.full((2,), advantage),
        weights=torch.ones(2),
        ref_logprobs=torch.tensor([120.0, -0.5]),
    )
    sums.loss.backward()
    assert torch.isfinite(sums.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert float(logprobs.grad[0]) < 0 if advantage > 0 else float(logprobs.grad[0]) != 0, "towards the reference"

"""Every objective against an unpacked float64 loop, its gradient against finite differences of that loop."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from areal_lora.algorithms.losses import (
    ESTIMATORS,
    LOSSES,
    Behaviour,
    Clip,
    PolicyTerms,
    behaviour_weights,
    denominator,
    k3,
    policy_loss,
    token_weights,
    value_loss,
)
from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.sections.adapter import AlgorithmConfig
from tests.support.trainer.packed import Row, batch_of, bounds, draw_rows, packed

MASK = Behaviour(correction="mask", level="token", cap=2.0, floor=0.0)
TERMS = PolicyTerms(
    loss=LOSSES["ppo"],
    clip=Clip(low=0.2, high=0.28),
    ratio="proximal",
    behaviour=MASK,
    kl=k3,
    kl_coef=0.1,
    entropy_coef=0.01,
)
REDUCTIONS = ("token", "sequence", "constant")
VARIANTS = {
    "ppo": TERMS,
    "dual clip": replace(TERMS, clip=Clip(low=0.2, high=0.2, dual=1.3)),
    "gspo": replace(TERMS, loss=LOSSES["gspo"], clip=Clip(low=0.03, high=0.05)),
    "cispo": replace(
        TERMS,
        loss=LOSSES["cispo"],
        clip=Clip(low=1.0, high=0.4),
        ratio="rollout",
        behaviour=replace(MASK, correction="none"),
    ),
    "reinforce": replace(TERMS, loss=LOSSES["reinforce"]),
    "ratio to the rollout": replace(TERMS, ratio="rollout", behaviour=replace(MASK, correction="none")),
    "TIS": replace(TERMS, behaviour=replace(MASK, correction="truncate", cap=1.2)),
    "TIS of sequences": replace(TERMS, behaviour=replace(MASK, correction="truncate", level="sequence")),
    "MIS of sequences": replace(TERMS, behaviour=replace(MASK, level="sequence")),
    "MIS of geometric means": replace(TERMS, behaviour=replace(MASK, level="geometric", floor=0.97, cap=1.03)),
    "sapo": replace(TERMS, loss=LOSSES["sapo"]),
    "dppo": replace(
        TERMS,
        loss=LOSSES["dppo"],
        clip=Clip(low=0.04, high=0.06),
        ratio="rollout",
        behaviour=replace(MASK, correction="none"),
    ),
    "kpop": replace(
        TERMS,
        loss=LOSSES["kpop"],
        clip=Clip(low=0.004, high=0.006),
        ratio="rollout",
        behaviour=replace(MASK, correction="none"),
    ),
    "IcePop": replace(TERMS, behaviour=replace(MASK, floor=0.7, cap=1.5)),
    "k1": replace(TERMS, kl=ESTIMATORS["k1"]),
    "k2": replace(TERMS, kl=ESTIMATORS["k2"]),
}


def _loop(
    name: str,
    rows: list[Row],
    advantages: list[float],
    reduction: str,
    frozen: list[list[float]],
    unmoved: bool = False,
) -> float:
    """Sequence by sequence, token by token, straight from the formulas. ``frozen`` stands for a stopped gradient."""
    terms, total = VARIANTS[name], 0.0
    for row, a, still in zip(rows, advantages, frozen, strict=True):
        at = [t for t, on in enumerate(row.mask) if on]
        old = row.rollout if terms.ratio == "rollout" else still if unmoved else row.prox
        product = math.exp(sum(row.prox[t] - row.rollout[t] for t in at))
        mean = math.exp(sum(row.current[t] - old[t] for t in at) / len(at))
        for t in at:
            weight = 1 / len(at) if reduction == "sequence" else 1.0
            if row.given:
                total -= weight * row.current[t]
                continue
            w = product if terms.behaviour.level == "sequence" else math.exp(row.prox[t] - row.rollout[t])
            if terms.behaviour.level == "geometric":
                w = product ** (1 / len(at))
            if terms.behaviour.correction == "none":
                w = 1.0
            elif terms.behaviour.correction == "truncate":
                w = min(w, terms.behaviour.cap)
            elif not terms.behaviour.floor <= w <= terms.behaviour.cap:
                w = 0.0
            low, high = 1 - terms.clip.low, 1 + terms.clip.high
            r = mean if name == "gspo" else math.exp(row.current[t] - old[t])
            if name == "cispo":
                objective = min(max(math.exp(still[t] - old[t]), low), high) * a * row.current[t]
            elif name == "reinforce":
                objective = a * row.current[t]
            elif name == "sapo":
                tau = 1.0 if a > 0 else 1.05
                objective = 4 / tau / (1 + math.exp(-tau * (r - 1))) * a
            elif name == "dppo":
                moved = math.exp(still[t]) - math.exp(old[t])
                stays = moved > terms.clip.high if a > 0 else moved < -terms.clip.low
                objective = 0.0 if stays else min(math.exp(still[t] - old[t]), 20.0) * a * row.current[t]
            elif name == "kpop":
                p, q = (min(max(math.exp(x), 1e-6), 1 - 1e-6) for x in (still[t], old[t]))
                there, back = (x * math.log(x / y) + (1 - x) * math.log((1 - x) / (1 - y)) for x, y in ((p, q), (q, p)))
                stays = there > terms.clip.high or back > terms.clip.low
                objective = 0.0 if stays else min(math.exp(still[t] - old[t]), 20.0) * a * row.current[t]
            else:
                objective = min(r * a, min(max(r, low), high) * a)
                if terms.clip.dual and a < 0:
                    objective = max(objective, terms.clip.dual * a)
            d = row.ref[t] - row.current[t]
            kl = {"k1": -d, "k2": d * d / 2}.get(name, math.exp(d) - 1 - d)
            total -= weight * (w * objective - terms.kl_coef * kl + terms.entropy_coef * row.entropy[t])
    return total


def _ours(
    terms: PolicyTerms,
    rows: list[Row],
    advantages: list[float],
    reduction: str,
    logprobs: torch.Tensor | None = None,
    unmoved: bool = False,
) -> torch.Tensor:
    """The packed loss of ``rows``; ``logprobs`` [t] is given where its gradient is wanted."""
    batch = batch_of(rows)
    lengths = batch.cu_seqlens.diff()
    spread = torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths) * batch.loss_mask
    return policy_loss(
        terms,
        logprobs=packed(rows, "current") if logprobs is None else logprobs,
        prox_logprobs=batch.prox_logprobs,
        rollout_logprobs=packed(rows, "rollout"),
        advantages=spread,
        weights=token_weights(batch.loss_mask, batch.cu_seqlens, reduction).double(),
        cu_seqlens=batch.cu_seqlens,
        given=batch.given,
        ref_logprobs=batch.ref_logprobs,
        entropy=packed(rows, "entropy"),
        unmoved=unmoved,
    ).loss


def _advantages(rows: list[Row]) -> list[float]:
    """One per row, of both signs, from what the row holds."""
    return [3 * row.reward - 1.5 for row in rows]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("seed", "unmoved"), [(0, False), (1, False), (2, True)])
def test_loss_and_gradient_equal_the_loop(name: str, reduction: str, seed: int, unmoved: bool) -> None:
    """Where the policy is unmoved, current and proximal log-probabilities differ by dropout."""
    rows = draw_rows(seed, given=0.2)
    advantages, frozen = _advantages(rows), [list(row.current) for row in rows]
    logprobs = packed(rows, "current").requires_grad_()
    loss = _ours(VARIANTS[name], rows, advantages, reduction, logprobs, unmoved)
    # The weights of the reduction are float32.
    assert float(loss.detach()) == pytest.approx(_loop(name, rows, advantages, reduction, frozen, unmoved), rel=1e-6)
    loss.backward()
    at, step = 0, 1e-6
    for row, (begin, _) in zip(rows, pairwise(bounds(rows).tolist()), strict=True):
        t = at = (at + 5) % len(row.mask)
        value, numeric = row.current[t], 0.0
        for sign in (1, -1):
            row.current[t] = value + sign * step
            numeric += sign * _loop(name, rows, advantages, reduction, frozen, unmoved) / (2 * step)
        row.current[t] = value
        assert float(logprobs.grad[begin + t]) == pytest.approx(numeric, abs=1e-6), f"seed {seed}, token {t}"


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    name=st.sampled_from(sorted(VARIANTS)),
    reduction=st.sampled_from(REDUCTIONS),
    order=st.randoms(use_true_random=False),
    dp=st.sampled_from([1, 2, 4]),
)
def test_order_micro_batches_and_ranks_change_neither_loss_nor_gradient(seed, name, reduction, order, dp) -> None:
    """Sums of parts over the denominator of the whole; micro-batches and data-parallel ranks are such parts."""
    rows = draw_rows(seed, given=0.2)
    terms, batch = VARIANTS[name], batch_of(rows)
    divisor = denominator(batch.loss_mask, batch.cu_seqlens, reduction, max_new_tokens=12)

    def step(parts: list[list[Row]]) -> tuple[float, dict[int, list[float]]]:
        total, gradients = 0.0, {}
        for part in parts:
            logprobs = packed(part, "current").requires_grad_()
            loss = _ours(terms, part, _advantages(part), reduction, logprobs) / divisor
            loss.backward()
            total += float(loss.detach())
            for row, (a, b) in zip(part, pairwise(bounds(part).tolist()), strict=True):
                gradients[id(row)] = logprobs.grad[a:b].tolist()
        return total, gradients

    mixed = order.sample(rows, len(rows))
    parts = [mixed[rank::dp] for rank in range(dp)]
    parts = [half for part in parts for half in (part[: len(part) // 2], part[len(part) // 2 :]) if half]
    (whole, before), (summed, after) = step([rows]), step(parts)
    assert summed == pytest.approx(whole, abs=1e-6, rel=1e-6)
    for row in rows:
        assert after[id(row)] == pytest.approx(before[id(row)], abs=1e-6)


def test_sums_of_sampled_tokens_do_not_depend_on_given_answers_beside_them() -> None:
    rows = draw_rows(7, given=0.4)
    sampled = [row for row in rows if not row.given]
    assert 0 < len(sampled) < len(rows)
    found = []
    for chosen in (rows, sampled):
        batch = batch_of(chosen)
        found.append(
            policy_loss(
                TERMS,
                logprobs=packed(chosen, "current"),
                prox_logprobs=batch.prox_logprobs,
                rollout_logprobs=packed(chosen, "rollout"),
                advantages=torch.ones(batch.n_tokens),
                weights=token_weights(batch.loss_mask, batch.cu_seqlens, "token").double(),
                cu_seqlens=batch.cu_seqlens,
                given=batch.given,
                ref_logprobs=batch.ref_logprobs,
            ).stats
        )
    assert found[0]["tokens"] > found[0]["sampled_tokens"] == found[1]["tokens"]
    for name in ("kl", "clipped", "capped", "behaviour_abs"):
        assert float(found[0][name]) == pytest.approx(float(found[1][name])), name


@pytest.mark.parametrize("name", VARIANTS)
def test_an_unrelated_sequence_changes_no_other_gradient(name: str) -> None:
    rows = draw_rows(5)
    stranger, *others = rows
    gradients = []
    for chosen in (rows, others):
        logprobs = packed(chosen, "current").requires_grad_()
        _ours(VARIANTS[name], chosen, _advantages(chosen), "sequence", logprobs).backward()
        gradients.append(logprobs.grad)
    assert torch.equal(gradients[0][len(stranger.mask) :], gradients[1])


def test_shifting_the_mask_by_one_changes_the_loss() -> None:
    rows = draw_rows(11)
    before = float(_ours(TERMS, rows, _advantages(rows), "token"))
    for row in rows:
        row.mask = [False, *row.mask[:-1]] if len(row.mask) > 2 else row.mask
    assert float(_ours(TERMS, rows, _advantages(rows), "token")) != pytest.approx(before, rel=1e-3)


def test_masked_tokens_may_hold_anything() -> None:
    logprobs = torch.tensor([float("-inf"), -1.0, float("nan")], requires_grad=True)
    sums = policy_loss(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=None,
        rollout_logprobs=torch.tensor([0.0, -1.0, 7.0]),
        advantages=torch.tensor([0.0, 2.0, 0.0]),
        cu_seqlens=torch.tensor([0, 3]),
        given=torch.tensor([False]),
        weights=torch.tensor([0.0, 1.0, 0.0]),
    )
    sums.loss.backward()
    assert float(sums.loss.detach()) == pytest.approx(-2.0)
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.0, 0.0])


def test_a_token_far_from_its_behaviour_policy_leaves_the_loss() -> None:
    logprobs = torch.tensor([-0.1, -0.1], requires_grad=True)
    sums = policy_loss(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=None,
        rollout_logprobs=torch.tensor([-0.1, -3.0]),
        advantages=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2]),
        given=torch.tensor([False]),
        weights=torch.ones(2),
    )
    sums.loss.backward()
    assert logprobs.grad.tolist() == [-1.0, 0.0]
    assert float(sums.stats["capped"]) == 1


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("name", "p"), [("dppo", 0.142), ("kpop", 0.009)])
def test_a_rare_token_within_the_bound_of_probabilities_does_not_outweigh_the_others(
    name: str, p: float, sign: float
) -> None:
    """Of a token with p_old = 1e-6 the ratio is 9000 and more; the gradient of each other token is 1."""
    preset = build_algorithm(AlgorithmConfig.model_validate({"kind": name}), minibatches=1, max_new_tokens=8)
    old = torch.full((64,), -0.7)
    old[5] = math.log(1e-6)
    logprobs = old.clone()
    logprobs[5] = math.log(p)
    logprobs.requires_grad_()
    sums = policy_loss(
        preset.terms,
        logprobs=logprobs,
        prox_logprobs=None,
        rollout_logprobs=old,
        advantages=torch.full((64,), sign),
        cu_seqlens=torch.tensor([0, 64]),
        given=torch.tensor([False]),
        weights=torch.ones(64),
    )
    sums.loss.backward()
    assert logprobs.grad is not None
    want = [-sign * (20.0 if t == 5 else 1.0) for t in range(64)]
    assert logprobs.grad.tolist() == pytest.approx(want, rel=1e-5)
    assert float(sums.stats["clipped"]) == 1


@pytest.mark.parametrize("n_tokens", [8, 512])
def test_a_geometric_mean_keeps_long_answers_and_one_impossible_token_masks_its_sequence(n_tokens: int) -> None:
    """Drift of 0.004 a token: the product of 512 is 7.8, the mean 1.004 whatever the length."""
    gap, on = torch.full((2 * n_tokens,), 0.004, dtype=torch.float64), torch.ones(2 * n_tokens, dtype=torch.bool)
    bounds = torch.tensor([0, n_tokens, 2 * n_tokens])
    mean = replace(MASK, level="geometric", cap=1.01, floor=0.99)
    assert behaviour_weights(mean, gap, on, bounds).tolist() == pytest.approx([math.exp(0.004)] * 2 * n_tokens)
    product = behaviour_weights(replace(mean, level="sequence", cap=2.0), gap, on, bounds)
    assert bool((product > 0).all()) == (n_tokens == 8)
    gap[0], gap[1:3] = -9.3, 4.65  # exp(-9.3) is below 1e-4, and the mean is as before
    masked = behaviour_weights(mean, gap, on, bounds) > 0
    assert masked.tolist() == [False] * n_tokens + [True] * n_tokens


def test_without_proximal_the_current_policy_stands_in() -> None:
    logprobs = torch.tensor([-0.5, -0.7], requires_grad=True)
    sums = policy_loss(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=None,
        rollout_logprobs=torch.tensor([-0.6, -0.6]),
        advantages=torch.tensor([1.0, -1.0]),
        cu_seqlens=torch.tensor([0, 2]),
        given=torch.tensor([False]),
        weights=torch.ones(2),
    )
    sums.loss.backward()
    want = [-math.exp(0.1), math.exp(-0.1)]
    assert logprobs.grad.tolist() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("prox", [None, torch.tensor([-2.0, -1.0])])
def test_a_masked_token_far_from_the_reference_leaves_no_trace_in_the_gradient(prox: torch.Tensor | None) -> None:
    """``exp(93)`` is infinite in fp32; computed before the mask it makes the gradient NaN while the loss is finite."""
    logprobs = torch.tensor([-95.0, -1.0], requires_grad=True)
    sums = policy_loss(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=prox,
        rollout_logprobs=torch.tensor([-2.0, -1.0]),
        advantages=torch.tensor([0.0, 1.0]),
        cu_seqlens=torch.tensor([0, 2]),
        given=torch.tensor([False]),
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
    sums = policy_loss(
        TERMS,
        logprobs=logprobs,
        prox_logprobs=torch.tensor([-95.0, -0.5]),
        rollout_logprobs=torch.tensor([-95.0, -0.5]),
        advantages=torch.full((2,), advantage),
        cu_seqlens=torch.tensor([0, 2]),
        given=torch.tensor([False]),
        weights=torch.ones(2),
        ref_logprobs=torch.tensor([120.0, -0.5]),
    )
    sums.loss.backward()
    assert torch.isfinite(sums.loss)
    assert torch.isfinite(logprobs.grad).all()
    assert float(logprobs.grad[0]) < 0 if advantage > 0 else float(logprobs.grad[0]) != 0, "towards the reference"


def _value_rows(rows: list[Row], clip: float | None, reduction: str, values: list[list[float]]) -> float:
    """Half the larger of both squared errors, token by token; the reward stands for a token's return."""
    total = 0.0
    for row, current in zip(rows, values, strict=True):
        weight = 1 / sum(row.mask) if reduction == "sequence" else 1.0
        for t, on in enumerate(row.mask):
            near = current[t] if clip is None else min(max(current[t], row.value[t] - clip), row.value[t] + clip)
            total += on * weight * max((current[t] - row.reward) ** 2, (near - row.reward) ** 2) / 2
    return total


def _value_loss(rows: list[Row], clip: float | None, reduction: str, values: torch.Tensor) -> torch.Tensor:
    batch = batch_of(rows)
    return value_loss(
        clip,
        values=values,
        before=packed(rows, "value"),
        returns=batch.rewards.repeat_interleave(batch.cu_seqlens.diff()),
        weights=token_weights(batch.loss_mask, batch.cu_seqlens, reduction).double(),
    ).loss


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_value_loss_and_gradient_equal_the_loop(seed: int, clip: float | None, reduction: str) -> None:
    rows = draw_rows(seed)
    draw = torch.Generator().manual_seed(seed)
    at, step = bounds(rows).tolist(), 1e-6
    current = [[v + float(torch.randn((), generator=draw)) / 4 for v in row.value] for row in rows]
    values = torch.tensor([v for row in current for v in row], dtype=torch.float64, requires_grad=True)
    loss = _value_loss(rows, clip, reduction, values)
    assert float(loss.detach()) == pytest.approx(_value_rows(rows, clip, reduction, current), rel=1e-6)
    loss.backward()
    for row, begin in zip(current, at, strict=False):
        for t, value in enumerate(row):
            row[t] = value + step
            up = _value_rows(rows, clip, reduction, current)
            row[t] = value - step
            down = _value_rows(rows, clip, reduction, current)
            row[t] = value
            assert float(values.grad[begin + t]) == pytest.approx((up - down) / (2 * step), abs=1e-6), f"seed {seed}"


def test_an_unrelated_sequence_changes_no_value_gradient() -> None:
    rows = draw_rows(5)
    alone, beside = packed(rows[1:], "current").requires_grad_(), packed(rows, "current").requires_grad_()
    _value_loss(rows[1:], 0.2, "sequence", alone).backward()
    _value_loss(rows, 0.2, "sequence", beside).backward()
    assert torch.equal(beside.grad[len(rows[0].mask) :], alone.grad)


def test_a_value_off_the_mask_may_be_anything() -> None:
    rows = draw_rows(6)
    mask = batch_of(rows).loss_mask
    values = torch.where(mask, packed(rows, "current"), math.nan).requires_grad_()
    loss = _value_loss(rows, 0.2, "token", values)
    loss.backward()
    assert bool(loss.isfinite())
    assert not values.grad[~mask].any()

"""From rewards to token advantages: length penalty, KL divergence in the reward, samples of several sequences."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st

from areal_lora.algorithms.advantages import ADVANTAGES, Discount, Shaping, overlong_penalty, token_credit
from areal_lora.algorithms.losses import ESTIMATORS, k1
from tests.support.trainer.packed import Row, batch_of, draw_rows

PLAIN = Shaping(
    kl=k1, kl_coef=0.0, overlong_from=20, overlong_penalty=1.0, max_new_tokens=20, discount=Discount(gamma=1, lam=1)
)
LIMITED = replace(PLAIN, kl_coef=0.3, overlong_from=4.0, max_new_tokens=12)
BATCH_WIDE = {"gdpo", "gae", "gpg", "reinforce_pp", "reinforce_pp_baseline", "batch", "group_mean_batch_std"}


def _by_row(rows: list[Row], values: list[float]) -> dict[int, list[float]]:
    """Values of each row, whatever the order of the rows."""
    at, found = 0, {}
    for row in rows:
        found[id(row)] = values[at : at + len(row.mask)]
        at += len(row.mask)
    return found


def _loop(name: str, shaping: Shaping, rows: list[Row]) -> list[float]:
    """Token by token. One advantage per sample by the tested row, on rewards that are computed here."""
    samples = list(dict.fromkeys(row.sample for row in rows))
    kl = [[on * shaping.kl_coef * (p - r) for on, p, r in zip(w.mask, w.rollout, w.ref, strict=True)] for w in rows]
    whitened = ADVANTAGES[name].whitened
    rewards, groups, lengths = {}, {}, {}
    for s in samples:
        mine = [i for i, row in enumerate(rows) if row.sample == s]
        lengths[s] = sum(sum(rows[i].mask) for i in mine)
        buffer = shaping.max_new_tokens - shaping.overlong_from
        over = min(1.0, max(0.0, (lengths[s] - shaping.overlong_from) / buffer)) if buffer else 0.0
        cost = 0.0 if whitened else sum(sum(kl[i]) for i in mine)
        rewards[s], groups[s] = rows[mine[0]].reward - shaping.overlong_penalty * over - cost, rows[mine[0]].group

    def advantage(s: int) -> float:
        group = [t for t in samples if groups[t] == groups[s]]
        values = [rewards[t] for t in group]
        if name == "grpo":
            return (
                0.0
                if len(set(values)) == 1
                else (rewards[s] - statistics.fmean(values)) / (statistics.stdev(values) + 1e-6)
            )
        if name == "opo":
            return rewards[s] - sum(lengths[t] * rewards[t] for t in group) / sum(lengths[t] for t in group)
        return rewards[s] - (statistics.fmean(values) if name == "reinforce_pp_baseline" else 0.0)

    tokens = [
        (on, advantage(row.sample) - whitened * sum(kl[i][t:]))
        for i, row in enumerate(rows)
        for t, on in enumerate(row.mask)
    ]
    if not whitened:
        return [a * on for on, a in tokens]
    chosen = [a for on, a in tokens if on]
    mean, std = statistics.fmean(chosen), statistics.pstdev(chosen)
    return [on * (a - mean) / (std + 1e-6) for on, a in tokens]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shaping", [PLAIN, LIMITED])
@pytest.mark.parametrize("name", ["grpo", "opo", "reinforce_pp", "reinforce_pp_baseline"])
def test_token_advantages_equal_the_loop(name: str, shaping: Shaping, seed: int) -> None:
    rows = draw_rows(seed)
    got = token_credit(ADVANTAGES[name], shaping, batch_of(rows)).advantages
    assert got.tolist() == pytest.approx(_loop(name, shaping, rows), abs=2e-6), f"seed {seed}"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["none", "grpo", "reinforce_pp_baseline"])
def test_distillation_adds_each_tokens_reverse_divergence_to_its_own_advantage(name: str, seed: int) -> None:
    """log teacher - log behaviour times the weight, beside the rewards' advantage if there is one."""
    rows = draw_rows(seed)
    beside = [0.0] * sum(len(row.mask) for row in rows) if name == "none" else _loop(name, PLAIN, rows)
    tokens = [(on, r - p) for row in rows for on, r, p in zip(row.mask, row.ref, row.rollout, strict=True)]
    want = [a + 0.3 * gain * on for a, (on, gain) in zip(beside, tokens, strict=True)]
    got = token_credit(ADVANTAGES[name], replace(PLAIN, kl_coef=0.3, kl_own=True), batch_of(rows)).advantages
    assert got.tolist() == pytest.approx(want, abs=2e-6), f"seed {seed}"


@pytest.mark.parametrize("discount", [Discount(gamma=1.0, lam=1.0), Discount(gamma=0.97, lam=0.9)])
@pytest.mark.parametrize("shaping", [PLAIN, LIMITED])
@pytest.mark.parametrize("seed", range(4))
def test_a_critics_credit_equals_the_loop(seed: int, shaping: Shaping, discount: Discount) -> None:
    """Row by row from the end: r + gamma V' - V, with the KL divergence as a cost of the token itself."""
    rows, shaping = draw_rows(seed), replace(shaping, discount=discount)
    lengths = {row.sample: sum(sum(r.mask) for r in rows if r.sample == row.sample) for row in rows}
    want_a, want_r = [], []
    for row in rows:
        buffer = shaping.max_new_tokens - shaping.overlong_from
        over = min(1.0, max(0.0, (lengths[row.sample] - shaping.overlong_from) / buffer)) if buffer else 0.0
        reward, ahead, value = row.reward - shaping.overlong_penalty * over, 0.0, 0.0
        found = {}
        for t in reversed([t for t, on in enumerate(row.mask) if on]):
            r = reward - shaping.kl_coef * (row.rollout[t] - row.ref[t])
            ahead = r + discount.gamma * value - row.value[t] + discount.gamma * discount.lam * ahead
            found[t], value, reward = ahead, row.value[t], 0.0
        want_a += [found.get(t) for t in range(len(row.mask))]
        want_r += [found[t] + row.value[t] if t in found else 0.0 for t in range(len(row.mask))]
    trained = [a for a in want_a if a is not None]
    mean, std = statistics.fmean(trained), statistics.pstdev(trained)
    credit = token_credit(ADVANTAGES["gae"], shaping, batch_of(rows))
    assert credit.returns is not None
    assert credit.returns.tolist() == pytest.approx(want_r, abs=2e-6), f"seed {seed}"
    whitened = [0.0 if a is None else (a - mean) / (std + 1e-6) for a in want_a]
    assert credit.advantages.tolist() == pytest.approx(whitened, abs=2e-6), f"seed {seed}"
    # Before they are brought to mean 0 over the batch, no sequence is seen by another one.
    alone = token_credit(replace(ADVANTAGES["gae"], whitened=False), shaping, batch_of(rows[:1]))
    first = [a or 0.0 for a in want_a[: len(rows[0].mask)]]
    if lengths[rows[0].sample] == sum(rows[0].mask):
        assert alone.advantages.tolist() == pytest.approx(first, abs=2e-6)


@pytest.mark.parametrize("discount", [Discount(gamma=1.0, lam=1.0), Discount(gamma=0.97, lam=0.9)])
@pytest.mark.parametrize("seed", range(4))
def test_a_critic_sees_what_a_turn_earned_at_its_last_token(seed: int, discount: Discount) -> None:
    """Returns by the definition, sum by sum: an earlier turn's reward is none of a later token's."""
    rows, rng, want = draw_rows(seed), random.Random(seed), []
    turns = [[rng.choice([0.0, -1.0, 2 * rng.random()]) * rng.choice([0, on]) for on in row.mask] for row in rows]
    for row, earned in zip(rows, turns, strict=True):
        on = [t for t, trained in enumerate(row.mask) if trained]
        rewards = [earned[t] for t in on]
        rewards[-1] += row.reward - sum(earned)
        values = [*(row.value[t] for t in on), 0.0]
        deltas = [r + discount.gamma * values[i + 1] - values[i] for i, r in enumerate(rewards)]
        factor, found = discount.gamma * discount.lam, dict.fromkeys(range(len(row.mask)), 0.0)
        for i, t in enumerate(on):
            found[t] = values[i] + sum(factor ** (j - i) * delta for j, delta in enumerate(deltas) if j >= i)
        want += found.values()
    plain = batch_of(rows)
    batch = replace(plain, turn_rewards=torch.tensor([r for row in turns for r in row], dtype=torch.float64))
    shaping = replace(PLAIN, discount=discount, overlong_penalty=0.0)
    credit = token_credit(ADVANTAGES["gae"], shaping, batch)
    assert credit.returns is not None
    assert credit.returns.tolist() == pytest.approx(want, abs=2e-6), f"seed {seed}"
    for name in sorted({*ADVANTAGES} - {"gae"}):
        same = token_credit(ADVANTAGES[name], PLAIN, batch).advantages
        assert torch.equal(same, token_credit(ADVANTAGES[name], PLAIN, plain).advantages), name


def test_what_is_no_action_has_no_share_in_a_critics_credit() -> None:
    rows = draw_rows(3, given=0.3)
    batch = batch_of(rows)
    on = batch.loss_mask & ~batch.given.repeat_interleave(batch.cu_seqlens.diff())
    broken = replace(batch, values=torch.where(on, batch.values, math.nan))
    want, got = (token_credit(ADVANTAGES["gae"], LIMITED, b) for b in (batch, broken))
    assert torch.equal(got.advantages, want.advantages)
    assert torch.equal(got.returns, want.returns)
    assert not want.returns[~on].any()
    sampled = token_credit(ADVANTAGES["gae"], LIMITED, batch_of([row for row in rows if not row.given]))
    assert torch.allclose(sampled.returns, want.returns[~batch.given.repeat_interleave(batch.cu_seqlens.diff())])


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(ADVANTAGES)), order=st.randoms(use_true_random=False))
def test_permuting_the_sequences_changes_no_advantage(seed: int, name: str, order) -> None:
    rows = draw_rows(seed)
    other = order.sample(rows, len(rows))
    before = _by_row(rows, token_credit(ADVANTAGES[name], LIMITED, batch_of(rows)).advantages.tolist())
    after = _by_row(other, token_credit(ADVANTAGES[name], LIMITED, batch_of(other)).advantages.tolist())
    for row in rows:
        assert after[id(row)] == pytest.approx(before[id(row)], abs=1e-6)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(set(ADVANTAGES) - BATCH_WIDE)))
def test_an_unrelated_sequence_changes_no_other_advantage(seed: int, name: str) -> None:
    """Not so for rows that are normalised over the batch, by their definition."""
    rows = draw_rows(seed)
    stranger = Row(group=1000, sample=1000, reward=3.0, mask=[False, True, True])
    stranger.prox = stranger.current = stranger.rollout = stranger.ref = stranger.entropy = stranger.value = [-1.0] * 3
    before = token_credit(ADVANTAGES[name], LIMITED, batch_of(rows)).advantages.tolist()
    after = token_credit(ADVANTAGES[name], LIMITED, batch_of([stranger, *rows])).advantages.tolist()
    assert after[3:] == pytest.approx(before, abs=1e-7)


@pytest.mark.parametrize(("length", "lost"), [(0, 0.0), (15, 0.0), (16, 0.0), (18, 0.5), (20, 1.0), (25, 1.0)])
def test_soft_overlong_punishment_has_the_three_parts_of_equation_13(length: int, lost: float) -> None:
    shaping = replace(PLAIN, overlong_from=16.0, overlong_penalty=2.0)
    assert float(overlong_penalty(torch.tensor([float(length)]), shaping)) == pytest.approx(2 * lost)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_masked_token_has_no_share_in_a_kl_reward(name: str) -> None:
    rows = draw_rows(3)
    shaping = replace(LIMITED, kl=ESTIMATORS[name])
    batch = batch_of(rows)
    broken = replace(batch, ref_logprobs=torch.where(batch.loss_mask, batch.ref_logprobs, math.nan))
    for advantage in (ADVANTAGES["grpo"], ADVANTAGES["reinforce_pp"]):
        want = token_credit(advantage, shaping, batch).advantages
        assert torch.equal(token_credit(advantage, shaping, broken).advantages, want)
        assert not want[~batch.loss_mask].any()


@pytest.mark.parametrize("shaping", [PLAIN, LIMITED])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_given_answers_have_no_advantage_and_change_no_other(name: str, shaping: Shaping) -> None:
    rows = draw_rows(7, given=0.4)
    sampled = [row for row in rows if not row.given]
    assert 0 < len(sampled) < len(rows)
    got = _by_row(rows, token_credit(ADVANTAGES[name], shaping, batch_of(rows)).advantages.tolist())
    want = _by_row(sampled, token_credit(ADVANTAGES[name], shaping, batch_of(sampled)).advantages.tolist())
    assert all(not any(got[id(row)]) for row in rows if row.given)
    assert all(got[id(row)] == pytest.approx(want[id(row)], abs=1e-7) for row in sampled)
    given = [row for row in rows if row.given]
    assert not token_credit(ADVANTAGES[name], shaping, batch_of(given)).advantages.any()

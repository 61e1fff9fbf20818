"""A critic's optimizer steps: what is divided by what, at which rate, and what has no share in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_lora.trainer.companions import improve
from areal_lora.trainer.learn import annotate, learn
from areal_lora.trainer.step_metrics import explained_variance
from areal_lora.types import TrainBatch
from tests.support.trainer.recorded import RecordedEngine, make_adapter, make_batch


def annotated(engine: RecordedEngine, **algorithm: object) -> tuple[object, TrainBatch]:
    adapter = make_adapter(kind="ppo", **algorithm)
    return adapter, annotate(engine, adapter, make_batch())


@pytest.mark.parametrize(("reduction", "divisor"), [("token", 7.0), ("sequence", 4.0 * 2), ("constant", 4 * 32.0)])
def test_policy_and_critic_take_a_step_each_on_every_minibatch(reduction: str, divisor: float) -> None:
    engine = RecordedEngine(make_batch().rollout_logprobs)
    adapter, batch = annotated(engine, reduction=reduction, critic_lr=3e-3)
    report = learn(engine, adapter, batch, version=4, base_dtype="float32", lr=0.5)
    assert engine.denominators == [divisor, divisor]
    assert engine.rates == [0.5, 0.5 * 3e-3 / adapter.config.optimizer.lr]
    # The engine answers the same to a critic: its "values" are the recorded log-probabilities.
    values, on = make_batch().rollout_logprobs, batch.loss_mask
    returns = make_batch().rewards.repeat_interleave(batch.cu_seqlens.diff())
    near = 0.25 + (values - 0.25).clamp(-0.2, 0.2)
    error = torch.maximum((values - returns) ** 2, (near - returns) ** 2) / 2
    assert report.sums["value_loss"] == pytest.approx(float((on * error).sum()), rel=1e-5)
    assert report.sums["value_tokens"] == 7
    assert report.mean("value_grad_norms", "value_steps") == 1.0


def test_the_returns_of_a_reward_at_the_end_are_the_reward() -> None:
    """gamma = lambda = 1: each token's return is its answer's reward, whatever the values."""
    _, batch = annotated(RecordedEngine(make_batch().rollout_logprobs))
    assert batch.returns is not None
    rewards = make_batch().rewards.repeat_interleave(batch.cu_seqlens.diff())
    assert torch.equal(batch.returns, torch.where(batch.loss_mask, rewards, torch.zeros(())))
    assert explained_variance(batch) == pytest.approx(0.0, abs=1e-7), "a constant explains nothing"


def test_rewards_of_turns_reach_the_returns_and_no_pass() -> None:
    engine, batch = RecordedEngine(make_batch().rollout_logprobs), make_batch()
    turns = torch.zeros(batch.n_tokens).index_fill(0, torch.tensor([6]), 0.25)  # of the third answer, of 1 in all
    found = annotate(engine, make_adapter(kind="ppo"), replace(batch, turn_rewards=turns))
    assert found.returns is not None
    assert found.returns[5:9].tolist() == [0.0, 1.0, 0.75, 0.75]
    assert found.turn_rewards is None


def test_given_answers_have_no_share_and_alone_they_move_nothing() -> None:
    engine = RecordedEngine(make_batch().rollout_logprobs)
    adapter, batch = annotated(engine)
    some = replace(batch, given=torch.tensor([False, True, False, True]))
    assert improve(engine, adapter, some, 0.5)["value_tokens"] == 5
    assert engine.denominators == [5.0]
    assert improve(engine, adapter, replace(batch, given=torch.ones(4, dtype=torch.bool)), 0.5) == {}
    assert len(engine.rates) == 1, "momentum alone would move the critic"


def test_without_a_critic_nothing_happens() -> None:
    engine = RecordedEngine(make_batch().rollout_logprobs)
    assert improve(engine, make_adapter(), make_batch(), 0.5) == {}
    assert engine.rates == []


def test_a_reference_is_renewed_once_the_version_is_made() -> None:
    engine = RecordedEngine(make_batch().rollout_logprobs)
    adapter = make_adapter(kl_coef=0.1, reference="initial", reference_refresh_steps=5)
    for version in range(3, 6):
        batch = annotate(engine, adapter, make_batch())
        batch = replace(batch, versions=torch.where(batch.loss_mask, version, -1))
        learn(engine, adapter, batch, version=version, base_dtype="float32", lr=0.5)
        assert len(engine.resident) == (version >= 4)
    assert engine.resident == [("gsm8k", "gsm8k/reference")]

"""A user's objective and advantage: the results of the rows that they copy, and what is refused before training."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest

from areal_lora.algorithms.losses import Clip
from areal_lora.algorithms.registry import own_advantage, own_loss
from areal_lora.errors import ConfigError
from areal_lora.trainer.learn import annotate, make_loss
from tests.support.trainer.recorded import RecordedEngine, make_adapter, make_batch

CLIP = Clip(low=0.2, high=0.3)
HEAD = "import torch\nfrom areal_lora.algorithms.losses import ratio_of, sequence_sums, spread\n"
counted = itertools.count()


def written(folder: Path, arguments: str, body: str) -> str:
    file = folder / f"mine_{next(counted)}.py"  # a module is imported once
    file.write_text(HEAD + f"def mine({arguments}):\n    " + body.replace("\n", "\n    ") + "\n")
    return f"{file}:mine"


def loss_of(folder: Path, body: str) -> str:
    return written(folder, "clip, tokens", body)


def advantage_of(folder: Path, body: str) -> str:
    return written(folder, "samples", body)


PPO = """r = ratio_of(tokens.logprobs - tokens.old)
return torch.minimum(r * tokens.advantages, r.clamp(1 - clip.low, 1 + clip.high) * tokens.advantages)"""
STD = """out = torch.zeros_like(samples.rewards)
for group in samples.group_ids.unique():
    own = samples.rewards[samples.group_ids == group]
    out[samples.group_ids == group] = (own - own.mean()) / own.std()
return out"""
MEAN = """same = samples.group_ids[:, None] == samples.group_ids
return samples.rewards - (same * samples.rewards).sum(1) / same.sum(1)"""


def trained(**algorithm: Any) -> tuple[float, list[float]]:
    """Loss and gradient of a step's micro-batch."""
    batch = make_batch()
    adapter = make_adapter(**algorithm, minibatches=2)
    logprobs = (batch.rollout_logprobs - 0.05).requires_grad_()
    annotated = annotate(RecordedEngine(batch.rollout_logprobs - 0.3), adapter, batch)
    sums = make_loss(adapter, 4)(annotated, logprobs, None)
    sums.loss.backward()
    assert logprobs.grad is not None
    return float(sums.loss.detach()), logprobs.grad.tolist()


def test_functions_that_copy_rows_train_like_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = trained(advantage="dr_grpo", loss="ppo", eps_clip=0.1)
    mine = {"advantage": advantage_of(tmp_path, MEAN), "loss": loss_of(tmp_path, PPO), "eps_clip": 0.1}
    with caplog.at_level(logging.WARNING):
        own = trained(**mine)
    assert caplog.records == []
    assert own[0] == pytest.approx(rows[0], rel=1e-6)
    assert own[1] == pytest.approx(rows[1], rel=1e-6, abs=1e-12)
    assert rows != trained(advantage="dr_grpo", loss="reinforce"), "the loss matters here"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return tokens.logprobs.sum()", r"float64 \[\] in place of torch.float64 \[14\]"),
        ("return 1.0", "float in place of"),
        ("return (tokens.logprobs * tokens.advantages).float()", "float32"),
        ("return tokens.old * tokens.advantages", "no gradient"),
        ("return tokens.logprobs / 0", "not finite"),
        ("return tokens.logprobs.abs().sqrt()", "gradient is not finite"),
        ("return tokens.logprobs * torch.rand_like(tokens.old)", "differs from call to call"),
        ("return tokens.logprobs * tokens.advantages / tokens.advantages.std()", "other sequences"),
        ("return tokens.logprobs * tokens.advantage", "AttributeError: 'Tokens' object has no attribute 'advantage'"),
    ],
)
def test_an_objective_that_cannot_be_trained_on_is_refused(tmp_path: Path, body: str, reason: str) -> None:
    path = loss_of(tmp_path, body)
    with pytest.raises(ConfigError, match=reason) as refused:
        own_loss(path, CLIP)
    assert refused.value.fix


def test_sums_over_a_sequence_are_no_dependence_on_others(tmp_path: Path) -> None:
    body = "return spread(sequence_sums(tokens.logprobs, tokens.cu_seqlens), tokens.cu_seqlens) * tokens.advantages"
    own_loss(loss_of(tmp_path, body), CLIP)


def test_a_gradient_unlike_the_value_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        own_loss(loss_of(tmp_path, "return tokens.logprobs.exp().detach() * tokens.logprobs * tokens.advantages"), CLIP)
    [record] = caplog.records
    assert "not that of its value at 12 of 14 random tokens" in record.getMessage()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return samples.rewards.mean()", r"float64 \[\] in place"),
        ("return samples.rewards / 0", "not finite"),
        ("return samples.rewards - samples.rewards.roll(1)", "order of the samples"),
        ("return torch.randn_like(samples.rewards)", "differs from call to call"),
        ("return samples.values", "no attribute 'values'"),
        (MEAN + " / ((same * samples.rewards).sum(1) / same.sum(1))", "not finite on a group of equal rewards"),
        (STD, "not finite on a group of equal rewards"),
        ("return samples.rewards / samples.rewards.std()", "not finite on a group of equal rewards"),
        ("return samples.rewards / samples.rewards.unique()[1]", "it fails on a group of equal rewards: IndexError"),
    ],
)
def test_an_advantage_that_cannot_be_trained_on_is_refused(tmp_path: Path, body: str, reason: str) -> None:
    path = advantage_of(tmp_path, body)
    with pytest.raises(ConfigError, match=reason):
        own_advantage(path, drop_uniform=False)


def test_an_advantage_that_is_finite_on_equal_rewards_is_taken(tmp_path: Path) -> None:
    own_advantage(advantage_of(tmp_path, STD.replace("own.std()", "(own.std() + 1e-6)")), drop_uniform=False)


def test_groups_of_equal_rewards_are_not_tried_where_they_are_dropped(tmp_path: Path) -> None:
    own_advantage(advantage_of(tmp_path, STD), drop_uniform=True)


def test_a_file_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.py:mine"):
        own_loss(f"{tmp_path}/nothing.py:mine", CLIP)

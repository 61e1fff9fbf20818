"""Which sequences have no gradient: what backward passes leave out must add nothing, whatever the algorithm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.sections.adapter import PRESETS, AlgorithmConfig, Kind
from areal_lora.data.collate import scoring_batch
from areal_lora.trainer.learn import annotate, make_loss
from areal_lora.types import TrainBatch
from tests.support.trainer.recorded import RecordedEngine, make_adapter

GROUPS = [[1.0, 1.0, 1.0], [0.0, 1.0, 0.0], [0.1, 0.1, 0.1], [0.7, 0.7, 0.2], [0.0, 0.0, 0.0]]
EQUAL = [True, False, True, False, True]


def make_batch() -> TrainBatch:
    """Answers of several lengths; sums of 0.1 are not exact."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(3, 9, (sum(map(len, GROUPS)),), generator=draw).tolist()
    batch = scoring_batch([list(range(n)) for n in lengths], "gsm8k")
    return replace(
        batch,
        rollout_logprobs=-torch.rand(batch.n_tokens, generator=draw) * batch.loss_mask,
        versions=torch.where(batch.loss_mask, 4, -1),
        rewards=torch.tensor([reward for group in GROUPS for reward in group]),
        group_ids=torch.arange(len(GROUPS)).repeat_interleave(3),
        sample_ids=torch.arange(3 * len(GROUPS)),
        baselines=torch.tensor([1.0, 0.0, 0.1, 0.3, 0.0]).repeat_interleave(3),
    )


def gradients(batch: TrainBatch, **config: Any) -> torch.Tensor:
    """[N] largest gradient of each sequence's log-probabilities."""
    adapter = make_adapter(minibatches=2, **config)
    logprobs = (batch.rollout_logprobs - 0.05 * torch.rand(batch.n_tokens)).requires_grad_()
    annotated = annotate(RecordedEngine(logprobs.detach() + 0.02, batch), adapter, batch)
    make_loss(adapter, 4, moved=True)(annotated, logprobs, None).loss.backward()
    assert logprobs.grad is not None
    return torch.stack([part.abs().max() for part in logprobs.grad.split(batch.cu_seqlens.diff().tolist())])


def of(batch: TrainBatch, **config: Any) -> torch.Tensor | None:
    algorithm = build_algorithm(AlgorithmConfig.model_validate(config), minibatches=2, max_new_tokens=32)
    return algorithm.zero_advantage(batch)


@pytest.mark.parametrize("kind", sorted(get_args(Kind)))
def test_what_is_left_out_has_no_gradient(kind: str) -> None:
    batch = make_batch()
    zero = of(batch, kind=kind)
    if PRESETS[kind].get("kl_coef") or PRESETS[kind].get("advantage") == "gae":
        assert zero is None
        return
    assert zero is not None
    assert not (gradients(batch, kind=kind)[zero] > 1e-9).any()


@pytest.mark.parametrize("kind", ["grpo", "dapo", "rloo", "gspo", "cispo", "maxrl", "gpg"])
def test_all_of_groups_with_equal_rewards_is_left_out(kind: str) -> None:
    zero = of(make_batch(), kind=kind)
    assert zero is not None
    assert zero.tolist() == [equal for equal in EQUAL for _ in range(3)]


@pytest.mark.parametrize(
    "config", [{"kl_coef": 0.1}, {"kl_coef": 0.1, "kl_in": "reward"}, {"entropy_coef": 0.01}, {"kind": "ppo"}]
)
def test_nothing_is_left_out_where_another_term_has_a_gradient(config: dict[str, Any]) -> None:
    assert of(make_batch(), **{"kind": "grpo", **config}) is None


def test_nothing_is_left_out_of_an_objective_that_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "squares.py").write_text("def loss(clip, tokens):\n    return -((tokens.logprobs * tokens.on) ** 2)\n")
    assert of(make_batch(), kind="grpo", loss="squares:loss") is None


def test_given_answers_are_never_left_out() -> None:
    batch = make_batch()
    given = batch.group_ids == 0
    zero = of(replace(batch, given=given), kind="grpo")
    assert zero is not None
    assert not zero[given].any()
    assert zero[batch.group_ids == 2].all()

"""The trainer's own glue: scoring batches, the objective as the engine calls it, the alignment check."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.load import load_config
from areal_lora.engine.base import LossFn, TrainEngine
from areal_lora.errors import AlignmentError
from areal_lora.trainer.annotate import annotate
from areal_lora.trainer.learn import learn, make_loss
from areal_lora.trainer.tenant import Tenant, scoring_batch, split_rows
from areal_lora.types import StepStats, TrainBatch

EXAMPLES = Path(__file__).parents[2] / "examples" / "math"


def _tenant(**algorithm: object) -> Tenant:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [])
    adapter = config.adapters[0]
    adapter = adapter.model_copy(update={"algorithm": adapter.algorithm.model_copy(update=algorithm)})
    return Tenant(
        config=adapter, spec=adapter.spec("x"), probe=scoring_batch([[1, 2]], adapter.name), version=4,
        algorithm=build_algorithm(adapter.algorithm, minibatches=adapter.minibatches),
    )


def _batch() -> TrainBatch:
    batch = scoring_batch([[5, 6, 7], [8, 9], [3, 4, 5, 6], [2, 1]], "gsm8k")
    logprobs = -torch.rand(batch.n_tokens, generator=torch.Generator().manual_seed(7)) * batch.loss_mask
    return replace(
        batch, rollout_logprobs=logprobs, versions=torch.where(batch.loss_mask, 4, -1),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]), group_ids=torch.tensor([0, 0, 1, 1]),
    )


class RecordedEngine:
    """Answers with fixed log-probabilities, so that the glue is tested and nothing else."""

    def __init__(self, logprobs: torch.Tensor) -> None:
        self.answer, self.asked, self.denominators = logprobs, [], []

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> torch.Tensor:
        self.asked.append(adapter)
        return self.answer

    def forward_backward(
        self, batch: TrainBatch, loss_fn: LossFn, *, temperature: float = 1.0, need_entropy: bool = False
    ) -> dict[str, float]:
        sums = loss_fn(batch, self.answer, None)
        return {"loss": float(sums.loss), **{k: float(v) for k, v in sums.stats.items()}}

    def optim_step(self, adapter: str, denominator: float) -> StepStats:
        self.denominators.append(denominator)
        return StepStats(values={"grad_norm": 1.0, "lr": 1e-3, "skipped": 0.0})


def _learn(engine: TrainEngine, tenant: Tenant, batch: TrainBatch):
    return learn(engine, tenant, annotate(engine, tenant, batch), base_dtype="float32")


def test_scoring_batch_masks_the_first_token_of_every_sequence() -> None:
    batch = scoring_batch([[5, 6, 7], [8, 9]], "a")
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert split_rows(batch.token_ids, batch.cu_seqlens) == [[5, 6, 7], [8, 9]]


def test_the_objective_on_policy_is_the_advantage() -> None:
    """With current = proximal = behaviour the loss is minus the sum of advantages, divided by trained tokens."""
    batch = _batch()
    engine = RecordedEngine(batch.rollout_logprobs)
    report = _learn(engine, _tenant(), batch)
    spread = 2**0.5 / 2  # (1 - 0.5) / std of [1, 0], unbiased
    assert report.sums["loss"] == pytest.approx(-(2 * spread - 1 * spread), rel=1e-4)
    assert engine.denominators == [7.0]
    assert report.per_token("behaviour_abs") == 0


def test_the_reference_is_the_base_with_the_adapter_off() -> None:
    batch = _batch()
    engine = RecordedEngine(batch.rollout_logprobs)
    _learn(engine, _tenant(kl_coef=0.1), batch)
    assert engine.asked == [None]


def test_shifted_logprobs_of_the_same_version_stop_the_run() -> None:
    batch = _batch()
    shifted = torch.cat([batch.rollout_logprobs[1:], batch.rollout_logprobs[:1]])
    with pytest.raises(AlignmentError, match="rollout"):
        _learn(RecordedEngine(shifted), _tenant(), batch)


def test_older_tokens_may_differ() -> None:
    batch = replace(_batch(), versions=torch.where(_batch().loss_mask, 3, -1))
    report = _learn(RecordedEngine(batch.rollout_logprobs - 0.1), _tenant(), batch)
    assert report.sums["stale_tokens"] == 7
    assert report.sums["stale_gap"] == pytest.approx(0.7, rel=1e-5)


def test_loss_refuses_a_batch_without_advantages() -> None:
    with pytest.raises(AssertionError, match="annotate"):
        make_loss(_tenant(), 4)(_batch(), torch.zeros(11), None)

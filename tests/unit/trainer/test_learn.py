"""The trainer's own glue: scoring batches, the objective as the engine calls it, the alignment check."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.models import OptimizerConfig
from areal_lora.data.collate import check_batch
from areal_lora.distributed.exchange import SoloExchange
from areal_lora.engine.base import TrainEngine
from areal_lora.errors import AlignmentError, NonFiniteError
from areal_lora.trainer import loop
from areal_lora.trainer.learn import annotate, learn, make_loss
from areal_lora.trainer.tenant import Tenant, scoring_batch, split_rows
from areal_lora.types import TrainBatch
from tests.support.trainer.recorded import RecordedEngine, make_batch, make_tenant


def _adapter(tenant: Tenant, *, minibatches: int, optimizer: dict[str, Any] | None = None) -> Tenant:
    config = tenant.config.model_copy(
        update={
            "minibatches": minibatches,
            "optimizer": OptimizerConfig.model_validate(optimizer) if optimizer else tenant.config.optimizer,
        }
    )
    return replace(tenant, config=config, algorithm=build_algorithm(config.algorithm, minibatches=minibatches))


def _learn(engine: TrainEngine, tenant: Tenant, batch: TrainBatch):
    return learn(engine, tenant, annotate(engine, tenant, batch), base_dtype="float32", lr=0.5)


def test_scoring_batch_masks_the_first_token_of_every_sequence() -> None:
    batch = scoring_batch([[5, 6, 7], [8, 9]], "a")
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert split_rows(batch.token_ids, batch.cu_seqlens) == [[5, 6, 7], [8, 9]]


def test_the_objective_on_policy_is_the_advantage() -> None:
    """With current = proximal = behaviour the loss is minus the sum of advantages, divided by trained tokens."""
    batch = make_batch()
    engine = RecordedEngine(batch.rollout_logprobs)
    report = _learn(engine, make_tenant(), batch)
    spread = 2**0.5 / 2  # (1 - 0.5) / std of [1, 0], unbiased
    assert report.sums["loss"] == pytest.approx(-(2 * spread - 1 * spread), rel=1e-4)
    assert engine.denominators == [7.0]
    assert report.per_token("behaviour_abs") == 0


def test_the_reference_is_the_base_with_the_adapter_off() -> None:
    batch = make_batch()
    engine = RecordedEngine(batch.rollout_logprobs)
    _learn(engine, make_tenant(kl_coef=0.1), batch)
    assert engine.asked == [None]


def test_shifted_logprobs_of_the_same_version_stop_the_run() -> None:
    batch = make_batch()
    shifted = torch.cat([batch.rollout_logprobs[1:], batch.rollout_logprobs[:1]])
    with pytest.raises(AlignmentError, match="rollout"):
        _learn(RecordedEngine(shifted), make_tenant(), batch)


class Trainer:
    """A trainer of one rank without servers, controller or disk: `train_step` and nothing around it."""

    def __init__(self, engine: RecordedEngine, steps: int) -> None:
        run = SimpleNamespace(steps=steps)
        self.config = SimpleNamespace(run=run, model=SimpleNamespace(dtype="float32"))
        self.engine, self.recorder, self.publishing, self.checkpointing = engine, None, None, None
        self.auditor, self.control = None, SoloExchange()


def _run(
    monkeypatch: pytest.MonkeyPatch, tenant: Tenant, engine: RecordedEngine, steps: int, total: int = 8
) -> Trainer:
    """``steps`` training steps of the real loop."""
    trainer: Any = Trainer(engine, total)

    def next_batch(trainer: Any, tenant: Tenant) -> Any:
        batch = make_batch()
        return replace(batch, versions=torch.where(batch.loss_mask, tenant.version, -1)), {}

    monkeypatch.setattr(loop, "next_batch", next_batch)
    for name in ("join_checkpoint", "save_and_publish"):
        monkeypatch.setattr(loop, name, lambda *_: None)
    for _ in range(steps):
        loop.train_step(trainer, tenant)
    return trainer


@pytest.mark.parametrize("minibatches", [1, 4])
def test_the_schedule_spans_the_whole_run_whatever_the_minibatches(
    monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    """Counted in minibatches a cosine is at its end after a quarter of this run, and so is the warm-up."""
    optimizer = {"schedule": "cosine", "warmup_steps": 2, "lr": 1.0}
    tenant = _adapter(make_tenant(), minibatches=minibatches, optimizer=optimizer)
    tenant.version = 0
    engine = RecordedEngine(make_batch().rollout_logprobs)
    _run(monkeypatch, tenant, engine, 8)
    assert len(engine.rates) == 8 * minibatches
    want = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6))]
    assert engine.rates == pytest.approx([lr for lr in want for _ in range(minibatches)])


def test_steps_that_are_skipped_do_not_delay_the_schedule_and_a_resumed_run_continues_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = {"schedule": "linear", "lr": 1.0}
    tenant = _adapter(make_tenant(), minibatches=1, optimizer=optimizer)
    tenant.version = 4  # what a resume sets; the engine's own clock says nothing about the rate
    engine = RecordedEngine(make_batch().rollout_logprobs)
    engine.broken = (1, 2)
    _run(monkeypatch, tenant, engine, 4)
    assert engine.rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_three_steps_in_a_row_without_a_finite_gradient_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = make_tenant()
    engine = RecordedEngine(make_batch().rollout_logprobs)
    engine.broken = (1, 2, 4, 5, 6)
    _run(monkeypatch, tenant, engine, 5)
    with pytest.raises(NonFiniteError, match="3 training steps in a row") as e:
        _run(monkeypatch, tenant, engine, 1)
    assert e.value.exit_code == 65


def test_one_minibatch_that_is_skipped_is_not_a_step_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = _adapter(make_tenant(), minibatches=2)
    engine = RecordedEngine(make_batch().rollout_logprobs)
    engine.broken = (1, 3, 5, 7)
    _run(monkeypatch, tenant, engine, 4)
    assert tenant.skipped == 0


def test_older_tokens_may_differ() -> None:
    batch = replace(make_batch(), versions=torch.where(make_batch().loss_mask, 3, -1))
    report = _learn(RecordedEngine(batch.rollout_logprobs - 0.1), make_tenant(), batch)
    assert report.sums["stale_tokens"] == 7
    assert report.sums["stale_gap"] == pytest.approx(0.7, rel=1e-5)


def _long(seed: int, version: int) -> TrainBatch:
    """32 answers of 20 tokens with distinct records, sampled by ``version``."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 99, (32, 24), generator=draw).tolist()
    batch = scoring_batch(rows, "gsm8k")
    mask = (torch.arange(24) >= 4).repeat(32)
    return replace(
        batch,
        loss_mask=mask,
        rollout_logprobs=-2 * torch.rand(mask.numel(), generator=draw) * mask,
        versions=torch.where(mask, version, -1),
        rewards=torch.rand(32, generator=draw),
        group_ids=torch.arange(8).repeat_interleave(4),
        sample_ids=torch.arange(32),
    )


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("by", [-1, 0, 1])
def test_a_shift_is_found_where_every_token_is_stale_and_before_any_step_is_taken(by: int, minibatches: int) -> None:
    """The records differ from what the present policy says by more than any tolerance, for a reason."""
    tenant = _adapter(make_tenant(), minibatches=minibatches)
    batch = _long(3, tenant.version - 2)
    drift = 0.2 * torch.randn(batch.n_tokens, generator=torch.Generator().manual_seed(4))
    engine = RecordedEngine((batch.rollout_logprobs + drift) * batch.loss_mask, batch)
    rolled = batch.rollout_logprobs.clone()
    rolled[batch.loss_mask] = rolled[batch.loss_mask].roll(by)
    if by == 0:
        assert _learn(engine, tenant, batch).sums["late_own"] > 100
        return
    with pytest.raises(AlignmentError, match="shifted by one token"):
        _learn(engine, tenant, replace(batch, rollout_logprobs=rolled))
    assert engine.denominators == []


def test_loss_refuses_a_batch_without_advantages() -> None:
    with pytest.raises(AssertionError, match="annotate"):
        make_loss(make_tenant(), 4)(make_batch(), torch.zeros(11), None)


def test_a_scoring_batch_is_made_on_the_host_whatever_the_default_device_is() -> None:
    torch.set_default_device("meta")
    try:
        batch = scoring_batch([[5, 6, 7], [8, 9]], "a")
        check_batch(batch)
        assert split_rows(batch.token_ids, batch.cu_seqlens) == [[5, 6, 7], [8, 9]]
    finally:
        torch.set_default_device(None)
    tensors = [v for f in fields(batch) if isinstance(v := getattr(batch, f.name), torch.Tensor)]
    assert {t.device.type for t in tensors} == {"cpu"}

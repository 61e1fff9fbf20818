"""The trainer's own glue: scoring batches, the objective as the engine calls it, the alignment check."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.load import load_config
from areal_lora.config.models import OptimizerConfig
from areal_lora.data.collate import check_batch
from areal_lora.distributed.exchange import SoloExchange
from areal_lora.engine.base import LossFn, TrainEngine
from areal_lora.errors import AlignmentError, NonFiniteError
from areal_lora.trainer import loop
from areal_lora.trainer.learn import annotate, learn, make_loss
from areal_lora.trainer.tenant import Tenant, scoring_batch, split_rows
from areal_lora.types import StepStats, TrainBatch
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples" / "math"


def _tenant(**algorithm: object) -> Tenant:
    config = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"], [])
    adapter = config.adapters[0]
    adapter = adapter.model_copy(update={"algorithm": adapter.algorithm.model_copy(update=algorithm)})
    return Tenant(
        config=adapter,
        spec=adapter.spec("x"),
        probe=scoring_batch([[1, 2]], adapter.name),
        version=4,
        algorithm=build_algorithm(adapter.algorithm, minibatches=adapter.minibatches),
    )


def _adapter(tenant: Tenant, *, minibatches: int, optimizer: dict[str, Any] | None = None) -> Tenant:
    config = tenant.config.model_copy(
        update={
            "minibatches": minibatches,
            "optimizer": OptimizerConfig.model_validate(optimizer) if optimizer else tenant.config.optimizer,
        }
    )
    return replace(tenant, config=config, algorithm=build_algorithm(config.algorithm, minibatches=minibatches))


def _batch() -> TrainBatch:
    batch = scoring_batch([[5, 6, 7], [8, 9], [3, 4, 5, 6], [2, 1]], "gsm8k")
    logprobs = -torch.rand(batch.n_tokens, generator=torch.Generator().manual_seed(7)) * batch.loss_mask
    return replace(
        batch,
        rollout_logprobs=logprobs,
        versions=torch.where(batch.loss_mask, 4, -1),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )


class RecordedEngine:
    """Answers with fixed log-probabilities, so that the glue is tested and nothing else."""

    def __init__(self, logprobs: torch.Tensor, batch: TrainBatch | None = None) -> None:
        """``logprobs`` are those of ``batch``, `_batch` if none is given."""
        self.whole = batch or _batch()
        self.answer, self.asked, self.denominators, self.rates = logprobs, [], [], []
        self.broken: tuple[int, ...] = ()  # optimizer steps, from 1, with a gradient that is not finite

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> torch.Tensor:
        self.asked.append(adapter)
        return self._of(batch)

    def _of(self, batch: TrainBatch) -> torch.Tensor:
        """The answers for the sequences of a minibatch, which are told by their tokens."""
        if batch.n_tokens == self.answer.numel():
            return self.answer
        whole = self.whole
        bounds = whole.cu_seqlens.tolist()
        rows = {tuple(whole.token_ids[a:b].tolist()): self.answer[a:b] for a, b in pairwise(bounds)}
        mine = batch.cu_seqlens.tolist()
        return torch.cat([rows[tuple(batch.token_ids[a:b].tolist())] for a, b in pairwise(mine)])

    def forward_backward(
        self, batch: TrainBatch, loss_fn: LossFn, *, temperature: float = 1.0, need_entropy: bool = False
    ) -> dict[str, float]:
        sums = loss_fn(batch, self._of(batch), None)
        return {"loss": float(sums.loss), **{k: float(v) for k, v in sums.stats.items()}}

    def optim_step(self, adapter: str, denominator: float, lr: float) -> StepStats:
        self.denominators.append(denominator)
        self.rates.append(lr)
        skipped = float(len(self.rates) in self.broken)
        return StepStats(values={"grad_norm": math.nan if skipped else 1.0, "lr": lr, "skipped": skipped})


def _learn(engine: TrainEngine, tenant: Tenant, batch: TrainBatch):
    return learn(engine, tenant, annotate(engine, tenant, batch), base_dtype="float32", lr=0.5)


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
        batch = _batch()
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
    tenant = _adapter(_tenant(), minibatches=minibatches, optimizer=optimizer)
    tenant.version = 0
    engine = RecordedEngine(_batch().rollout_logprobs)
    _run(monkeypatch, tenant, engine, 8)
    assert len(engine.rates) == 8 * minibatches
    want = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6))]
    assert engine.rates == pytest.approx([lr for lr in want for _ in range(minibatches)])


def test_steps_that_are_skipped_do_not_delay_the_schedule_and_a_resumed_run_continues_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = {"schedule": "linear", "lr": 1.0}
    tenant = _adapter(_tenant(), minibatches=1, optimizer=optimizer)
    tenant.version = 4  # what a resume sets; the engine's own clock says nothing about the rate
    engine = RecordedEngine(_batch().rollout_logprobs)
    engine.broken = (1, 2)
    _run(monkeypatch, tenant, engine, 4)
    assert engine.rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_three_steps_in_a_row_without_a_finite_gradient_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = _tenant()
    engine = RecordedEngine(_batch().rollout_logprobs)
    engine.broken = (1, 2, 4, 5, 6)
    _run(monkeypatch, tenant, engine, 5)
    with pytest.raises(NonFiniteError, match="3 training steps in a row") as e:
        _run(monkeypatch, tenant, engine, 1)
    assert e.value.exit_code == 65


def test_one_minibatch_that_is_skipped_is_not_a_step_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = _adapter(_tenant(), minibatches=2)
    engine = RecordedEngine(_batch().rollout_logprobs)
    engine.broken = (1, 3, 5, 7)
    _run(monkeypatch, tenant, engine, 4)
    assert tenant.skipped == 0


def test_older_tokens_may_differ() -> None:
    batch = replace(_batch(), versions=torch.where(_batch().loss_mask, 3, -1))
    report = _learn(RecordedEngine(batch.rollout_logprobs - 0.1), _tenant(), batch)
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
    tenant = _adapter(_tenant(), minibatches=minibatches)
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
        make_loss(_tenant(), 4)(_batch(), torch.zeros(11), None)


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

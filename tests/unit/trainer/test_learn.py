"""The trainer's own glue: scoring batches, the objective as the engine calls it, the alignment check."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_lora.algorithms.registry import build_algorithm
from areal_lora.config.models import OptimizerConfig
from areal_lora.config.sections.run import ServedAs
from areal_lora.data.collate import scoring_batch
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.engine.base import LossFn
from areal_lora.engine.common.adapter_engine import AdapterEngine
from areal_lora.errors import AlignmentError, NonFiniteError
from areal_lora.obs.trace import Spans
from areal_lora.trainer import loop
from areal_lora.trainer.adapter import Adapter, TrainingState
from areal_lora.trainer.learn import Variants, annotate, learn, make_loss
from areal_lora.trainer.step_metrics import of_learning
from areal_lora.types import Correction, StepStats, TrainBatch
from tests.support.solo_exchange import SoloExchange
from tests.support.trainer.recorded import RecordedEngine, make_adapter, make_batch


def _with(adapter: Adapter, *, minibatches: int, optimizer: dict[str, Any] | None = None) -> Adapter:
    config = adapter.config.model_copy(
        update={
            "minibatches": minibatches,
            "optimizer": OptimizerConfig.model_validate(optimizer) if optimizer else adapter.config.optimizer,
        }
    )
    return replace(
        adapter,
        config=config,
        algorithm=build_algorithm(
            config.algorithm, minibatches=minibatches, max_new_tokens=config.sampling.max_new_tokens
        ),
    )


def _learn(engine: AdapterEngine, adapter: Adapter, batch: TrainBatch):
    """From version 4."""
    return learn(engine, adapter, annotate(engine, adapter, batch), version=4, base_dtype="float32", lr=0.5)


def test_the_objective_on_policy_is_the_advantage() -> None:
    """With current = proximal = behaviour the loss is minus the sum of advantages, divided by trained tokens."""
    batch = make_batch()
    engine = RecordedEngine(batch.rollout_logprobs)
    report = _learn(engine, make_adapter(), batch)
    spread = 2**0.5 / 2  # (1 - 0.5) / std of [1, 0], unbiased
    assert report.sums["loss"] == pytest.approx(-(2 * spread - 1 * spread), rel=1e-4)
    assert engine.denominators == [7.0]
    assert report.per_token("behaviour_abs") == 0


def test_the_reference_is_the_base_with_the_adapter_off() -> None:
    batch = make_batch()
    engine = RecordedEngine(batch.rollout_logprobs)
    _learn(engine, make_adapter(kl_coef=0.1), batch)
    assert engine.asked == [None]


def test_what_a_teacher_has_scored_needs_no_pass() -> None:
    batch = make_batch()
    taught = replace(batch, ref_logprobs=batch.rollout_logprobs - 0.25)
    engine, adapter = RecordedEngine(batch.rollout_logprobs), make_adapter(kind="distill")
    annotated = annotate(engine, adapter, taught)  # type: ignore[arg-type]
    assert engine.asked == []
    assert torch.allclose(annotated.advantages, -0.25 * batch.loss_mask)


@pytest.mark.parametrize("keys", [{"kind": "ppo"}, {"kind": "distill"}, {"kind": "reinforce_pp"}, {"kind": "gspo"}])
def test_given_answers_alone_have_neither_reference_nor_values(keys: dict[str, Any]) -> None:
    """Two passes less than beside one sampled answer, and the same step as without these terms."""
    adapter, batch = make_adapter(kl_coef=0.1, **keys), make_batch()
    wanted = make_adapter(kind="dr_grpo", reduction=adapter.config.algorithm.reduction)
    given, mixed = torch.ones(4, dtype=torch.bool), torch.tensor([True, True, True, False])
    engine, plain, beside = (RecordedEngine(batch.rollout_logprobs) for _ in range(3))
    report = _learn(engine, adapter, replace(batch, given=given))
    alone = _learn(plain, wanted, replace(batch, given=given))
    assert (engine.asked, report.sums, engine.rates) == ([], alone.sums, plain.rates)
    assert torch.equal(engine.gradient, plain.gradient)
    assert report.per_sampled_token("kl") is None
    annotate(beside, adapter, replace(batch, given=mixed))
    assert beside.asked == [None, "gsm8k/critic"][: 1 + (keys["kind"] == "ppo")]


def test_shifted_logprobs_of_the_same_version_stop_the_run() -> None:
    batch = make_batch()
    shifted = torch.cat([batch.rollout_logprobs[1:], batch.rollout_logprobs[:1]])
    with pytest.raises(AlignmentError, match="rollout"):
        _learn(RecordedEngine(shifted), make_adapter(), batch)


class Trainer:
    """A trainer of one rank without servers, controller or disk: `train_step` and nothing around it."""

    def __init__(self, engine: RecordedEngine) -> None:
        self.config = SimpleNamespace(
            model=SimpleNamespace(dtype="float32"),
            behaviour=SimpleNamespace(router_replay="off"),
            rollout=SimpleNamespace(in_flight="finish", served_as=None),
        )
        self.engine, self.rank_0, self.publishing, self.checkpointing = engine, None, None, None
        self.control, self.spans = SoloExchange(), defaultdict(Spans)


def _run(
    monkeypatch: pytest.MonkeyPatch, state: TrainingState, engine: RecordedEngine, steps: int, total: int = 8
) -> Trainer:
    """``steps`` training steps of the real loop."""
    trainer: Any = Trainer(engine)
    state.adapter = replace(state.adapter, run=replace(state.adapter.run, steps=total))

    def batch_of(trainer: object, state: TrainingState, groups: object) -> Any:
        batch = make_batch()
        return replace(batch, versions=torch.where(batch.loss_mask, state.version, -1)), {}

    monkeypatch.setattr(loop, "batch_of", batch_of)
    for name in ("keep_pace", "save_and_publish"):
        monkeypatch.setattr(loop, name, lambda *_: None)
    for _ in range(steps):
        loop.train_step(trainer, state, PackedGroups.of([]))
    return trainer


@pytest.mark.parametrize("minibatches", [1, 4])
def test_the_schedule_spans_the_whole_run_whatever_the_minibatches(
    monkeypatch: pytest.MonkeyPatch, minibatches: int
) -> None:
    """Counted in minibatches a cosine is at its end after a quarter of this run, and so is the warm-up."""
    optimizer = {"schedule": "cosine", "warmup_steps": 2, "lr": 1.0}
    state = TrainingState(adapter=_with(make_adapter(), minibatches=minibatches, optimizer=optimizer))
    engine = RecordedEngine(make_batch().rollout_logprobs)
    _run(monkeypatch, state, engine, 8)
    assert len(engine.rates) == 8 * minibatches
    want = [0.5, 1.0, *(0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6))]
    assert engine.rates == pytest.approx([lr for lr in want for _ in range(minibatches)])


def test_steps_that_are_skipped_do_not_delay_the_schedule_and_a_resumed_run_continues_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = {"schedule": "linear", "lr": 1.0}
    # As resumed; the engine's own clock does not matter to the rate.
    state = TrainingState(adapter=_with(make_adapter(), minibatches=1, optimizer=optimizer), version=4)
    engine = RecordedEngine(make_batch().rollout_logprobs)
    engine.broken = (1, 2)
    _run(monkeypatch, state, engine, 4)
    assert engine.rates == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_three_steps_in_a_row_without_a_finite_gradient_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainingState(adapter=make_adapter(), version=4)
    engine = RecordedEngine(make_batch().rollout_logprobs)
    engine.broken = (1, 2, 4, 5, 6)
    _run(monkeypatch, state, engine, 5)
    with pytest.raises(NonFiniteError, match="3 training steps in a row") as e:
        _run(monkeypatch, state, engine, 1)
    assert e.value.exit_code == 65


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_forward_pass_that_is_not_finite_is_skipped_and_three_in_a_row_end_the_run(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """It is no shift of the batch: that would end the run at once."""
    state = TrainingState(adapter=make_adapter(), version=4)
    engine = RecordedEngine(make_batch().rollout_logprobs)
    outlier = engine.answer.clone()
    outlier[1] = value
    for answers in (outlier, engine.answer, outlier, outlier):
        engine.dropped = answers
        _run(monkeypatch, state, engine, 1)
        assert (state.skipped_steps > 0) == (answers is outlier)
    engine.dropped = outlier
    with pytest.raises(NonFiniteError, match=r"3 training steps in a row were not finite .*fresh_gap"):
        _run(monkeypatch, state, engine, 1)


def test_dropout_moves_neither_the_weights_of_stale_tokens_nor_the_ratio() -> None:
    """w = proximal / behaviour of the clean pass; the ratio of one minibatch is 1. A float64 loop over the tokens."""
    batch = replace(make_batch(), versions=torch.where(make_batch().loss_mask, 3, -1))
    draw = torch.Generator().manual_seed(5)
    drift, noise = (scale * torch.randn(batch.n_tokens, generator=draw) for scale in (0.3, 2.0))
    engine = RecordedEngine((batch.rollout_logprobs + drift) * batch.loss_mask)
    engine.dropped = engine.answer + noise * batch.loss_mask
    adapter = make_adapter()
    adapter = replace(adapter, config=adapter.config.model_copy(update={"dropout": 0.1}))
    report = _learn(engine, adapter, batch)
    spread = 2**0.5 / 2  # (1 - 0.5) / std of [1, 0], unbiased; the second group's rewards are equal
    gaps, expected = [], 0.0
    for sequence, (begin, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        for t in range(begin, end):
            if batch.loss_mask[t]:
                gaps.append(float(drift[t]))
                expected -= math.exp(gaps[-1]) * (spread, -spread, 0.0, 0.0)[sequence]
    assert report.sums["loss"] == pytest.approx(expected, rel=1e-4)
    assert report.per_sampled_token("behaviour_abs") == pytest.approx(sum(map(abs, gaps)) / len(gaps), rel=1e-5)


class NoisyEngine(RecordedEngine):
    """Says 2 nats more of each token in a training pass than in a score."""

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, **keys: Any) -> dict[str, float]:
        self.dropped = self._of(batch) + 2.0 * batch.loss_mask
        return super().forward_backward(batch, loss_fn, **keys)


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@pytest.mark.parametrize(("broken", "moved"), [((), 4), ((1,), 0)])
def test_no_ratio_differs_from_one_before_an_optimizer_step(kind: str, broken: tuple[int, ...], moved: int) -> None:
    """Of two minibatches of 3 and 4 tokens the first has the proximal policy, and the second if that is skipped."""
    adapter = make_adapter(kind=kind, minibatches=2)
    adapter = replace(adapter, config=adapter.config.model_copy(update={"dropout": 0.1}))
    engine = NoisyEngine(make_batch().rollout_logprobs)
    engine.broken = broken
    report = _learn(engine, adapter, make_batch())
    assert report.sums["ratio_abs"] == pytest.approx(2.0 * moved, rel=1e-6)
    assert report.sums["tokens"] == 7


def test_given_answers_do_not_dilute_what_is_said_of_sampled_ones() -> None:
    """The controller of the KL coefficient gets the divergence of the tokens that have one."""
    batch = replace(make_batch(), given=torch.tensor([False, False, True, True]))
    engine, gap = RecordedEngine(batch.rollout_logprobs), 0.8
    engine.base = (engine.answer - gap) * batch.loss_mask
    report = _learn(engine, make_adapter(kl_coef=0.1, kl_estimator="k2"), batch)
    assert report.per_sampled_token("kl") == pytest.approx(gap**2 / 2, rel=1e-5)
    assert report.sums["sampled_tokens"] < report.sums["tokens"]


@pytest.mark.parametrize(
    ("keys", "kl"),
    [
        ({"kind": "reinforce_pp", "kl_coef": 0.1}, 0.3),
        ({"kind": "ppo", "kl_coef": 0.1}, 0.3),
        ({"kind": "distill"}, 0.3),
        ({"kl_coef": 0.1, "kl_estimator": "k2"}, 0.8**2 / 2),
    ],
)
def test_the_divergence_is_that_of_the_policy_that_is_charged_for_it(keys: dict[str, Any], kl: float) -> None:
    """Stale tokens were sampled with 0.5 nats less than now, and 0.3 more than by the reference.

    Over samples of an older policy k1 of the present one is no divergence: it may be negative in the mean.
    """
    batch = make_batch()
    stale = replace(batch, versions=torch.where(batch.loss_mask, 3, -1))
    engine = RecordedEngine((batch.rollout_logprobs + 0.5) * batch.loss_mask)
    engine.base = (engine.answer - 0.8) * batch.loss_mask
    report = _learn(engine, make_adapter(**keys), stale)
    assert report.per_sampled_token("kl") == pytest.approx(kl, rel=1e-5)


def test_one_minibatch_that_is_skipped_is_not_a_step_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    state = TrainingState(adapter=_with(make_adapter(), minibatches=2), version=4)
    engine = RecordedEngine(make_batch().rollout_logprobs)
    engine.broken = (1, 3, 5, 7)
    _run(monkeypatch, state, engine, 4)
    assert state.skipped_steps == 0


class MovingEngine(RecordedEngine):
    """Each optimizer step moves the log-probability of every token by 0.3."""

    def optim_step(self, adapter: str, denominator: float, lr: float) -> StepStats:
        self.answer = self.answer + 0.3 * self.whole.loss_mask
        return super().optim_step(adapter, denominator, lr)


@pytest.mark.parametrize(("kind", "tokens"), [("grpo", (5, 2)), ("gspo", (5, 2)), ("cispo", (2, 1))])
def test_the_mismatch_is_that_of_the_policy_before_the_step(kind: str, tokens: tuple[int, int]) -> None:
    """Servers sampled the first and third answer exactly, and the others, of older versions, with 0.1 less.

    Without a proximal pass the first of the two minibatches alone has seen that policy.
    """
    batch = make_batch()
    stale = batch.loss_mask & torch.tensor([0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1]).bool()
    batch = replace(batch, versions=torch.where(stale, 3, batch.versions))
    engine, adapter = MovingEngine(batch.rollout_logprobs + 0.1 * stale), make_adapter(kind=kind, minibatches=2)
    report = _learn(engine, adapter, batch)
    assert engine.denominators, "it has moved"
    assert (report.sums["fresh_tokens"], report.sums["stale_tokens"]) == tokens
    metrics = of_learning(report)
    assert metrics["train/mismatch_fresh"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["train/mismatch_stale"] == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize(("broken", "norm"), [((), 2.5), ((2,), 8 / 3), ((1, 2, 3, 4), math.nan)])
def test_the_norm_is_the_mean_over_the_optimizer_steps_that_were_taken(broken: tuple[int, ...], norm: float) -> None:
    """The last minibatch has no gradient of its own where its rewards are equal: the others still moved the adapter."""

    class Norms(RecordedEngine):
        def optim_step(self, adapter: str, denominator: float, lr: float) -> StepStats:
            values = super().optim_step(adapter, denominator, lr).values
            return StepStats(
                values={**values, "grad_norm": values["grad_norm"] * (4.0, 2.0, 4.0, 0.0)[len(self.rates) - 1]}
            )

    engine = Norms(make_batch().rollout_logprobs)
    engine.broken = broken
    report = _learn(engine, make_adapter(minibatches=4), make_batch())
    assert report.grad_norm == pytest.approx(norm, nan_ok=True)
    assert report.skipped == len(broken) / 4


def test_older_tokens_may_differ() -> None:
    batch = replace(make_batch(), versions=torch.where(make_batch().loss_mask, 3, -1))
    report = _learn(RecordedEngine(batch.rollout_logprobs - 0.1), make_adapter(), batch)
    assert report.sums["stale_tokens"] == 7
    assert report.sums["stale_gap"] == pytest.approx(0.7, rel=1e-5)


def test_tokens_of_kept_caches_are_not_of_the_version_alone() -> None:
    """The last token of each answer comes after a change to the version in training."""
    batch = _long(5, version=4)
    last = torch.arange(batch.n_tokens) % 24 == 23
    versions = torch.where(batch.loss_mask & ~last, 3, batch.versions)
    engine = RecordedEngine(batch.rollout_logprobs - 0.1 * last, batch)
    batch = replace(batch, versions=versions)
    annotated = annotate(engine, make_adapter(), batch)
    with pytest.raises(AlignmentError, match="same version"):
        learn(engine, make_adapter(), annotated, version=4, base_dtype="float32", lr=0.5)
    report = learn(engine, make_adapter(), annotated, version=4, base_dtype="float32", lr=0.5, kept_caches=True)
    assert (report.sums["fresh_tokens"], report.sums["stale_tokens"]) == (0, 32 * 20)


def test_tokens_of_interrupted_answers_are_not_compared_along_routes() -> None:
    """The server read the tokens before a change again under the newer version, along other routes than theirs."""
    batch = _long(5, version=4)
    at, sequence = torch.arange(batch.n_tokens) % 24, torch.arange(batch.n_tokens) // 24
    after = (sequence >= 8) & (at == 23)
    engine = RecordedEngine(batch.rollout_logprobs - 0.1 * after, batch)
    versions = torch.where(batch.loss_mask & (sequence >= 8) & ~after, 3, batch.versions)
    annotated = annotate(engine, make_adapter(), replace(batch, versions=versions))
    with pytest.raises(AlignmentError, match="same version"):
        learn(engine, make_adapter(), annotated, version=4, base_dtype="float32", lr=0.5)
    routed = replace(annotated, routes=torch.zeros(batch.n_tokens, 2, 2, dtype=torch.int16))
    report = learn(engine, make_adapter(), routed, version=4, base_dtype="float32", lr=0.5)
    assert (report.sums["fresh_tokens"], report.sums["stale_tokens"]) == (8 * 20, 24 * 20)


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
    adapter = _with(make_adapter(), minibatches=minibatches)
    batch = _long(3, version=2)
    drift = 0.2 * torch.randn(batch.n_tokens, generator=torch.Generator().manual_seed(4))
    engine = RecordedEngine((batch.rollout_logprobs + drift) * batch.loss_mask, batch)
    rolled = batch.rollout_logprobs.clone()
    rolled[batch.loss_mask] = rolled[batch.loss_mask].roll(by)
    if by == 0:
        assert _learn(engine, adapter, batch).sums["late_own"] > 100
        return
    with pytest.raises(AlignmentError, match="shifted by one token"):
        _learn(engine, adapter, replace(batch, rollout_logprobs=rolled))
    assert engine.denominators == []


def test_loss_refuses_a_batch_without_advantages() -> None:
    with pytest.raises(AssertionError, match="annotate"):
        make_loss(make_adapter(), 4)(make_batch(), torch.zeros(11), None)


def test_an_adaptive_kl_coefficient_is_state_of_the_training_and_weighs_loss_and_reward() -> None:
    state = TrainingState(adapter=make_adapter(kl_coef=0.2, kl_target=0.1))
    state.advance(skipped=False, kl=5.0, mismatch=None)
    assert state.kl_scale == pytest.approx(1.02)
    assert state.tuned.algorithm.terms.kl_coef == pytest.approx(0.2 * 1.02)
    assert state.adapter.algorithm.terms.kl_coef == 0.2
    state = TrainingState(adapter=make_adapter(kind="reinforce_pp", kl_coef=0.2, kl_target=0.1), kl_scale=2.0)
    assert (state.tuned.algorithm.shaping.kl_coef, state.tuned.algorithm.terms.kl_coef) == (0.4, 0.0)


def test_the_correction_of_a_step_is_chosen_by_the_mismatch_of_the_one_before() -> None:
    batch = make_batch()
    behind = replace(batch, versions=torch.where(batch.loss_mask, 3, -1))
    behind = replace(behind, rollout_logprobs=batch.rollout_logprobs - 2.0 * batch.loss_mask)
    engine, state = (
        RecordedEngine(batch.rollout_logprobs),
        TrainingState(adapter=make_adapter(behaviour_correction="auto")),
    )
    found = []
    for _ in range(3):
        report = _learn(engine, state.tuned, behind)
        found.append((report.correction, report.per_sampled_token("capped")))
        mismatch = report.per_sampled_token("behaviour_abs")
        assert mismatch == pytest.approx(2.0, rel=1e-5)
        state.advance(skipped=False, kl=None, mismatch=mismatch)
    assert found == [(Correction.TRUNCATE, 0.0), (Correction.MASK, 1.0), (Correction.MASK, 1.0)]
    assert _learn(engine, make_adapter(), batch).correction is None
    assert of_learning(report)["train/correction"] == 2


@pytest.mark.parametrize("reduction", ["token", "sequence", "constant"])
def test_the_loss_of_several_minibatches_is_divided_by_the_sum_of_their_denominators(reduction: str) -> None:
    """Of given answers: the mean negative log-probability in that reduction."""
    batch = replace(make_batch(), given=torch.ones(4, dtype=torch.bool))
    engine = RecordedEngine(batch.rollout_logprobs)
    found = of_learning(_learn(engine, make_adapter(reduction=reduction, minibatches=2), batch))["train/loss"]
    rows = [(-batch.rollout_logprobs[a + 1 : b]).tolist() for a, b in pairwise(batch.cu_seqlens.tolist())]
    sums, longest = [sum(row) for row in rows], make_adapter().config.sampling.max_new_tokens
    means = [total / len(row) for total, row in zip(sums, rows, strict=True)]
    wanted = {"token": sum(sums) / 7, "sequence": sum(means) / 4, "constant": sum(sums) / (4 * longest)}
    assert found == pytest.approx(wanted[reduction], rel=1e-5)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_entropies_are_reported_in_the_order_of_the_batch_where_the_algorithm_needs_them(minibatches: int) -> None:
    batch = make_batch()
    adapter = make_adapter(entropy_coef=0.01, minibatches=minibatches)
    found = _learn(RecordedEngine(batch.rollout_logprobs), adapter, batch).entropies
    assert found is not None
    assert torch.equal(found, -2 * batch.rollout_logprobs)
    assert _learn(RecordedEngine(batch.rollout_logprobs), make_adapter(), batch).entropies is None


def test_log_probabilities_before_the_step_are_reported_without_a_pass_for_them() -> None:
    batch = make_batch()
    engine = RecordedEngine(batch.rollout_logprobs)
    for adapter in (make_adapter(), make_adapter(entropy_coef=0.1), _with(make_adapter(), minibatches=2)):
        found = _learn(engine, adapter, batch)
        assert found.logprobs is not None
        assert torch.equal(found.logprobs, batch.rollout_logprobs)
        assert found.variants == Variants()
    assert engine.asked == ["gsm8k"], "two minibatches need the proximal policy"
    moved = _with(make_adapter(behaviour_correction="in_ratio"), minibatches=2)
    assert _learn(engine, moved, batch).logprobs is None, "the second minibatch is of a policy that has moved"


@pytest.mark.parametrize("audited", [[], [2], [0, 3]])
def test_audited_sequences_are_scored_without_each_possible_cause_of_a_mismatch(audited: list[int]) -> None:
    made, measures = make_batch(), bool(audited)
    batch = replace(made, routes=torch.zeros(11, 2, 2, dtype=torch.int16), kept=torch.zeros(11, 1, dtype=torch.int32))
    engine, adapter = RecordedEngine(batch.rollout_logprobs), make_adapter()

    def variants(batch: TrainBatch, served_as: ServedAs | None = None) -> Variants:
        engine.asked.clear()
        engine.only.clear()
        ready, names = annotate(engine, adapter, batch), {"base_dtype": "bfloat16", "served_as": served_as}
        found = learn(engine, adapter, ready, version=4, lr=0.5, audited=audited, **names).variants
        assert all(only.nonzero().flatten().tolist() == audited for only in engine.only)
        assert all(update.only is None for update in engine.updates)
        return found

    found = variants(batch)
    assert (found.own is not None) == (found.whole is not None) == measures == (engine.asked == ["gsm8k"] * 3)
    assert (found.free is not None) == measures
    routed = variants(replace(batch, kept=None))
    assert routed.free is routed.own
    assert (routed.own is not None) == measures == (engine.asked == ["gsm8k"])
    assert (found.flips, found.base) == (0.125 if measures else None, None)
    assert variants(made) == Variants(), "nothing is a possible cause, and the mismatch is 0"
    engine.base = batch.rollout_logprobs - 1.0
    differs = variants(replace(made, rollout_logprobs=made.rollout_logprobs + 0.03 * made.loss_mask))
    assert (differs.base is engine.base) == measures == (engine.asked == [None])
    assert differs.served is None
    little = replace(made, rollout_logprobs=made.rollout_logprobs + 1e-3 * made.loss_mask)
    assert variants(little) == Variants(), "rounding explains it"
    quantised = variants(little, "fp8_per_tensor")
    assert (quantised.served is not None) == measures == (engine.asked == [None, "fp8_per_tensor None"])
    assert variants(made, "fp8_per_tensor") == Variants(), "nor do quantised servers differ from the trainer"
    merged = variants(replace(made, rollout_logprobs=made.rollout_logprobs + 0.03 * made.loss_mask), "merged")
    assert (merged.served is not None) == measures == (engine.asked == ["merged gsm8k"])
    assert merged.base is None, "the servers have none to compare with"

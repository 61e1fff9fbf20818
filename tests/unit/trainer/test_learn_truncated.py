"""`algorithm.mask_truncated`: samples that a limit ended have no weight in any loss, and their part in baselines."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import fmean, stdev

import pytest
import torch

from areal_lora.algorithms.losses import Clip, Objective, Tokens
from areal_lora.data.collate import collate, select
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.trainer.adapter import Adapter, TrainingState
from areal_lora.trainer.learn import LearnReport, annotate, learn, make_loss
from areal_lora.trainer.step_metrics import of_learning
from areal_lora.types import AdapterRef, TokenColumns, TrainBatch, Trajectory, TrajectoryGroup
from tests.support.trainer.recorded import RecordedEngine, make_adapter, make_batch

REDUCTIONS = ("token", "sequence", "constant")
KL, ENTROPY, LONGEST, VERSION = 0.3, 0.05, 32, 4
ENDS = [["stop", "length", "stop"], ["max_turns", "stop", "stop"], ["stop", "timeout", "stop"]]
SECOND = "stop"
"""How the second conversation of each group's first sample ends."""


def drawn(seed: int) -> TrainBatch:
    """Three groups of three samples, of which one each is truncated; stale, so that records may differ."""
    random, groups = Random(seed), []
    for g, ends in enumerate(ENDS):
        made = []
        for sample, finish in enumerate(ends):
            reward = float(sample == g) + 0.1 * random.random()
            for n, how in enumerate([finish, SECOND] if sample == 0 else [finish]):
                versions = [-1, -1, 3, *random.choices([3, -1], [3, 1], k=random.randint(1, 6))]
                made.append(
                    Trajectory(
                        uid=f"{g}:{sample}:{n}",
                        sample=sample,
                        adapter=AdapterRef(name="gsm8k", version=3),
                        columns=TokenColumns.of(
                            [random.randrange(10**6) for _ in versions],
                            [-3 * random.random() if version > 0 else 0.0 for version in versions],
                            versions,
                        ),
                        reward=reward,
                        finish_reason=how,
                    )
                )
        groups.append(TrajectoryGroup(uid=f"0:{g}", trajectories=tuple(made)))
    return collate(PackedGroups.of(groups))


def engine_of(batch: TrainBatch, seed: int) -> RecordedEngine:
    moved, far = 0.4 * torch.randn(2, batch.n_tokens, generator=torch.Generator().manual_seed(seed))
    engine = RecordedEngine((batch.rollout_logprobs + moved) * batch.loss_mask, batch)
    engine.base = (engine.answer + far) * batch.loss_mask
    return engine


def step(adapter: Adapter, engine: RecordedEngine, batch: TrainBatch) -> LearnReport:
    annotated = annotate(engine, adapter, batch)  # type: ignore[arg-type]
    return learn(engine, adapter, annotated, version=VERSION, base_dtype="float32", lr=0.5)  # type: ignore[arg-type]


def rows_of(batch: TrainBatch, left_out: set[int]) -> list[tuple[int, float, list[int], bool]]:
    """Group, reward, positions on the mask of each sequence, and whether it has no weight."""
    bounds, on = batch.cu_seqlens.tolist(), batch.loss_mask.tolist()
    return [
        (
            int(batch.group_ids[i]),
            float(batch.rewards[i]),
            [t for t in range(bounds[i], bounds[i + 1]) if on[t]],
            int(batch.sample_ids[i]) in left_out,
        )
        for i in range(batch.n_sequences)
    ]


LEFT_OUT = {1, 3, 7}
"""Numbers of the samples in the batch: the middle one, the first one, the middle one of their groups."""


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_gradient_and_denominator_are_those_of_a_loop_that_gives_their_tokens_no_weight(
    reduction: str, seed: int
) -> None:
    """Float64, token by token. Every reward is in its group's mean and deviation."""
    batch = drawn(seed)
    engine = engine_of(batch, seed)
    adapter = make_adapter(kl_coef=KL, entropy_coef=ENTROPY, reduction=reduction, mask_truncated=True)
    report = step(adapter, engine, batch)
    rows = rows_of(batch, LEFT_OUT)
    current, rollout, ref = (x.tolist() for x in (engine.answer, batch.rollout_logprobs, engine.base))
    samples = dict(zip(batch.sample_ids.tolist(), rows, strict=True))
    loss, n_tokens, n_sequences, gradient = 0.0, 0, 0, [0.0] * batch.n_tokens
    for group, reward, tokens, left_out in rows:
        if left_out:
            continue
        rewards = [r for g, r, *_ in samples.values() if g == group]
        advantage = (reward - fmean(rewards)) / (stdev(rewards) + 1e-6)
        n_tokens, n_sequences = n_tokens + len(tokens), n_sequences + 1
        for t in tokens:
            weight = 1 / len(tokens) if reduction == "sequence" else 1.0
            w, d = math.exp(current[t] - rollout[t]), ref[t] - current[t]
            w *= w <= 5
            loss += weight * (-w * advantage + KL * (math.exp(d) - 1 - d) + ENTROPY * 2 * current[t])
            gradient[t] = weight * (-w * advantage + KL * (1 - math.exp(d)))
    assert report.sums["loss"] == pytest.approx(loss, rel=1e-5)
    divisor = {"token": n_tokens, "sequence": n_sequences, "constant": LONGEST * n_sequences}[reduction]
    assert of_learning(report)["train/loss"] == pytest.approx(loss / divisor, rel=1e-5), "the objective"
    (scale,) = (found / divisor for found in engine.denominators)
    assert scale == 1 or (reduction == "sequence" and math.log2(scale).is_integer())
    assert engine.gradient.tolist() == pytest.approx([scale * value for value in gradient], rel=1e-4, abs=1e-6)
    assert report.sums["tokens"] == n_tokens < batch.loss_mask.sum()
    assert report.sums["stale_tokens"] == batch.loss_mask.sum(), "records of all tokens are compared"
    plain = engine_of(batch, seed)
    step(make_adapter(kl_coef=KL, entropy_coef=ENTROPY, reduction=reduction), plain, batch)
    assert bool((plain.gradient[batch.loss_mask] != 0).all()), "without the key they have a weight"


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_critic_learns_nothing_from_them(reduction: str) -> None:
    batch = drawn(5)
    engine = engine_of(batch, 5)
    report = step(make_adapter(kind="ppo", reduction=reduction, mask_truncated=True), engine, batch)
    error, gradient, n_tokens, n_sequences = 0.0, [0.0] * batch.n_tokens, 0, 0
    for _, reward, tokens, left_out in rows_of(batch, LEFT_OUT):
        if left_out:
            continue
        n_tokens, n_sequences = n_tokens + len(tokens), n_sequences + 1
        for t in tokens:  # the engine's values are 0.25, those of its training pass the log-probabilities
            value, weight = float(engine.answer[t]), 1 / len(tokens) if reduction == "sequence" else 1.0
            near = 0.25 + min(max(value - 0.25, -0.2), 0.2)
            error += max((value - reward) ** 2, (near - reward) ** 2) / 2
            gradient[t] = weight * (value - reward) * ((value - reward) ** 2 >= (near - reward) ** 2)
    assert of_learning(report)["train/value_loss"] == pytest.approx(error / n_tokens, rel=1e-5)
    divisor = {"token": n_tokens, "sequence": n_sequences, "constant": LONGEST * n_sequences}[reduction]
    scale, same = (found / divisor for found in engine.denominators)
    assert scale == same
    assert engine.gradient.tolist() == pytest.approx([scale * value for value in gradient], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", ["gspo", "geo_mis", "cispo", "reinforce_pp", "distill"])
def test_micro_batches_add_up_and_what_their_tokens_hold_changes_no_gradient(kind: str) -> None:
    """Also where ratios and weights are of whole sequences, and with the divergence in the reward or the advantage."""
    batch = drawn(6)
    engine = engine_of(batch, 6)
    adapter = make_adapter(kind=kind, kl_coef=KL, minibatches=2, mask_truncated=True)
    annotated = annotate(engine, adapter, batch)  # type: ignore[arg-type]
    out = torch.tensor([int(sample) in LEFT_OUT for sample in batch.sample_ids]).repeat_interleave(
        batch.cu_seqlens.diff()
    )

    def gradient(logprobs: torch.Tensor, whole: TrainBatch, parts: list[list[int]]) -> torch.Tensor:
        scores, at = logprobs.clone().requires_grad_(), whole.cu_seqlens.tolist()
        for part in parts:
            own = torch.cat([scores[at[i] : at[i + 1]] for i in part])
            make_loss(adapter, VERSION)(select(whole, part), own, None).loss.backward()
        assert scores.grad is not None
        return scores.grad

    everything = [*range(batch.n_sequences)]
    want = gradient(engine.answer, annotated, [everything])
    assert not want[out].any()
    assert bool(want[~out].any())
    assert torch.allclose(
        gradient(engine.answer, annotated, [everything[::3], everything[1::3], everything[2::3]]), want
    )
    wild = torch.where(out, torch.full_like(engine.answer, -80.0), engine.answer)
    assert torch.equal(gradient(wild, annotated, [everything]), want)


def test_an_own_loss_sees_them_off_its_mask() -> None:
    batch, seen = drawn(7), list[Tokens]()
    adapter = make_adapter(mask_truncated=True)

    def own(clip: Clip, tokens: Tokens) -> Objective:
        seen.append(tokens)
        return Objective(value=tokens.advantages * tokens.logprobs, clipped=torch.zeros_like(tokens.on))

    terms = replace(adapter.algorithm.terms, loss=own)
    step(replace(adapter, algorithm=replace(adapter.algorithm, terms=terms)), engine_of(batch, 7), batch)
    out = torch.tensor([left_out for *_, left_out in rows_of(batch, LEFT_OUT)])
    tokens = batch.loss_mask & ~out.repeat_interleave(batch.cu_seqlens.diff())
    assert torch.equal(seen[0].on, tokens)
    assert not seen[0].advantages[~tokens].any()
    assert bool((seen[0].advantages[tokens] != 0).all())


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_batch_without_any_other_sample_takes_no_step_and_is_no_fault(kind: str) -> None:
    batch = replace(make_batch(), truncated=torch.ones(4, dtype=torch.bool))
    engine, state = RecordedEngine(batch.rollout_logprobs), TrainingState(adapter=make_adapter(kind=kind), version=4)
    report = step(make_adapter(kind=kind, mask_truncated=True), engine, batch)
    assert (engine.rates, engine.discarded) == ([], ["gsm8k"]), "momentum alone would move the adapter"
    assert (report.skipped, report.grad_norm, report.lr) == (0.0, 0.0, 0.5)
    assert of_learning(report)["train/loss"] == 0.0
    assert all(map(math.isfinite, report.sums.values()))
    kl, mismatch = (report.per_sampled_token(name) for name in ("kl", "behaviour_abs"))
    state.advance(skipped=report.skipped == 1.0, kl=kl, mismatch=mismatch)
    assert (state.version, state.skipped_steps, state.kl_scale) == (5, 0, 1.0)


def test_a_minibatch_without_any_other_sample_leaves_the_steps_of_the_others() -> None:
    batch = replace(make_batch(), truncated=torch.tensor([False, True, True, True]))
    engine = RecordedEngine(batch.rollout_logprobs)
    report = step(make_adapter(minibatches=2, mask_truncated=True), engine, batch)
    assert engine.denominators == [2.0]
    assert of_learning(report)["train/loss"] == pytest.approx(-(2**0.5) / 2, rel=1e-4), "the answer's advantage"
    assert report.grad_norm == 1.0


def test_tokens_without_weight_do_not_look_like_a_shift() -> None:
    """Scores differ by rounding alone: the mean is over all tokens that were compared, not over the trained one."""
    batch = replace(make_batch(), truncated=torch.tensor([True, True, True, False]))
    engine, adapter = RecordedEngine(batch.rollout_logprobs), make_adapter(mask_truncated=True)
    annotated = annotate(engine, adapter, batch)  # type: ignore[arg-type]
    near = replace(annotated, prox_logprobs=batch.rollout_logprobs - 6e-4 * batch.loss_mask)
    report = learn(engine, adapter, near, version=VERSION, base_dtype="float32", lr=0.5)  # type: ignore[arg-type]
    assert (report.sums["tokens"], report.sums["fresh_tokens"]) == (1, 7)
    assert report.sums["moved"] == pytest.approx(7 * 6e-4, rel=1e-3)

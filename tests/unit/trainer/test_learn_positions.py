"""Position oracle: where token t of sequence s has log-probability -(1000 s + t), a misplaced entry shows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_lora.algorithms.losses import k3
from areal_lora.data.collate import collate, find_trees, plan_microbatches
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.engine.base import LossFn
from areal_lora.engine.layers.attention import PackedMicroBatch, pack, to_sequences
from areal_lora.errors import AlignmentError
from areal_lora.obs.trace import Spans
from areal_lora.trainer import loop
from areal_lora.trainer.adapter import TrainingState
from areal_lora.trainer.learn import annotate, learn
from areal_lora.types import AdapterRef, StepStats, TokenColumns, TrainBatch, Trajectory, TrajectoryGroup
from tests.support.solo_exchange import SoloExchange
from tests.support.trainer.recorded import make_adapter

# Prompt and answers (of several turns, with what was given between them) of each sequence.
SHAPES = [[10, 40], [30, 20], [5, 45], [40, 10], [1, 1], [1, 45], [40, 1], [3, 7, 2, 1, 1, 5], [2, 1, 1, 1]]
REF_GAP = 0.5


def _trajectory(s: int, sample: int, version: int, shape: list[int], jitter: bool) -> Trajectory:
    mask = [int(turn % 2) for turn, n in enumerate(shape) for _ in range(n)]
    values = [_logprob(1000 * s + t, jitter) for t in range(len(mask))]
    return Trajectory(
        uid=str(s),
        sample=sample,
        adapter=AdapterRef(name="gsm8k", version=version),
        columns=TokenColumns.of(
            [1000 * s + t for t in range(len(mask))],
            [v if on else 0.0 for v, on in zip(values, mask, strict=True)],
            [version if on else -1 for on in mask],
        ),
        reward=float(sample % 2),
    )


def _logprob(token: Any, jitter: bool) -> Any:
    """Of the token ``1000 s + t``: distinct for every position, or alternating as in real answers."""
    return -(1.0 + 2.0 * (token % 2)) if jitter else -1.0 * token


def positions(version: int, *, jitter: bool = False) -> TrainBatch:
    """Three groups of three samples; sequence 0 would have log-probability 0 at its start, so s counts from 1."""
    rows = [_trajectory(s + 1, s % 3, version, shape, jitter) for s, shape in enumerate(SHAPES)]
    groups = [TrajectoryGroup(uid=str(g), trajectories=tuple(rows[3 * g : 3 * g + 3])) for g in range(3)]
    return collate(PackedGroups.of(groups))


class PositionEngine:
    """Packs and unpacks with the engine's own code; the model in between knows only token ids."""

    def __init__(self, dp: int = 1, budget: int = 64, *, jitter: bool = False, drift: float = 0.0) -> None:
        self.dp, self.budget, self.jitter, self.drift = dp, budget, jitter, drift
        self.steps, self.spans, self.memory = 0, Spans(), lambda: None

    def _packed(self, batch: TrainBatch) -> list[PackedMicroBatch]:
        lengths = batch.cu_seqlens.diff().tolist()
        trees = find_trees(lengths, batch.shared_starts.tolist(), batch.group_ids.tolist())
        plans = plan_microbatches(trees, lengths, dp=self.dp, token_budget=self.budget)
        return [pack(batch, plan, rank, torch.device("cpu")) for plan in plans for rank in range(self.dp)]

    def _predict(self, packed: PackedMicroBatch) -> torch.Tensor:
        noise = self.drift * torch.randn(packed.targets.numel(), generator=torch.Generator().manual_seed(1))
        return to_sequences(_logprob(packed.targets.float(), self.jitter) + noise, packed)

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> torch.Tensor:
        found, bounds = torch.zeros(batch.n_tokens), batch.cu_seqlens.tolist()
        for packed in self._packed(batch):
            values, at = self._predict(packed), 0
            for i in packed.sequences:
                n = bounds[i + 1] - bounds[i]
                found[bounds[i] : bounds[i + 1]] = values[at : at + n]
                at += n
        return found - (REF_GAP if adapter is None else 0.0)

    def forward_backward(self, batch: TrainBatch, loss_fn: LossFn, **_: object) -> dict[str, float]:
        sums: dict[str, float] = defaultdict(float)
        for packed in self._packed(batch):
            if not packed.micros:
                continue
            found = loss_fn(packed.micros[0], self._predict(packed), None)
            for name, value in {"loss": found.loss, **found.stats}.items():
                sums[name] += float(value)
        return dict(sums)

    def optim_step(self, adapter: str, denominator: float, lr: float) -> StepStats:
        self.steps += 1
        return StepStats(values={"grad_norm": 1.0, "lr": lr, "skipped": 0.0})


@pytest.mark.parametrize("kind", ["grpo", "gspo", "cispo", "icepop", "reinforce_pp"])
@pytest.mark.parametrize(("dp", "budget", "minibatches"), [(1, 1000, 1), (2, 64, 2), (4, 47, 3)])
def test_old_ref_current_and_rollout_logprobs_line_up(kind: str, dp: int, budget: int, minibatches: int) -> None:
    """One entry out of place is a difference of at least 1, and of thousands across sequences."""
    adapter = make_adapter(kind=kind, minibatches=minibatches, kl_coef=0.1, kl_estimator="k3", kl_in="loss")
    batch, engine = positions(version=4), PositionEngine(dp, budget)
    annotated = annotate(engine, adapter, batch)
    on = batch.loss_mask
    assert annotated.ref_logprobs is not None
    assert torch.equal(annotated.ref_logprobs[on], batch.rollout_logprobs[on] - REF_GAP)
    assert annotated.prox_logprobs is None or torch.equal(annotated.prox_logprobs[on], batch.rollout_logprobs[on])
    report = learn(engine, adapter, annotated, version=4, base_dtype="float32", lr=0.1)
    tokens = sum(n for shape in SHAPES for n in shape[1::2])
    assert report.sums["tokens"] == tokens
    if annotated.prox_logprobs is not None or minibatches == 1:
        assert report.sums["fresh_tokens"] == tokens
    for name in ("behaviour_abs", "moved", "fresh_gap", "clipped", "capped"):
        assert report.sums[name] == 0.0, name
    assert report.per_token("kl") == pytest.approx(float(k3(torch.tensor(0.0), torch.tensor(-REF_GAP))), rel=1e-6)


@pytest.mark.parametrize("broken_step", [0, 20])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_whose_alignment_breaks_is_stopped_in_that_step(
    monkeypatch: pytest.MonkeyPatch, broken_step: int, lag: int
) -> None:
    """Shifted within the answers, where masks and versions show nothing; also where every token is stale."""
    engine = PositionEngine(2, jitter=True, drift=0.2 if lag else 0.0)
    trainer: Any = SimpleNamespace(
        config=SimpleNamespace(
            model=SimpleNamespace(dtype="float32"),
            behaviour=SimpleNamespace(router_replay="off"),
            rollout=SimpleNamespace(in_flight="finish", served_as=None),
        ),
        engine=engine,
        rank_0=None,
        control=SoloExchange(),
        spans=defaultdict(Spans),
    )

    def batch_of(trainer: object, state: TrainingState, groups: object) -> Any:
        batch = positions(version=state.version - lag, jitter=True)
        if engine.steps == broken_step:
            shifted = batch.rollout_logprobs.clone()
            shifted[batch.loss_mask] = batch.rollout_logprobs[batch.loss_mask].roll(1)
            batch = replace(batch, rollout_logprobs=shifted)
        return batch, {}

    monkeypatch.setattr(loop, "batch_of", batch_of)
    for name in ("keep_pace", "save_and_publish"):
        monkeypatch.setattr(loop, name, lambda *_: None)
    monkeypatch.setattr(loop, "collect_audit", lambda *_: None)
    state = TrainingState(adapter=make_adapter(), version=lag)
    for _ in range(broken_step):
        loop.train_step(trainer, state, [])
    assert engine.steps == broken_step
    with pytest.raises(AlignmentError, match="shifted"):
        loop.train_step(trainer, state, [])
    assert engine.steps == broken_step, "no optimizer step uses the broken batch"

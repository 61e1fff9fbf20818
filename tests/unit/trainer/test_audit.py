"""What a server says of a batch under the versions that sampled it: every shift is found, at any lag, nothing else."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from areal_lora.algorithms.mismatch import after_change
from areal_lora.data.collate import contradiction, scoring_batch
from areal_lora.errors import PublishError
from areal_lora.trainer import audit as auditing
from areal_lora.trainer.audit import Audit, Auditor, audit, choose
from areal_lora.types import AdapterRef, TrainBatch
from areal_lora.weight_sync.messages import PublishReply
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, shapes_of
from tests.support.weight_sync.memory_server import MemoryServer

ETA, NOW = 2, 7
REF = AdapterRef(name="math", version=NOW)
FP32, BF16 = (1e-3, 1e-6), (0.2, 2e-2)  # limit, and how far two computations of one thing lie apart


def logprob(version: int, token_ids: list[int]) -> float:
    """Log-probability of the last token under a version: mostly sure, sometimes not. Versions differ a little.

    Version -1 is the base.
    """
    token_ids = token_ids[-4:]
    rng = random.Random(repr(token_ids))
    value = -rng.expovariate(0.7) if rng.random() < 0.4 else -0.02
    return value * (1 + 0.01 * random.Random(f"{version} {token_ids}").gauss(0, 1))


def server(noise: float, held: range = range(NOW + 1), down: bool = False) -> auditing.Score:
    def score(ref: AdapterRef | None, rows: list[list[int]]) -> list[list[float]]:
        version = ref.version if ref else -1
        if down or (ref and version not in held):
            raise PublishError(f"{ref} is not here")
        return [
            [
                0.0,
                *(
                    logprob(version, row[: t + 1]) + random.Random(f"n{row[max(0, t - 4) : t + 1]}").gauss(0, noise)
                    for t in range(1, len(row))
                ),
            ]
            for row in rows
        ]

    return score


def batch(seed: int, in_flight: str, n: int = 12, prompt: int = 6) -> TrainBatch:
    """Answers of 30 to 60 tokens. Under ``interrupt`` each has two or three versions, the oldest ETA behind."""
    rng = random.Random(seed)
    rows = [[rng.randrange(99) for _ in range(prompt + rng.randint(30, 60))] for _ in range(n)]
    made = scoring_batch(rows, "math")
    versions, mask, recorded = [], [], []
    for row in rows:
        length = len(row) - prompt
        if in_flight == "finish":
            mine = [NOW - ETA] * length
        else:
            cuts = sorted(rng.sample(range(1, length), 2))
            mine = [NOW - ETA] * cuts[0] + [NOW - 1] * (cuts[1] - cuts[0]) + [NOW] * (length - cuts[1])
        versions += [-1] * prompt + mine
        mask += [False] * prompt + [True] * length
        recorded += [0.0] * prompt + [logprob(v, row[: prompt + t + 1]) for t, v in enumerate(mine)]
    return replace(
        made, versions=torch.tensor(versions), loss_mask=torch.tensor(mask), rollout_logprobs=torch.tensor(recorded)
    )


def within(values: torch.Tensor, mask: torch.Tensor, by: int) -> torch.Tensor:
    """Rolled among the trained tokens only, so that prompts and masks do not show it."""
    rolled = values.clone()
    rolled[mask] = values[mask].roll(by)
    return rolled


def logprobs_rolled(b: TrainBatch, by: int) -> TrainBatch:
    return replace(b, rollout_logprobs=b.rollout_logprobs.roll(by))


def logprobs_rolled_within(b: TrainBatch, by: int) -> TrainBatch:
    return replace(b, rollout_logprobs=within(b.rollout_logprobs, b.loss_mask, by))


def tokens_rolled(b: TrainBatch, by: int) -> TrainBatch:
    return replace(b, token_ids=b.token_ids.roll(by))


def mask_rolled(b: TrainBatch, by: int) -> TrainBatch:
    return replace(b, loss_mask=b.loss_mask.roll(by))


def versions_rolled(b: TrainBatch, by: int) -> TrainBatch:
    return replace(b, versions=b.versions.roll(by))


def all_but_tokens(b: TrainBatch, by: int) -> TrainBatch:
    return replace(mask_rolled(versions_rolled(logprobs_rolled(b, by), by), by))


SHIFTS: list[Callable[[TrainBatch, int], TrainBatch]] = [
    logprobs_rolled,
    logprobs_rolled_within,
    tokens_rolled,
    mask_rolled,
    versions_rolled,
    all_but_tokens,
]


def found(b: TrainBatch, score: auditing.Score, limit: float, seed: int) -> Audit:
    """One step's checks, as the loop makes them: arrays against each other, then a server."""
    if problem := contradiction(b):
        return Audit(error=problem)
    return audit(choose(b, "math", seed), score, limit)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("in_flight", ["finish", "interrupt"])
def test_a_right_batch_is_confirmed_in_every_step(in_flight: str, dtype: tuple[float, float]) -> None:
    limit, noise = dtype
    for seed in range(12):
        got = found(batch(seed, in_flight), server(noise), limit, seed)
        assert not got.error, f"seed {seed}: {got.error}"
        assert got.tokens > 60
        assert got.gap is not None
        assert got.gap < limit


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("in_flight", ["finish", "interrupt"])
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("shift", SHIFTS)
def test_every_shift_by_one_is_found_where_all_tokens_are_stale(
    shift: Callable[[TrainBatch, int], TrainBatch], by: int, in_flight: str, dtype: tuple[float, float]
) -> None:
    limit, noise = dtype
    for seed in range(4):
        got = found(shift(batch(seed, in_flight), by), server(noise), limit, seed)
        assert got.error, f"seed {seed}"


def test_another_temperature_or_policy_than_the_recorded_one_is_found() -> None:
    right = batch(1, "finish")
    for wrong in (right.rollout_logprobs * 1.3, torch.where(right.loss_mask, right.rollout_logprobs - 0.4, 0.0)):
        assert "do not confirm" in found(replace(right, rollout_logprobs=wrong), server(1e-6), FP32[0], 1).error


@pytest.mark.parametrize("seed", range(10))
def test_kept_caches_are_no_contradiction_and_hide_none(seed: int) -> None:
    """Records of tokens after a change differ from every version; those before are of theirs."""
    right = batch(seed, "interrupt")
    mixed = after_change(right.versions, right.loss_mask)
    kept = replace(right, rollout_logprobs=torch.where(mixed, right.rollout_logprobs - 0.4, right.rollout_logprobs))

    def judged(b: TrainBatch, *, kept_caches: bool) -> Audit:
        return audit(choose(b, "math", seed, kept_caches=kept_caches), server(1e-6), FP32[0])

    found = judged(kept, kept_caches=True)
    assert found.error == ""
    assert found.tokens == judged(right, kept_caches=False).tokens
    assert (found.gap or 0.0) > 0.1, "the bill has it"
    assert judged(kept, kept_caches=False).error
    assert judged(replace(kept, rollout_logprobs=kept.rollout_logprobs * 1.5), kept_caches=True).error


def test_one_sequence_on_the_other_side_of_a_tie_between_experts_is_no_contradiction() -> None:
    right = batch(1, "finish")
    chosen = choose(right, "math", 3)
    spoiled = chosen[0].token_ids[:8]

    def score(ref: AdapterRef, rows: list[list[int]]) -> list[list[float]]:
        return [
            [x - 0.05 * (row[:8] == spoiled) for x in scores]
            for row, scores in zip(rows, server(1e-6)(ref, rows), strict=True)
        ]

    assert not audit(chosen, score, FP32[0]).error


def test_versions_that_no_server_holds_are_not_compared_and_end_nothing() -> None:
    got = found(batch(1, "interrupt"), server(1e-6, held=range(NOW, NOW + 1)), FP32[0], 1)
    assert got.tokens > 0
    assert f"math@v{NOW - ETA}" in got.missing
    gone = found(batch(1, "finish"), server(1e-6, down=True), FP32[0], 1)
    assert (gone.tokens, gone.gap, gone.error) == (0, None, "")


def test_excerpts_change_from_step_to_step_and_stay_short() -> None:
    made = batch(1, "finish", n=40)
    chosen = [choose(made, "math", seed) for seed in range(20)]
    assert len({e.sequence for excerpts in chosen for e in excerpts}) > 25
    assert all(len(e.token_ids) <= 40 for e in choose(made, "math", 1, max_tokens=40))
    assert choose(made, "math", 1, max_tokens=6) == [], "only prompts"


# ------------------------------------------------------------ the thread


def served(score: Any, name: str = "server-0") -> MemoryServer:
    def answer(model: str | None, rows: list[list[int]]) -> list[list[float]]:
        return score(AdapterRef.parse(model) if model else None, rows)

    made = MemoryServer(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, score=answer, name=name)
    for version in range(NOW - ETA, NOW + 1):
        ref = AdapterRef(name="math", version=version)
        made.held.reserve(ref)
        made.held.activate(ref, version, PublishReply(ref=str(ref), digest="", phases={}))
    return made


def test_a_batch_is_compared_beside_the_step_and_another_server_is_asked_where_one_is_gone() -> None:
    with served(server(1e-6)) as one, served(server(1e-6), "server-1") as other:
        auditor = Auditor(SECRET, FP32[0], timeout_s=120.0, max_model_len=128)
        auditor.activated(REF, (one.endpoint, other.endpoint))
        auditor.start(REF, batch(1, "interrupt"), 1.0, base=False)
        first = auditor.collect("math", wait=True)
        assert first is not None
        assert (first.error, first.missing) == ("", "")
        one.__exit__()
        auditor.start(REF, batch(2, "interrupt"), 1.0, base=False)
        second = auditor.collect("math", wait=True)
        assert second is not None
        assert second.tokens > 60
        assert not second.error
        auditor.start(REF, logprobs_rolled_within(batch(3, "finish"), 1), 1.0, base=False)
        third = auditor.collect("math", wait=True)
        assert third is not None
        assert "shifted by one token" in third.error
        assert auditor.collect("math") is None
        auditor.close()


def test_a_step_never_waits_for_a_server_and_what_was_found_meanwhile_is_not_lost() -> None:
    asked, answers = threading.Event(), threading.Event()

    def slow(ref: AdapterRef, rows: list[list[int]]) -> list[list[float]]:
        asked.set()
        assert answers.wait(120.0)
        return server(1e-6)(ref, rows)

    with served(slow) as one:
        auditor = Auditor(SECRET, FP32[0], timeout_s=120.0, max_model_len=128)
        auditor.activated(REF, (one.endpoint,))
        auditor.start(REF, logprobs_rolled_within(batch(3, "finish"), 1), 1.0, base=False)
        assert asked.wait(120.0)
        assert auditor.start(REF, batch(4, "finish"), 1.0, base=False) == []
        skipped = auditor.collect("math")
        assert skipped is not None
        assert (skipped.tokens, skipped.silent_steps) == (0, 1)
        assert skipped.missing == "the audit of an earlier batch is still running"
        answers.set()
        found = auditor.collect("math", wait=True)
        assert found is not None
        assert "shifted by one token" in found.error
        assert found.silent_steps == 0
        auditor.close()


def test_truncated_records_are_compared_in_the_whole_distribution() -> None:
    made = batch(5, "interrupt")
    mass = torch.where(
        made.loss_mask, -0.5 * torch.rand(made.n_tokens, generator=torch.Generator().manual_seed(1)), 0.0
    )
    kept = torch.full((made.n_tokens, 1), -1, dtype=torch.int32)
    made = replace(made, rollout_logprobs=made.rollout_logprobs - mass, log_mass=mass, kept=kept)
    with served(server(0.0)) as one:
        auditor = Auditor(SECRET, FP32[0], timeout_s=120.0, max_model_len=128)
        auditor.activated(REF, (one.endpoint,))
        auditor.start(REF, made, 1.0, base=False)
        found = auditor.collect("math", wait=True)
        auditor.close()
    assert found is not None
    assert (found.error, found.missing) == ("", "")
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert found.rescored is not None
    at, scores = found.rescored.at, found.rescored.scores
    assert scores.kept.tolist() == made.rollout_logprobs[at].tolist()
    assert (scores.recorded - scores.kept).tolist() == pytest.approx(mass[at].tolist(), abs=1e-6)
    assert audit(choose(replace(made, log_mass=None), "math", 1), server(0.0), FP32[0]).error


@pytest.mark.parametrize("base", [False, True])
def test_tokens_are_scored_under_the_version_in_training_once_it_is_active(base: bool) -> None:
    made = batch(5, "interrupt")
    with served(server(0.0)) as one:
        auditor = Auditor(SECRET, FP32[0], timeout_s=120.0, max_model_len=128)
        auditor.activated(replace(REF, version=NOW - 1), (one.endpoint,))
        chosen = auditor.start(REF, made, 1.0, base=base)
        late = threading.Timer(0.3, lambda: auditor.activated(REF, (one.endpoint,)))
        late.start()
        found = auditor.collect("math", wait=True)
        auditor.close()
    assert found is not None
    assert not late.is_alive()
    again = found.rescored
    assert again is not None
    assert (again.version, len(set(again.at)), len(again.at)) == (NOW, found.tokens, found.tokens)
    ends = made.cu_seqlens[1:]
    assert torch.searchsorted(ends, torch.tensor(again.at), right=True).unique().tolist() == chosen
    scores = again.scores
    assert scores.recorded.tolist() == scores.kept.tolist() == made.rollout_logprobs[again.at].tolist()
    bounds, texts = made.cu_seqlens.tolist(), made.token_ids.tolist()
    rows = [texts[max(start for start in bounds if start <= t) : t + 1] for t in again.at]
    sampled = [logprob(int(made.versions[t]), row) for t, row in zip(again.at, rows, strict=True)]
    assert scores.sampled.tolist() == pytest.approx(sampled)
    assert scores.current.tolist() == pytest.approx([logprob(NOW, row) for row in rows])
    assert NOW in made.versions[again.at]
    assert not any(again.fresh), "those of the newest follow older ones"
    assert (scores.base is not None) == base
    assert scores.base is None or scores.base.tolist() == pytest.approx([logprob(-1, row) for row in rows])


def test_answers_of_the_version_in_training_alone_are_fresh() -> None:
    ref = replace(REF, version=NOW - ETA)
    found = audit(choose(batch(1, "finish"), "math", 1), server(0.0), FP32[0], ref).rescored
    assert found is not None
    assert found.fresh == [True] * len(found.at)


def test_without_a_server_of_the_version_in_training_the_comparison_stands() -> None:
    found = audit(choose(batch(1, "finish"), "math", 1), server(0.0, range(NOW)), FP32[0], REF)
    assert (found.error, found.missing, found.rescored) == ("", "", None)
    assert found.tokens > 60


@pytest.mark.parametrize("in_flight", ["interrupt", "finish"])
def test_servers_with_merged_weights_have_the_version_in_training_only(in_flight: str) -> None:
    """Which is enough for the mismatch's parts, but for that of wrong records."""

    def merged(ref: AdapterRef | None, rows: list[list[int]]) -> list[list[float]]:
        return server(0.0, range(NOW, NOW + 1))(ref, rows) if ref else []

    made = batch(1, in_flight)
    excerpts = choose(made, "math", 1)
    found = audit(excerpts, merged, FP32[0], REF, base=True)
    assert found.tokens == sum(len(e.at) for e in excerpts if e.ref == REF)
    assert f"math@v{NOW - ETA} is not here" in found.missing
    assert found.rescored is not None
    at, scores = found.rescored.at, found.rescored.scores
    assert len(set(at)) == len(at) == sum(len(e.at) for e in excerpts), "tokens of every version"
    assert (scores.sampled, scores.base) == (None, None)
    assert scores.recorded.tolist() == pytest.approx(made.rollout_logprobs[at].tolist())
    starts = made.cu_seqlens.tolist()
    rows = [made.token_ids[max(s for s in starts if s <= t) : t + 1].tolist() for t in at]
    assert scores.current.tolist() == pytest.approx([logprob(NOW, row) for row in rows])


def test_scores_of_a_step_that_measures_causes_are_neither_left_out_nor_replaced() -> None:
    measured, plain, go_on = REF, replace(REF, version=NOW - 1), threading.Event()

    def slow(ref: AdapterRef | None, rows: list[list[int]]) -> list[list[float]]:
        assert go_on.wait(120.0)
        return server(0.0)(ref, rows)

    with served(slow) as one:
        auditor = Auditor(SECRET, FP32[0], timeout_s=240.0, max_model_len=128)
        auditor.activated(REF, (one.endpoint,))
        for ref in (plain, measured):  # the second one starts while the first waits
            auditor.start(ref, batch(1, "interrupt"), 1.0, base=ref == measured)
        go_on.set()
        behind = auditor.collect("math", wait=True)
        for ref in (measured, plain):
            auditor.start(ref, batch(1, "interrupt"), 1.0, base=ref == measured)
            assert auditor.collect("another", wait=True) is None
        before = auditor.collect("math")
        auditor.close()
    for found in (behind, before):
        assert found is not None
        assert found.missing == ""
        assert found.rescored is not None
        assert found.rescored.version == measured.version
        assert found.rescored.scores.base is not None


def test_an_answer_that_no_comparison_expects_ends_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """A server that scores one sequence too few."""
    with served(lambda ref, rows: server(1e-6)(ref, rows)[1:]) as one:
        auditor = Auditor(SECRET, FP32[0], timeout_s=120.0, max_model_len=128)
        auditor.activated(REF, (one.endpoint,))
        auditor.start(REF, batch(1, "finish"), 1.0, base=False)
        found = auditor.collect("math", wait=True)
        auditor.close()
    assert found is not None
    assert (found.tokens, found.silent_steps, found.error) == (0, 1, "")
    assert found.missing.startswith("ValueError: ")
    assert "the audit of a batch of math" in caplog.text


def test_a_run_in_which_nothing_can_be_compared_says_so(caplog: pytest.LogCaptureFixture) -> None:
    auditor = Auditor(SECRET, FP32[0], timeout_s=60.0, max_model_len=128)
    for step in range(auditing.QUIET_STEPS):
        auditor.start(REF, batch(step, "finish"), 1.0, base=False)
        got = auditor.collect("math", wait=True)
        assert got is not None
        assert (got.tokens, got.silent_steps, got.error) == (0, step + 1, "")
    assert "no token of the last 10 batches" in caplog.text
    auditor.close()

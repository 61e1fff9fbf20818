"""The metrics of steps, against figures made by hand."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
import torch

from areal_lora.algorithms.mismatch import ServerScores
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.common.adapter_engine import DeviceMemory
from areal_lora.obs.trace import Spans
from areal_lora.operations.protocol import Loss, OptimStep, Pass, PassResult, StepResult
from areal_lora.rollout.channel.channel_messages import Batch, GroupSums, Stats, decode_reply, encode
from areal_lora.trainer.audit import Audit, AuditedTokens
from areal_lora.trainer.learn import LearnReport, Variants
from areal_lora.trainer.step_metrics import (
    Devices,
    Window,
    explained_variance,
    measured,
    of_batch,
    of_client,
    of_groups,
    of_memory,
    of_mismatch,
    of_rollouts,
    of_sampled,
    of_speed,
)
from areal_lora.types import TokenColumns, TrajectoryGroup
from tests.support.clocks import Clock
from tests.support.operations.client import datum
from tests.support.rollout.helpers import stream, trajectory
from tests.support.trainer.packed import batch_of, draw_rows

DATA = (datum([1, 2, 3], [0.0, 2.0]), datum([4, 5], [-1.0]))


def test_a_window_sums_its_passes_with_gradients() -> None:
    window = Window()
    for loss, backward in ((3.0, True), (9.0, False), (1.0, True)):
        request = Pass(data=DATA, loss=Loss.CROSS_ENTROPY, backward=backward)
        window.add(request, PassResult(logprobs=(), loss=loss))
    assert window == Window(tokens=10, sequences=4, targets=4, loss=4.0)


def test_what_is_measured_of_a_clients_step_is_in_its_metrics() -> None:
    stepped = StepResult(step=3, grad_norm=1.5, skipped=False)
    found = measured(of_client(Window(tokens=10, sequences=4, targets=8, loss=4.0), OptimStep(lr=0.01), stepped))
    assert (found["train/loss"], found["train/grad_norm"], found["train/lr"]) == (0.5, 1.5, 0.01)
    assert (found["train/n_tokens"], found["train/n_sequences"]) == (10, 4)


@pytest.mark.parametrize("targets", [0, 2])
def test_a_skipped_step_has_no_norm_and_a_window_without_targets_no_loss(targets: int) -> None:
    stepped = StepResult(step=3, grad_norm=0.0, skipped=True)
    found = measured(of_client(Window(targets=targets, loss=4.0), OptimStep(lr=0.01), stepped))
    assert "train/grad_norm" not in found
    assert found.get("train/loss") == (2.0 if targets else None)


def group(*answers: tuple[float, bool | None], given: bool = False) -> TrajectoryGroup:
    prompt = stream().at(0)
    made = [
        replace(trajectory(prompt, 0, index=i, reward=reward), correct=right, given=given)
        for i, (reward, right) in enumerate(answers)
    ]
    return TrajectoryGroup(uid=prompt.uid, trajectories=tuple(made))


def test_shares_count_sampled_groups_and_correctness_where_it_is_known() -> None:
    right, wrong = group((0.9, True), (1.0, True)), group((0.0, False), (0.0, False))
    mixed, unknown = group((1.0, True), (0.0, False)), group((0.5, None), (0.5, True))
    imitated = group((1.0, True), given=True)

    def found(*groups: TrajectoryGroup) -> dict[str, float]:
        sampled = GroupSums()
        for each in groups:
            sampled.add(each)
        return measured(of_sampled(sampled))

    shares = {"train/groups_equal": 2 / 4, "train/groups_all_right": 1 / 3, "train/groups_all_wrong": 1 / 3}
    assert found(right, wrong, mixed, unknown, imitated) == shares | {"train/reward_sampled": pytest.approx(3.9 / 8)}
    assert found(imitated) == {}
    assert found(unknown) == {"train/groups_equal": 1.0, "train/reward_sampled": 0.5}
    cut = replace(mixed, trajectories=(replace(mixed.trajectories[0], finish_reason="length"), mixed.trajectories[1]))
    assert of_groups([right, cut, imitated])["train/truncated"] == 1 / 4
    assert measured(of_groups([imitated])) == {}


def test_lengths_and_turns_are_those_of_samples() -> None:
    """Against loops over the tokens: agents of several trajectories and turns, some of which two versions sampled."""
    rng = random.Random(7)
    groups, tokens, turns, prompts, right, wrong = [], [], [], [], [], []
    for uid in map(str, range(30)):
        made = []
        for index in range(4):
            correct, lengths = rng.choice((True, False, None)), []
            for number in range(rng.choice((1, 1, 3))):
                versions = [-1] * rng.randrange(1, 9)
                prompts += [len(versions)] if number == 0 else []
                for _ in range(rng.randrange(1, 4)):
                    lengths.append(rng.randrange(2, 40))
                    versions += [3] * (lengths[-1] // 2) + [4] * (lengths[-1] - lengths[-1] // 2) + [-1] * 2
                columns = TokenColumns.of([1] * len(versions), [0.0] * len(versions), versions)
                answer = replace(trajectory(stream().at(0), 3, index=index), columns=columns, correct=correct)
                made.append(replace(answer, uid=f"{uid}:{index}:{number}"))
            tokens.append(sum(lengths))
            turns.append(len(lengths))
            {True: right, False: wrong, None: []}[correct].append(tokens[-1])
        rng.shuffle(order := list(range(4)))  # of the samples, whose trajectories keep theirs
        made.sort(key=lambda t: order[t.sample])
        groups.append(TrajectoryGroup(uid=uid, trajectories=tuple(made)))
    given = replace(trajectory(stream().at(0), 3, tokens=999), given=True)
    found = measured(of_groups([*groups, TrajectoryGroup(uid="given", trajectories=(given,))]))
    assert found.pop("train/truncated") == 0.0
    cuts = statistics.quantiles(tokens, n=100, method="inclusive")
    assert found == pytest.approx(
        {
            "train/answer_tokens_p50": statistics.median(tokens),
            "train/answer_tokens_p95": cuts[94],
            "train/answer_tokens_max": max(tokens),
            "train/answer_tokens_right": statistics.fmean(right),
            "train/answer_tokens_wrong": statistics.fmean(wrong),
            "train/prompt_tokens": statistics.fmean(prompts),
            "train/turns": statistics.fmean(turns),
            "train/turns_max": max(turns),
        }
    )


def test_a_batch_from_the_controller_has_the_figures_of_what_was_sampled_for_it() -> None:
    """A batch of one group that a filter has left of four."""
    sampled = GroupSums(groups=4, equal=3, judged=4, all_right=0, all_wrong=3, samples=8, reward=1.0)
    counts = dict.fromkeys(("ready", "running", "leased", "issued", "consumed", "reissued", "late", "ahead"), 0)
    stats = Stats(**counts, dropped={}, retried={}, tokens_generated=0, idle_s=0.0, margin_s=0.0, spare_s=None)
    kept = (group((1.0, True), (0.0, False)),)
    batch = Batch(adapter="a", step=0, groups=kept, stats=stats, sampled=sampled, texts=(), events=(), snapshot=b"")
    received = decode_reply(encode(batch))
    assert isinstance(received, Batch)
    found = of_rollouts(received)
    assert (found["train/reward_sampled"], found["train/groups_equal"]) == (1 / 8, 3 / 4)
    assert (found["train/groups_all_right"], found["train/groups_all_wrong"]) == (0.0, 3 / 4)


def test_speeds_are_of_one_device_and_shares_of_its_peak() -> None:
    """Four devices take 8 s for 1.6 TFLOP, 4 s of them for the passes, and compute 0.8 TFLOP of it again."""
    clock = Clock()
    spans = Spans(lambda: clock.now)
    clock.now += 8.0
    spans.add("score", 1.0)
    spans.add("passes", 3.0)
    spans.counts.update(flops=1_600_000_000_000, recomputed_flops=800_000_000_000)
    found = measured(of_speed(spans, 3200, Devices(count=4, peak_flops=0.4e12)))
    assert found == pytest.approx(
        {"speed/tokens_per_s": 100.0, "speed/tflops": 0.1, "speed/mfu": 0.25, "speed/hfu": 0.375}
    )
    spans.counts.pop("recomputed_flops")
    assert measured(of_speed(spans, 3200, Devices(count=4))).keys() == {"speed/tokens_per_s", "speed/tflops"}


def scored(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_mismatch_of_audited_tokens_is_split_where_all_policies_are_known() -> None:
    scores = ServerScores(
        recorded=scored(-1.5, -1.5),
        kept=scored(-1.5, -1.5),
        sampled=scored(-1.4, -1.5),
        current=scored(-1.2, -1.6),
        base=scored(-1.0, -1.0),
    )
    audit = Audit(rescored=AuditedTokens(version=3, at=[1, 3], fresh=[False, True], scores=scores))
    report = LearnReport(sums={}, grad_norm=1.0, lr=0.1, skipped=0.0, logprobs=torch.tensor([9.0, -1.0, 9.0, -2.0]))

    def parts(report: LearnReport) -> dict[str, float | None]:
        found = of_mismatch(audit, {2: replace(report, logprobs=-report.logprobs), 3: report})
        return {tag.removeprefix("mismatch/"): found[tag] for tag in found if tag.startswith("mismatch/")}

    known = {"record": 0.05, "staleness": 0.15}  # mean |d| is 0.5, 0.45, 0.3
    assert parts(report) == pytest.approx(known | {"numerics": 0.3}, abs=1e-6)
    kls = [value or 0 for tag, value in of_mismatch(audit, {3: report}).items() if tag.startswith("mismatch_kl/")]
    assert sum(kls) == pytest.approx(0.125)
    own, base = torch.tensor([9.0, -0.8, 9.0, -1.8]), torch.tensor([9.0, -0.8, 9.0, -1.0])
    apart = replace(report, variants=Variants(own=own, base=base))
    assert parts(apart) == pytest.approx(known | {"flips": 0.0, "adapter": 0.2, "numerics": 0.1}, abs=1e-6)
    served = torch.tensor([9.0, -0.9, 9.0, -1.0])
    weighed = replace(report, variants=Variants(own=own, base=base, served=served))
    assert parts(weighed) == pytest.approx(
        known | {"flips": 0.0, "adapter": 0.2, "weights": 0.05, "numerics": 0.05}, abs=1e-6
    )
    unconfirmed = Audit(
        rescored=AuditedTokens(version=3, at=[1, 3], fresh=[False, True], scores=replace(scores, sampled=None))
    )
    merged = {tag: part for tag, part in of_mismatch(unconfirmed, {3: report}).items() if tag.startswith("mismatch/")}
    assert merged == pytest.approx({"mismatch/staleness": 0.2, "mismatch/numerics": 0.3}, abs=1e-6)
    truncated = replace(report, truncated=True)
    assert parts(truncated) == {}
    whole = torch.tensor([9.0, -1.1, 9.0, -2.0])
    truncated = replace(truncated, variants=Variants(whole=whole))
    assert parts(truncated) == pytest.approx(
        {"truncation": 0.05, "record": 0.05, "staleness": 0.15, "numerics": 0.25}, abs=1e-6
    )
    assert of_mismatch(Audit(), {3: report}) == {}
    assert of_mismatch(audit, {4: report}) == {}
    assert of_mismatch(audit, {3: replace(report, logprobs=None)}) == {}


def test_other_experts_of_a_newer_version_are_no_numerics_of_tokens_with_routes() -> None:
    """A server scores a stale token under the current version along that one's routes, where a tie may choose another
    expert; the trainer replays those of the sampling. Seen: a divergence of 0.06 in one step."""
    sampled = scored(-1.0, -1.0, -1.5)
    scores = ServerScores(recorded=sampled, kept=sampled, sampled=sampled, current=scored(-5.0, -1.1, -1.5))
    audited = AuditedTokens(version=3, at=[0, 1, 2], fresh=[False, False, True], scores=scores)
    report = LearnReport(
        sums={}, grad_norm=1.0, lr=0.1, skipped=0.0, replayed=True, logprobs=torch.tensor([-1.0, -1.1, -1.6])
    )

    def gaps(fresh: list[bool], report: LearnReport) -> dict[str, float | None]:
        found = of_mismatch(Audit(rescored=replace(audited, fresh=fresh)), {3: report})
        return {tag.removeprefix("mismatch/"): part for tag, part in found.items() if tag.startswith("mismatch/")}

    assert gaps(audited.fresh, report) == {}, "its own choice is not known in this step"
    own = torch.tensor([-5.0, -1.1, -3.0])
    known = replace(report, variants=Variants(own=own, free=own))
    expected = {"flips": 5.6 / 3 - 0.2 / 3, "record": 0.0, "staleness": 0.1 / 3, "numerics": 0.1 / 3}
    assert gaps(audited.fresh, known) == pytest.approx(expected, abs=1e-6)
    assert gaps([True] * 3, report)["numerics"] == pytest.approx(4.1 / 3, abs=1e-6), "both sides along one route"
    whole = torch.tensor([-1.0, -1.2, -1.6])
    truncated = replace(report, truncated=True, variants=Variants(own=own, whole=whole))
    assert gaps(audited.fresh, truncated) == {}
    truncated = replace(truncated, variants=replace(truncated.variants, free=own - 0.1))
    assert gaps(audited.fresh, truncated)["numerics"] == pytest.approx((0.1 + 0.1 + 0.1) / 3, abs=1e-6)


def test_sampled_tokens_without_a_route_of_their_prediction_are_counted() -> None:
    batch = scoring_batch([[5, 6, 7, 8], [1, 2, 3]], "a")
    assert "train/replayed" not in measured(of_batch(batch))
    routes = torch.zeros(7, 2, 2, dtype=torch.int16)
    routes[[1, 3, 6]] = -1  # the last tokens of both predict nothing
    found = measured(of_batch(replace(batch, routes=routes)))
    assert (found["train/not_replayed"], found["train/replayed"]) == (1, 0.8)
    given = replace(batch, routes=routes, given=torch.tensor([True, False]))
    assert measured(of_batch(given))["train/not_replayed"] == 0


def test_memory_is_in_gib_and_the_rest_is_what_no_part_explains() -> None:
    memory = DeviceMemory(peak=60 << 30, base=16 << 30, adapters=4 << 30)
    parts = {"peak": 60.0, "base": 16.0, "adapters": 4.0, "rest": 40.0}
    assert of_memory(memory) == {f"memory/{name}_gib": gib for name, gib in parts.items()}
    assert of_memory(None) == {}


def test_the_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one() -> None:
    batch = batch_of(draw_rows(1))
    returns = torch.rand(batch.n_tokens, generator=torch.Generator().manual_seed(2))
    assert explained_variance(replace(batch, values=returns, returns=returns)) == 1.0
    constant = replace(batch, values=torch.full_like(returns, 0.3), returns=returns)
    assert explained_variance(constant) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(replace(constant, returns=constant.values)) is None
    assert explained_variance(replace(constant, values=None)) is None
    off = replace(constant, values=torch.where(batch.loss_mask, returns, 100.0))
    assert explained_variance(off) == 1.0, "tokens that were not sampled do not count"

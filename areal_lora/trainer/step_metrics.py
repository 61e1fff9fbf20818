"""The metrics of a training step by tag: each is named here, once. `StepRecord.metrics` has them, readers use the tags.

A tag is what TensorBoard and trackers show: ``train/``, ``time/`` (seconds), ``speed/``, ``memory/`` (GiB), ``reward/``
and ``reward_cost/`` by name, ``mismatch/`` and ``mismatch_kl/`` by cause, ``machine/`` (`obs.machine`), ``extra/``.
Fractions are in [0, 1], log-probabilities in nats. None: not measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_lora.algorithms.advantages import sample_rewards
from areal_lora.algorithms.mismatch import TrainerScores, chain, shifted_share, split
from areal_lora.engine.common.adapter_engine import DeviceMemory
from areal_lora.obs.trace import Spans
from areal_lora.obs.warnings import GAP, KL
from areal_lora.operations.protocol import OptimStep, Pass, PassResult, StepResult
from areal_lora.rollout.channel.channel_messages import Batch, GroupSums, Stats
from areal_lora.trainer.audit import Audit
from areal_lora.trainer.companions import sampled_mask
from areal_lora.trainer.learn import LearnReport
from areal_lora.types import TrainBatch, TrajectoryGroup

Metrics = dict[str, float | None]


def measured(metrics: Metrics) -> Metrics:
    """Without what was not measured."""
    return {tag: value for tag, value in metrics.items() if value is not None}


def of_rollouts(batch: Batch) -> Metrics:
    """Of a batch as the controller sends it.

    ``reward/`` are the means of the reward's named parts. ``reward_cost/`` is what a judge has cost since the previous
    step: ``judge/calls``, ``judge/prompt_tokens``, ``judge/cached_share`` and so on.
    """
    parts: Metrics = {f"reward/{part}": mean for part, mean in batch.reward_components.items()}
    costs = {f"reward_cost/{name}": value for name, value in batch.reward_costs.items()}
    return parts | costs | of_groups(batch.groups) | of_sampled(batch.sampled) | of_queue(batch.stats)


def of_queue(stats: Stats) -> Metrics:
    """Groups at the delivery of a batch; reissued and late ones (answered after their group was reissued) in all.

    ``groups_ahead`` is the number of groups that pacing allows before the version that would make them fresher.
    ``batch_spare_s`` is how long the batch was whole before the trainer requested it (negative: the trainer waited);
    with ``pacing_margin_s`` or less its groups count as late.
    """
    return {
        "train/groups_ready": stats.ready,
        "train/groups_running": stats.running,
        "train/groups_leased": stats.leased,
        "train/groups_issued": stats.issued,
        "train/groups_consumed": stats.consumed,
        "train/groups_ahead": stats.ahead,
        "train/reissued": stats.reissued,
        "train/late": stats.late,
        "time/pacing_margin_s": stats.margin_s,
        "time/batch_spare_s": stats.spare_s,
    }


def of_groups(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Of groups without given answers; ``truncated`` is the share of answers that the limit of tokens ended.

    The others are of samples: tokens and turns (runs of sampled tokens) of all trajectories of each, and
    ``prompt_tokens`` before its first turn.
    """
    groups = [group for group in groups if not any(t.given for t in group.trajectories)]
    sampled = [((g, t.sample), t) for g, group in enumerate(groups) for t in group.trajectories]
    if not sampled:
        return {}
    firsts = dict(reversed(sampled))  # of the trajectories of each sample
    numbers = {key: number for number, key in enumerate(firsts)}
    each = [t.columns.runs for _, t in sampled]
    runs, counts = np.concatenate(each), [len(own) for own in each]
    samples = np.repeat([numbers[key] for key, _ in sampled], counts)
    own = runs[:, 0] >= 0
    tokens = np.bincount(samples, runs[:, 1] * own)
    turns = np.bincount(samples, own & ~np.append(False, own[:-1]))  # no trajectory starts with a sampled token
    judged = [(t.correct, n) for t, n in zip(firsts.values(), tokens.tolist(), strict=True)]
    return {
        "train/truncated": _mean([t.finish_reason == "length" for _, t in sampled]),
        "train/answer_tokens_p50": float(np.percentile(tokens, 50)),
        "train/answer_tokens_p95": float(np.percentile(tokens, 95)),
        "train/answer_tokens_max": float(tokens.max()),
        "train/answer_tokens_right": _mean([n for correct, n in judged if correct]),
        "train/answer_tokens_wrong": _mean([n for correct, n in judged if correct is False]),
        "train/prompt_tokens": _mean([int(t.columns.runs[0, 1]) for t in firsts.values()]),
        "train/turns": float(turns.mean()),
        "train/turns_max": float(turns.max()),
    }


def of_sampled(sampled: GroupSums) -> Metrics:
    """Mean reward and shares of the groups answered since the batch before: a filter drops some of them.

    Rewards are equal in groups that teach nothing. The shares of groups whose answers are all correct, or all not, are
    of those where that is known of every answer.
    """
    return {
        "train/reward_sampled": _ratio(sampled.reward, sampled.samples),
        "train/groups_equal": _ratio(sampled.equal, sampled.groups),
        "train/groups_all_right": _ratio(sampled.all_right, sampled.judged),
        "train/groups_all_wrong": _ratio(sampled.all_wrong, sampled.judged),
    }


def of_batch(batch: TrainBatch) -> Metrics:
    """``explained_variance`` is the share of the returns' variance that a critic's values before the step explain (at
    most 1). ``sampled_nll`` is the mean negative log-probability of the sampled tokens under the versions that sampled
    them: an estimate of the policy's entropy. ``baseline_mean`` is the mean reward of the greedy answers.
    ``replayed`` is the share of the sampled tokens that are predicted along a server's routes, ``not_replayed`` counts
    the others.
    """
    rewards = sample_rewards(batch.rewards, batch.sample_ids)
    of_sampled, missing = sampled_mask(batch), None
    sampled = batch.rollout_logprobs[of_sampled]
    if batch.routes is not None:  # the token before predicts, and no sequence starts with a sampled one
        missing = int((batch.routes[:-1, 0, 0] < 0)[of_sampled[1:]].sum())
    baselines = None if batch.baselines is None else sample_rewards(batch.baselines, batch.sample_ids)
    return {
        "train/reward_mean": float(rewards.mean()),
        "train/reward_std": float(rewards.std(correction=0)),
        "train/n_tokens": batch.n_tokens,
        "train/n_sequences": batch.n_sequences,
        "train/mean_answer_tokens": float(batch.loss_mask.sum()) / batch.n_sequences,
        "train/sampled_nll": -float(sampled.mean()) if sampled.numel() else None,
        "train/explained_variance": explained_variance(batch),
        "train/replayed": None if missing is None or not sampled.numel() else 1.0 - missing / sampled.numel(),
        "train/not_replayed": missing,
        "extra/given_fraction": float(batch.given.float().mean()),
        "extra/baseline_mean": None if baselines is None else float(baselines.nanmean()),
    }


def explained_variance(batch: TrainBatch) -> float | None:
    """``1 - Var(returns - values) / Var(returns)`` over the batch's sampled tokens; None without critic or variance.

    1: the critic's values before the step were the returns; 0: no better than their mean.
    """
    if batch.values is None or batch.returns is None:
        return None
    mask = sampled_mask(batch)
    values, returns = batch.values[mask].double(), batch.returns[mask].double()
    variance = float(returns.var(correction=0)) if returns.numel() else 0.0
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance else None


def of_learning(report: LearnReport) -> Metrics:
    """``loss`` is the objective in its reduction. ``behaviour_mean_abs`` is mean |prox - rollout| logprob over
    sampled tokens; ``mismatch_fresh`` is the same over tokens of the trained version, where only numerics differ;
    ``mismatch_stale`` is the same over older tokens. ``value_loss`` is half the squared error of a critic's values per
    trained token. ``router_flips`` is the share of pairs (token, layer) for which the trainer's router chooses other
    experts than the routes that it replays, in micro-batches with audited sequences.
    """
    votes, share = shifted_share(report.sums)
    return {
        "train/loss": report.mean("loss", "divisors"),
        "train/grad_norm": report.grad_norm,
        "train/lr": report.lr,
        "train/clip_fraction": report.per_sampled_token("clipped"),
        "train/log_ratio_abs": report.per_sampled_token("ratio_abs"),
        "train/behaviour_mean_abs": report.per_sampled_token("behaviour_abs"),
        "train/correction": report.correction,
        "train/mismatch_fresh": _mismatch(report, "fresh"),
        "train/mismatch_stale": _mismatch(report, "stale"),
        "train/router_flips": report.variants.flips,
        "train/kl": report.per_sampled_token("kl"),
        "train/entropy": report.per_token("entropy"),
        "train/value_loss": report.mean("value_loss", "value_tokens"),
        "extra/skipped": report.skipped,
        "extra/capped_fraction": report.per_sampled_token("capped"),
        "extra/shift_votes": votes,
        "extra/shifted_share": share,
        "extra/value_clipped": report.mean("value_clipped", "value_tokens"),
        "extra/value_grad_norm": report.mean("value_grad_norms", "value_steps"),
        "extra/value_skipped": report.mean("value_skipped", "value_steps"),
    }


def of_audit(audit: Audit) -> Metrics:
    """``audited_tokens`` of this or the previous batch were scored again by a server under their own versions, with
    ``audit_gap`` as the mean difference; ``unaudited_steps`` counts consecutive batches without an audit.
    """
    return {
        "train/audited_tokens": audit.tokens,
        "train/audit_gap": audit.gap,
        "train/unaudited_steps": audit.silent_steps,
        "extra/audit_s": audit.took_s,
    }


def of_mismatch(audit: Audit, learned: Mapping[int, LearnReport]) -> Metrics:
    """The mismatch of the audited tokens of the batch that trained one of the versions ``learned``, by cause.

    `algorithms.mismatch.chain` has the causes. Empty unless record, staleness and numerics are known; truncated batches
    have them in steps that measure causes, as have stale tokens with routes: servers score those along other routes.
    """
    found = audit.rescored
    report = learned.get(found.version) if found else None
    if found is None or report is None or report.logprobs is None:
        return {}
    variants = report.variants
    trained, own, free, whole, base, served = (
        None if scores is None else scores[found.at]
        for scores in (report.logprobs, variants.own, variants.free, variants.whole, variants.base, variants.served)
    )
    if not report.truncated:
        whole = trained
    if trained is None or whole is None:
        return {}
    newest = None
    if report.replayed and not all(found.fresh):
        if free is None:
            return {}
        newest = torch.where(torch.tensor(found.fresh, device=free.device), whole, free)
    trainer = TrainerScores(trained=trained, whole=whole, own=own, base=base, served=served, newest=newest)
    tags: Metrics = {}
    for cause, part in split(chain(found.scores, trainer)).items():
        tags |= {GAP + cause: part.gap, KL + cause: part.kl}
    return tags


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The trainer's ranks, a device each; ``peak_flops`` is the dense bfloat16 peak of one in FLOP/s, if known."""

    count: int = 1
    peak_flops: float | None = None


def of_speed(spans: Spans, tokens: int, devices: Devices) -> Metrics:
    """Of a step's ``tokens``, for each device. ``tokens_per_s`` is over the whole step, with all waits.

    ``tflops`` counts what the passes need (`PassSizes`) over their own seconds; ``mfu`` is its share of the peak. As
    usual (PaLM, arXiv 2204.02311, appendix B) neither counts a recomputation: ``hfu`` does.
    """
    seconds, flops = devices.count * (spans.seconds.get("score", 0.0) + spans.seconds.get("passes", 0.0)), spans.counts
    rate, again = (flops[name] / seconds if seconds else None for name in ("flops", "recomputed_flops"))
    peak = devices.peak_flops
    return {
        "speed/tokens_per_s": tokens / devices.count / spans.total_s if spans.total_s else None,
        "speed/tflops": rate / 1e12 if rate else None,
        "speed/mfu": rate / peak if rate and peak else None,
        "speed/hfu": (rate + again) / peak if rate and again and peak else None,
    }


def of_memory(memory: DeviceMemory | None) -> Metrics:
    """GiB on the fullest device at its peak since the previous step; ``rest`` are activations, logits and buffers."""
    if memory is None:
        return {}
    parts = {"peak": memory.peak, "base": memory.base, "adapters": memory.adapters}
    parts["rest"] = memory.peak - memory.base - memory.adapters
    return {f"memory/{name}_gib": nbytes / 2**30 for name, nbytes in parts.items()}


@dataclass(slots=True)
class Window:
    """Sums over a client's passes with gradients since its step before.

    ``targets`` are tokens whose weight is not 0, ``loss`` is the sum of the losses.
    """

    tokens: int = 0
    sequences: int = 0
    targets: int = 0
    loss: float = 0.0

    def add(self, request: Pass, scored: PassResult) -> None:
        """Add a pass that was carried out; one without gradients is not part of what a step learns."""
        if not request.backward:
            return
        self.tokens += request.n_tokens
        self.sequences += len(request.data)
        self.targets += sum(int(np.count_nonzero(np.frombuffer(datum.weights, "<f4"))) for datum in request.data)
        self.loss += scored.loss


def of_client(window: Window, step: OptimStep, outcome: StepResult) -> Metrics:
    """Of a client's step. It has no rewards and no groups here, and its tokens' versions are not known.

    The loss is the mean over the targets.
    """
    return {
        "train/loss": window.loss / window.targets if window.targets else None,
        "train/grad_norm": None if outcome.skipped else outcome.grad_norm,
        "train/lr": step.lr,
        "train/n_tokens": window.tokens,
        "train/n_sequences": window.sequences,
    }


def _mean(values: Sequence[float]) -> float | None:
    return _ratio(sum(values), len(values))


def _ratio(total: float, count: int) -> float | None:
    return total / count if count else None


def _mismatch(report: LearnReport, kind: str) -> float | None:
    """Mean |trainer - rollout| logprob over the ``fresh`` or ``stale`` tokens; None if there are none."""
    count = report.sums[f"{kind}_tokens"]
    return report.sums[f"{kind}_gap"] / count if count else None

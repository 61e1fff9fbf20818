"""The plots of a run as (title, note, chart), in reading order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from areal_lora.obs import svg
from areal_lora.obs.metrics import CheckpointRecord, EvalRecord, PublishRecord, RunMetrics, StepRecord

R = TypeVar("R", StepRecord, PublishRecord, CheckpointRecord)
Plot = tuple[str, str, str]


def all_plots(metrics: RunMetrics) -> list[Plot]:
    """Dotted vertical lines in them are the versions a resumed run went on from."""
    resumed = [float(resume.version) for resume in metrics.resumes]
    lines = partial(svg.line_chart, x_label="optimizer step", marks=resumed)
    return [
        *_learning(metrics, lines), *_timing(metrics.steps, lines, resumed), *_groups(metrics.steps, lines),
        *_weights(metrics, resumed),
    ]  # fmt: skip


def reward_and_accuracy(metrics: RunMetrics) -> str:
    """Of evaluations the accuracy; their mean reward where the task has no rule for what is correct."""
    shown = _accuracy_series(metrics.evals)
    series = [*_reward_series(metrics.steps), shown if shown.points else _eval_reward_series(metrics.evals)]
    return svg.line_chart(series, x_label="optimizer step", y_range=_unit_range(series))


def _learning(metrics: RunMetrics, lines: Callable[..., str]) -> list[Plot]:
    steps = metrics.steps
    reward, accuracy, eval_reward = (
        _reward_series(steps), _accuracy_series(metrics.evals), _eval_reward_series(metrics.evals)
    )
    return [
        ("Reward", "mean over the batch of a step", lines(reward, y_range=_unit_range(reward))),
        ("Held-out accuracy", "greedy; what could not be scored is not correct",
         lines([accuracy], y_range=_unit_range([accuracy]))),
        ("Held-out reward", "greedy; mean over what could be scored",
         lines([eval_reward], y_range=_unit_range([eval_reward]))),
        ("Staleness", "trained tokens by versions of lag", _staleness(steps)),
        ("Logprob mismatch", "mean |trainer - rollout|, nats", lines(
            [_over(steps, "older versions", lambda s: s.mismatch_stale, 1),
             _over(steps, "all", lambda s: s.behaviour_mean_abs, 0),
             _over(steps, "same version (numerics)", lambda s: s.mismatch_fresh, 2)], log_y=True)),
        ("Clipped fraction", "of the trained tokens", lines(
            [_over(steps, "", lambda s: s.clip_fraction, 1)], floor=0)),
        ("Entropy and gradient norm", "nats; before clipping", lines(
            [_over(steps, "entropy", lambda s: s.entropy, 4),
             _over(steps, "gradient norm", lambda s: s.grad_norm, 5)], floor=0)),
    ]  # fmt: skip


def _timing(steps: Sequence[StepRecord], lines: Callable[..., str], resumed: Sequence[float]) -> list[Plot]:
    places = [s.step for s in steps]
    return [
        ("Step time", "seconds by phase",
         svg.stacked_bars(places, _step_layers(steps), x_label="optimizer step", marks=resumed)),
        ("Idle", "fraction of the time in which nothing was trained, or generated", lines(
            [_over(steps, "trainer", lambda s: s.trainer_idle, 0),
             _over(steps, "servers", lambda s: s.servers_idle, 1)], y_range=(0.0, 1.0))),
        ("Rollout speed", "tokens/s, all servers", lines(
            [_over(steps, "", lambda s: s.rollout_tokens_per_s, 2)], floor=0)),
    ]  # fmt: skip


def _groups(steps: Sequence[StepRecord], lines: Callable[..., str]) -> list[Plot]:
    reasons = sorted({reason for s in steps for reason in s.dropped})
    dropped = [
        svg.Series(name=name, points=[(float(s.step), float(s.dropped.get(name, 0))) for s in steps], colour=i)
        for i, name in enumerate(reasons)
    ]
    again = [
        _over(steps, "retried", lambda s: sum(s.retried.values()), 0),
        _over(steps, "re-issued", lambda s: s.reissued, 1), _over(steps, "late duplicates", lambda s: s.late, 3),
    ]  # fmt: skip
    return [
        ("Groups in flight", "when a batch was handed over", lines(
            [_over(steps, "running", lambda s: s.groups_running, 0), _over(steps, "ready", lambda s: s.groups_ready, 2),
             _over(steps, "leased", lambda s: s.groups_leased, 4)], floor=0)),
        ("Groups dropped", "by reason, since the start", lines(dropped, floor=0)),
        ("Groups tried again", "since the start", lines(again, floor=0)),
    ]  # fmt: skip


def _weights(metrics: RunMetrics, resumed: Sequence[float]) -> list[Plot]:
    publishes, written = metrics.publishes, [c for c in metrics.checkpoints if not c.failed]
    lines = partial(svg.line_chart, x_label="version", marks=resumed)
    return [
        ("Publish by phase", "ms", svg.stacked_bars(
            [p.version for p in publishes], _publish_layers(publishes), x_label="version", marks=resumed)),
        ("Publish, total", "ms", lines([_over(publishes, "", lambda p: p.total_ms, 1)], floor=0)),
        ("Parity probe", "|logp trainer - logp server|", lines(
            [_over(publishes, "largest", lambda p: p.probe_max_abs, 3),
             _over(publishes, "mean", lambda p: p.probe_mean_abs, 0)], log_y=True)),
        ("Checkpoint", "seconds to write, beside the training", lines(
            [_over(written, "", lambda c: c.write_s, 4)], floor=0)),
    ]  # fmt: skip


def _staleness(steps: Sequence[StepRecord]) -> str:
    tokens: Counter[int] = Counter()
    for record in steps:
        tokens.update(record.staleness)
    bars = [(str(lag), float(n)) for lag, n in sorted(tokens.items())]
    return svg.bar_chart(bars, x_label="versions behind at training")


def _over(records: Sequence[R], name: str, read: Callable[[R], float | None], colour: int) -> svg.Series:
    """One value of each record over its step or version; what was not measured is left out."""
    places = [r.step if isinstance(r, StepRecord) else r.version for r in records]
    points = [(float(x), y) for x, r in zip(places, records) if (y := read(r)) is not None]
    return svg.Series(name=name, points=points, colour=colour)


def _reward_series(steps: Sequence[StepRecord]) -> list[svg.Series]:
    raw = _over(steps, "reward", lambda s: s.reward_mean, 0)
    smooth = svg.moving_mean(raw.points, max(3, len(raw.points) // 12))
    faint = svg.Series(name="reward per step", points=raw.points, faint=True)
    return [faint, svg.Series(name="smoothed", points=smooth)]


def _accuracy_series(evals: Sequence[EvalRecord]) -> svg.Series:
    points = [(float(e.step), e.accuracy) for e in evals if e.accuracy is not None]
    return svg.Series(name="held-out accuracy", points=points, colour=2, dots=True)


def _eval_reward_series(evals: Sequence[EvalRecord]) -> svg.Series:
    points = [(float(e.step), e.reward_mean) for e in evals if e.reward_mean is not None]
    return svg.Series(name="held-out reward", points=points, colour=2, dots=True)


def _unit_range(series: Sequence[svg.Series]) -> tuple[float, float] | None:
    """0 to 1 where all values lie there, so that runs can be compared by eye."""
    return (0.0, 1.0) if all(0 <= y <= 1 for s in series for _, y in s.points) else None


def _step_layers(steps: Sequence[StepRecord]) -> dict[str, Sequence[float]]:
    named = {
        "wait": [s.wait_batch_s for s in steps],
        "annotate": [s.annotate_s for s in steps],
        "train": [s.train_s for s in steps],
        "checkpoint": [s.checkpoint_join_s + s.checkpoint_copy_s for s in steps],
        "publish": [s.publish_join_s + s.publish_pack_s for s in steps],
    }
    measured = [sum(parts) for parts in zip(*named.values())]
    return {**named, "other": [max(0.0, s.step_s - known) for s, known in zip(steps, measured)]}


def _publish_layers(publishes: Sequence[PublishRecord]) -> dict[str, Sequence[float]]:
    rows = [p.sequence_ms() for p in publishes]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}

"""Collect the plots of a run, one record at a time, as (title, note, chart) in reading order.

For a long run, lines show the first, lowest, highest and last value of at most 320 buckets of steps; bars and the
smoothed reward show bucket means (see `curves`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from areal_lora.obs.metrics.records import (
    AdapterStateRecord,
    CheckpointRecord,
    EvalRecord,
    MembersRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    RolloutSampleRecord,
    StepRecord,
)
from areal_lora.obs.report import svg
from areal_lora.obs.report.curves import Curve, Means, Smoothed

R = TypeVar("R", StepRecord, PublishRecord, CheckpointRecord, EvalRecord)
Plot = tuple[str, str, str]
Chart = Callable[[], str]
"""Draws the records added so far."""
Later = tuple[str, str, Chart]
BARS = 80
CALLS = ("/answers", "/calls", "/retries")


class Feed(Generic[R]):
    """Passes records of one kind to curves."""

    def __init__(self) -> None:
        self._takers: list[Callable[[float, R], object]] = []

    def each(self, take: Callable[[float, R], object]) -> None:
        """Call ``take(x, record)`` for every record; x is its step or version."""
        self._takers.append(take)

    def push(self, x: float, record: R) -> None:
        for take in self._takers:
            take(x, record)


class Plots:
    """``add`` valid records (`iter_metrics`), then draw. Memory does not grow with the number of records."""

    def __init__(self) -> None:
        self.steps, self.publishes = Feed[StepRecord](), Feed[PublishRecord]()
        self.checkpoints, self.evals, self.main = Feed[CheckpointRecord](), Feed[EvalRecord](), Feed[EvalRecord]()
        self.resumed: list[float] = []
        lines = partial(partial, svg.line_chart, x_label="optimizer step", marks=self.resumed)
        self._plots = [
            *_learning(self, lines),
            *_timing(self.steps, lines, self.resumed),
            *_groups(self.steps, lines),
            *(weights := _weights(self)),
        ]
        self._of_client = [*_client_steps(self.steps), *weights]
        self._rewards = _reward_series(self.steps)
        self._accuracy, self._eval_reward = _accuracy_series(self.main), _eval_reward_series(self.main)

    def add(self, record: Record) -> None:
        match record:
            case StepRecord():
                self.steps.push(float(record.step), record)
            case PublishRecord():
                self.publishes.push(float(record.version), record)
            case CheckpointRecord():
                self.checkpoints.push(float(record.version), record)
            case EvalRecord():
                self.evals.push(float(record.step), record)
                if record.order == 0:  # the set that decides
                    self.main.push(float(record.step), record)
            case ResumeRecord():
                self.resumed.append(float(record.version))
            case RolloutSampleRecord() | MembersRecord() | AdapterStateRecord():
                pass

    def all(self) -> list[Plot]:
        """Draw every plot, except those that are empty text. Dotted vertical lines mark resumed versions."""
        return [(title, note, chart) for title, note, draw in self._plots if (chart := draw())]

    def of_client(self) -> list[Plot]:
        """Draw the plots of an adapter that a client drives."""
        return [(title, note, draw()) for title, note, draw in self._of_client]

    @property
    def smoothed_reward(self) -> svg.Series:
        return self._rewards[1]

    def reward_and_accuracy(self) -> str:
        """Draw reward and held-out accuracy, or held-out reward if the task has no rule for correctness."""
        has_rule = next(iter(self._accuracy.points), None) is not None
        series = [*self._rewards, self._accuracy if has_rule else self._eval_reward]
        return svg.line_chart(series, x_label="optimizer step", y_range=_unit_range(series))


def rewards_together(adapters: Mapping[str, Plots]) -> str:
    """One line per adapter: its smoothed reward over its own steps."""
    series = [replace(plots.smoothed_reward, name=name, colour=i) for i, (name, plots) in enumerate(adapters.items())]
    return svg.line_chart(series, x_label="optimizer step of the adapter", y_range=_unit_range(series))


def _learning(plots: Plots, lines: Callable[..., Chart]) -> list[Later]:
    steps = plots.steps
    reward = _reward_series(steps)
    accuracy = _BySet(plots.evals, lambda e: {"": e.accuracy})
    eval_reward = _BySet(plots.evals, lambda e: {"": e.reward_mean})
    several = _BySet(plots.evals, _of_several)
    tokens = _BySet(plots.evals, lambda e: {"": e.answer_tokens})
    truncated = _BySet(plots.evals, lambda e: {"": e.truncated})
    parts = _ByName()
    steps.each(lambda x, s: parts.add(x, s.reward_components))
    critic = _ByName()
    steps.each(lambda x, s: critic.add(x, _of_critic(s)))
    costs, tokens_asked = _ByName(), _ByName()
    steps.each(lambda x, s: costs.add(x, _costs(s, CALLS)))
    steps.each(lambda x, s: tokens_asked.add(x, _costs(s, ("_tokens",))))
    return [
        ("Reward", "mean over the batch of a step", lambda: lines(reward, y_range=_unit_range(reward))()),
        ("Reward by part", "mean of each part that the reward names", lambda: lines(parts.series())()),
        ("Judge's calls", "of a step: answers, requests, repeated requests", _if_any(costs, partial(lines, floor=0))),
        ("Judge's tokens", "of a step", _if_any(tokens_asked, partial(lines, floor=0))),
        (
            "Held-out accuracy",
            "one line per set; unscored answers count as not correct",
            lambda: lines(accuracy.series(), y_range=_unit_range(accuracy.series()))(),
        ),
        (
            "Held-out reward",
            "one line per set; mean over scored answers",
            lambda: lines(eval_reward.series(), y_range=_unit_range(eval_reward.series()))(),
        ),
        ("Pass@k and majority", "sets with several answers", _if_any(several, partial(lines, y_range=(0.0, 1.0)))),
        ("Held-out answer length", "mean of sampled tokens", _if_any(tokens, partial(lines, floor=0))),
        ("Held-out truncated", "share of answers", _if_any(truncated, partial(lines, y_range=(0.0, 1.0)))),
        ("Staleness", "trained tokens by versions of lag", _staleness(steps)),
        ("Mean lag", "versions, trained tokens", lines([_over(steps, "", lambda s: s.mean_lag, 2)], floor=0)),
        (
            "Logprob mismatch",
            "mean |trainer - rollout|, nats",
            lines(
                [
                    _metric(steps, "older versions", "train/mismatch_stale", 1),
                    _metric(steps, "all", "train/behaviour_mean_abs", 0),
                    _metric(steps, "same version (numerics)", "train/mismatch_fresh", 2),
                ],
                log_y=True,
            ),
        ),
        ("Critic", "value loss per token; share of the returns' variance explained", _if_any(critic, lines)),
        ("Clipped fraction", "of the trained tokens", lines([_metric(steps, "", "train/clip_fraction", 1)], floor=0)),
        (
            "Entropy and gradient norm",
            "nats; before clipping",
            lines(
                [
                    _metric(steps, "entropy", "train/entropy", 4),
                    _metric(steps, "-log p of sampled tokens", "train/sampled_nll", 3),
                    _metric(steps, "gradient norm", "train/grad_norm", 5),
                ],
                floor=0,
            ),
        ),
    ]


def _client_steps(steps: Feed[StepRecord]) -> list[Later]:
    """Without marks: versions, at which a run resumes, do not count a client's steps."""
    lines = partial(partial, svg.line_chart, x_label="optimizer step")
    return [
        ("Loss", "mean over the targets of a step", lines([_metric(steps, "", "train/loss", 0)])),
        ("Gradient norm", "before clipping", lines([_metric(steps, "", "train/grad_norm", 5)], floor=0)),
        ("Learning rate", "of the call", lines([_metric(steps, "", "train/lr", 4)], floor=0)),
        ("Trained tokens", "of a step", lines([_over(steps, "", lambda s: s.trained_tokens, 2)], floor=0)),
        (
            "Step time",
            "seconds since the step before: passes and step, and all",
            lines(
                [_over(steps, "trainer", lambda s: s.spans.get("train"), 1), _over(steps, "all", lambda s: s.step_s, 3)]
            ),
        ),
    ]


def _timing(steps: Feed[StepRecord], lines: Callable[..., Chart], resumed: Sequence[float]) -> list[Later]:
    return [
        (
            "Step time",
            "seconds by phase",
            _stacked(steps, StepRecord.phases_s, x_label="optimizer step", marks=resumed),
        ),
        (
            "Idle",
            "fraction of the time without training, or without generation",
            lines(
                [
                    _over(steps, "trainer", lambda s: s.trainer_idle, 0),
                    _metric(steps, "servers", "train/servers_idle", 1),
                ],
                y_range=(0.0, 1.0),
            ),
        ),
        (
            "Rollout speed",
            "tokens/s, all servers",
            lines([_metric(steps, "", "train/rollout_tokens_per_s", 2)], floor=0),
        ),
    ]


def _groups(steps: Feed[StepRecord], lines: Callable[..., Chart]) -> list[Later]:
    dropped = _ByName()
    steps.each(lambda x, s: dropped.add(x, s.dropped))
    again = [
        _over(steps, "retried", lambda s: sum(s.retried.values()), 0),
        _metric(steps, "re-issued", "train/reissued", 1),
        _metric(steps, "late duplicates", "train/late", 3),
    ]
    return [
        (
            "Groups in flight",
            "at the delivery of a batch",
            lines(
                [
                    _metric(steps, "running", "train/groups_running", 0),
                    _metric(steps, "ready", "train/groups_ready", 2),
                    _metric(steps, "leased", "train/groups_leased", 4),
                ],
                floor=0,
            ),
        ),
        (
            "Pacing",
            "seconds from a whole batch to its request, below 0: waited for; and the margin",
            lines(
                [_metric(steps, "spare", "time/batch_spare_s", 2), _metric(steps, "margin", "time/pacing_margin_s", 3)]
            ),
        ),
        ("Groups dropped", "by reason, since the start", lambda: lines(dropped.series(), floor=0)()),
        ("Groups retried", "since the start", lines(again, floor=0)),
    ]


def _weights(plots: Plots) -> list[Later]:
    publishes, written = plots.publishes, Feed[CheckpointRecord]()
    plots.checkpoints.each(lambda x, c: None if c.failed else written.push(x, c))
    lines = partial(partial, svg.line_chart, x_label="version", marks=plots.resumed)
    return [
        (
            "Publish by phase",
            "ms",
            _stacked(publishes, PublishRecord.sequence_ms, x_label="version", marks=plots.resumed),
        ),
        ("Publish, total", "ms", lines([_over(publishes, "", lambda p: p.total_ms, 1)], floor=0)),
        (
            "Parity probe",
            "|logp trainer - logp server|",
            lines(
                [
                    _over(publishes, "largest", lambda p: p.probe_max_abs, 3),
                    _over(publishes, "mean", lambda p: p.probe_mean_abs, 0),
                ],
                log_y=True,
            ),
        ),
        (
            "Checkpoint",
            "seconds to write, in the background",
            lines([_over(written, "", lambda c: c.write_s, 4)], floor=0),
        ),
    ]


def _staleness(steps: Feed[StepRecord]) -> Chart:
    tokens: Counter[int] = Counter()
    steps.each(lambda _, s: tokens.update(s.staleness))

    def draw() -> str:
        bars = [(str(lag), float(n)) for lag, n in sorted(tokens.items())]
        return svg.bar_chart(bars, x_label="versions behind at training")

    return draw


def _over(records: Feed[R], name: str, read: Callable[[R], float | None], colour: int) -> svg.Series:
    """One value per record over its step or version; unmeasured values are skipped."""
    curve = Curve()

    def take(x: float, record: R) -> None:
        y = read(record)
        if y is not None:
            curve.add(x, y)

    records.each(take)
    return svg.Series(name=name, points=curve, colour=colour)


def _metric(steps: Feed[StepRecord], name: str, tag: str, colour: int) -> svg.Series:
    return _over(steps, name, lambda s: s.metrics.get(tag), colour)


def _reward_series(steps: Feed[StepRecord]) -> list[svg.Series]:
    raw, means = _metric(steps, "reward per step", "train/reward_mean", 0), Means()
    steps.each(lambda x, s: None if s.reward_mean is None else means.add(x, [s.reward_mean]))
    faint = svg.Series(name=raw.name, points=raw.points, faint=True)
    return [faint, svg.Series(name="smoothed", points=Smoothed(means))]


def _accuracy_series(evals: Feed[EvalRecord]) -> svg.Series:
    line = _over(evals, "held-out accuracy", lambda e: e.accuracy, 2)
    return svg.Series(name=line.name, points=line.points, colour=2, dots=True)


def _eval_reward_series(evals: Feed[EvalRecord]) -> svg.Series:
    line = _over(evals, "held-out reward", lambda e: e.reward_mean, 2)
    return svg.Series(name=line.name, points=line.points, colour=2, dots=True)


def _of_several(record: EvalRecord) -> dict[str, float | None]:
    values: dict[str, float | None] = {f"pass@{k}": value for k, value in record.pass_at.items() if k > 1}
    return values | ({f"majority@{record.n_samples}": record.majority} if record.majority is not None else {})


class _BySet:
    """One line per evaluation set and figure; a version without a value is skipped."""

    def __init__(self, evals: Feed[EvalRecord], read: Callable[[EvalRecord], Mapping[str, float | None]]) -> None:
        self._read, self._curves = read, dict[str, Curve]()
        evals.each(self._take)

    def _take(self, x: float, record: EvalRecord) -> None:
        for figure, value in self._read(record).items():
            if value is not None:
                name = f"{record.name} {figure}".rstrip()
                self._curves.setdefault(name, Curve()).add(x, value)

    def series(self) -> list[svg.Series]:
        lines = enumerate(self._curves.items(), 2)
        return [svg.Series(name=name, points=curve, colour=i, dots=True) for i, (name, curve) in lines]


def _of_critic(step: StepRecord) -> dict[str, float]:
    figures = {name: step.metrics.get(f"train/{name}") for name in ("value_loss", "explained_variance")}
    return {name.replace("_", " "): value for name, value in figures.items() if value is not None}


def _costs(step: StepRecord, endings: tuple[str, ...]) -> dict[str, float]:
    return {name: value for name, value in step.named("reward_cost/").items() if name.endswith(endings)}


def _if_any(figures: _BySet | _ByName, lines: Callable[..., Chart]) -> Chart:
    """Lines, or no plot for a run without such figures."""

    def draw() -> str:
        series = figures.series()
        return lines(series)() if series else ""

    return draw


class _ByName:
    """One curve per name; a name without a value is 0."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._span: tuple[float, float] | None = None

    def add(self, x: float, counts: Mapping[str, float]) -> None:
        for name in counts.keys() - self._curves.keys():
            self._curves[name] = Curve()
            for before in self._span or ():
                self._curves[name].add(before, 0.0)
        for name, curve in self._curves.items():
            curve.add(x, float(counts.get(name, 0)))
        self._span = (self._span[0] if self._span else x, x)

    def series(self) -> list[svg.Series]:
        ordered = sorted(self._curves.items())
        return [svg.Series(name=name, points=curve, colour=i) for i, (name, curve) in enumerate(ordered)]


def _unit_range(series: Sequence[svg.Series]) -> tuple[float, float] | None:
    """0 to 1 if all values are in this range, so that plots of runs are comparable."""
    return (0.0, 1.0) if all(0 <= y <= 1 for s in series for _, y in s.points) else None


def _stacked(
    records: Feed[R], layers: Callable[[R], Mapping[str, float]], *, x_label: str, marks: Sequence[float]
) -> Chart:
    """Stacked bars of the parts from ``layers``, which has the same keys for every record."""
    means, names = Means(BARS), list[str]()

    def take(x: float, record: R) -> None:
        parts = layers(record)
        names[:] = parts
        means.add(x, list(parts.values()))

    def draw() -> str:
        rows = means.rows()
        columns = {name: [values[i] for _, values in rows] for i, name in enumerate(names)}
        return svg.stacked_bars([x for x, _ in rows], columns, x_label=x_label, most=BARS, marks=marks)

    records.each(take)
    return draw

"""Collect the plots of a run, one record at a time, as (title, note, chart) in reading order.

For a long run, lines show the first, lowest, highest and last value of at most 320 buckets of steps; bars and the
smoothed reward show bucket means (see `figures`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from areal_lora.obs.metrics.records import (
    CheckpointRecord,
    EvalRecord,
    PublishRecord,
    Record,
    ResumeRecord,
    StepRecord,
    position,
)
from areal_lora.obs.report import svg
from areal_lora.obs.report.figures import Curve, Means, MovingMean

Plot = tuple[str, str, str]
Values: TypeAlias = Mapping[str, float | None]
BARS = 80
SHARE = (0.0, 1.0)
CALLS = ("/answers", "/calls", "/retries")


class Drawing(Protocol):
    """``add`` records of the type ``kind``, x is the step or the version, then draw."""

    kind: type[Record]

    def add(self, x: float, record: Any) -> None: ...

    def draw(self, x_label: str, marks: Sequence[float]) -> str: ...


class Lines:
    """A line per name that ``read`` has for a record; values that were not measured (None) are skipped.

    ``colours`` are the lines in their order, and any other has the next colour from ``first`` on. ``axis`` are
    arguments of `svg.line_chart`; ``unit``: the y axis is 0 to 1 if all values are, so that plots of runs are
    comparable. ``optional``: without a line there is no plot.
    """

    def __init__(
        self,
        read: Callable[[Any], Values],
        colours: Mapping[str, int] | None = None,
        *,
        kind: type[Record] = StepRecord,
        first: int = 0,
        dots: bool = False,
        unit: bool = False,
        optional: bool = False,
        **axis: Any,
    ) -> None:
        self.kind, self._read, self._first, self._dots = kind, read, first, dots
        self._colours, self._unit, self._optional, self._axis = dict(colours or {}), unit, optional, axis
        self._curves = {name: Curve() for name in self._colours}

    def add(self, x: float, record: Any) -> None:
        for name, value in self._read(record).items():
            if value is not None:
                self._curves.setdefault(name, Curve()).add(x, value)

    def series(self) -> list[svg.Series]:
        return [
            svg.Series(name=name, points=curve, colour=self._colours.get(name, i), dots=self._dots)
            for i, (name, curve) in enumerate(self._curves.items(), self._first)
        ]

    def draw(self, x_label: str, marks: Sequence[float] = ()) -> str:
        series = self.series()
        if self._optional and not series:
            return ""
        axis = self._axis | ({"y_range": _unit_range(series)} if self._unit else {})
        return svg.line_chart(series, x_label=x_label, marks=marks, **axis)


class Counts(Lines):
    """One line per name, in the order of names; a name without a value is 0, also before its first one."""

    def __init__(self, read: Callable[[Any], Mapping[str, float]], **settings: Any) -> None:
        super().__init__(read, **settings)
        self._span: tuple[float, float] | None = None

    def add(self, x: float, record: Any) -> None:
        counts = self._read(record)
        for name in counts.keys() - self._curves.keys():
            self._curves[name] = Curve()
            for before in self._span or ():
                self._curves[name].add(before, 0.0)
            self._curves = dict(sorted(self._curves.items()))
        for name, curve in self._curves.items():
            curve.add(x, float(counts.get(name) or 0))
        self._span = (self._span[0] if self._span else x, x)


class RewardLines(Lines):
    """The reward of each step, and smoothed."""

    def __init__(self) -> None:
        super().__init__(lambda s: {"reward per step": s.reward_mean}, {"reward per step": 0}, unit=True)
        self._means = Means()

    def add(self, x: float, record: StepRecord) -> None:
        super().add(x, record)
        if record.reward_mean is not None:
            self._means.add(x, [record.reward_mean])

    @property
    def smoothed(self) -> svg.Series:
        return svg.Series(name="smoothed", points=MovingMean(self._means))

    def series(self) -> list[svg.Series]:
        return [*(replace(raw, faint=True) for raw in super().series()), self.smoothed]


class StackedBars:
    """Stacked bars of the parts from ``read``, which has the same keys for every record."""

    def __init__(self, read: Callable[[Any], Mapping[str, float]], kind: type[Record]) -> None:
        self.kind, self._read, self._means, self._names = kind, read, Means(BARS), list[str]()

    def add(self, x: float, record: Any) -> None:
        parts = self._read(record)
        self._names[:] = parts
        self._means.add(x, list(parts.values()))

    def draw(self, x_label: str, marks: Sequence[float]) -> str:
        rows = self._means.rows()
        columns = {name: [values[i] for _, values in rows] for i, name in enumerate(self._names)}
        return svg.stacked_bars([x for x, _ in rows], columns, x_label=x_label, max_bars=BARS, marks=marks)


class Staleness:
    """A bar per lag of trained tokens."""

    kind: type[Record] = StepRecord

    def __init__(self) -> None:
        self._tokens: Counter[int] = Counter()

    def add(self, x: float, record: StepRecord) -> None:
        self._tokens.update(record.staleness)

    def draw(self, x_label: str, marks: Sequence[float]) -> str:
        bars = [(str(lag), float(n)) for lag, n in sorted(self._tokens.items())]
        return svg.bar_chart(bars, x_label="versions behind at training")


Row: TypeAlias = tuple[str, str, Drawing]
"""Title, note, and what is drawn."""


class Plots:
    """``add`` valid records (`iter_metrics`), then draw. Memory does not grow with the number of records."""

    def __init__(self) -> None:
        self.resumed: list[float] = []
        self._reward = RewardLines()
        self._accuracy = Lines(
            lambda e: _of_first(e, "accuracy", e.accuracy), {"held-out accuracy": 2}, kind=EvalRecord, dots=True
        )
        self._eval_reward = Lines(
            lambda e: _of_first(e, "reward", e.reward_mean), {"held-out reward": 2}, kind=EvalRecord, dots=True
        )
        weights = _weights()
        self._all, self._of_client = [*_training(self._reward), *weights], [*_client_steps(), *weights]
        rows = [*self._all, *self._of_client[: -len(weights)]]
        self._drawings: dict[type[Record], list[Drawing]] = {}
        for drawing in (*(drawing for *_, drawing in rows), self._accuracy, self._eval_reward):
            self._drawings.setdefault(drawing.kind, []).append(drawing)

    def add(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self.resumed.append(float(record.version))
        for drawing in self._drawings.get(type(record), ()):
            drawing.add(float(position(record)), record)

    def all(self) -> list[Plot]:
        """Draw every plot, except those that are empty text. Dotted vertical lines mark resumed versions."""
        return [(title, note, chart) for title, note, drawing in self._all if (chart := self._draw(drawing))]

    def of_client(self) -> list[Plot]:
        """Draw the plots of an adapter that a client drives.

        Steps are without marks: versions, at which a run resumes, do not count a client's steps.
        """
        return [
            (title, note, self._draw(drawing, drawing.kind is not StepRecord))
            for title, note, drawing in self._of_client
        ]

    def _draw(self, drawing: Drawing, marks: bool = True) -> str:
        x_label = "optimizer step" if drawing.kind in (StepRecord, EvalRecord) else "version"
        return drawing.draw(x_label, self.resumed if marks else ())

    @property
    def smoothed_reward(self) -> svg.Series:
        return self._reward.smoothed

    def reward_and_accuracy(self) -> str:
        """Draw reward and held-out accuracy, or held-out reward if the task has no rule for correctness."""
        [accuracy], [reward] = self._accuracy.series(), self._eval_reward.series()
        has_rule = next(iter(accuracy.points), None) is not None
        series = [*self._reward.series(), accuracy if has_rule else reward]
        return svg.line_chart(series, x_label="optimizer step", y_range=_unit_range(series))


def rewards_together(adapters: Mapping[str, Plots]) -> str:
    """One line per adapter: its smoothed reward over its own steps."""
    series = [replace(plots.smoothed_reward, name=name, colour=i) for i, (name, plots) in enumerate(adapters.items())]
    return svg.line_chart(series, x_label="optimizer step of the adapter", y_range=_unit_range(series))


def _metrics(*lines: tuple[str, str, int], **axis: Any) -> Lines:
    """Lines (name, tag, colour) of metrics of steps."""
    return Lines(
        lambda s: {name: s.metrics.get(tag) for name, tag, _ in lines}, {name: i for name, _, i in lines}, **axis
    )


def _by_set(read: Callable[[EvalRecord], Values], **settings: Any) -> Lines:
    """A line per evaluation set and figure."""
    return Lines(
        lambda e: {f"{e.name} {k}".rstrip(): v for k, v in read(e).items()},
        kind=EvalRecord,
        first=2,
        dots=True,
        **settings,
    )


def _training(reward: RewardLines) -> list[Row]:
    def parts(prefix: str, endings: tuple[str, ...] = ("",), **settings: Any) -> Counts:
        return Counts(lambda s: {k: v for k, v in s.named(prefix).items() if k.endswith(endings)}, **settings)

    return [
        ("Reward", "mean over the batch of a step", reward),
        ("Reward by part", "mean of each part that the reward names", parts("reward/")),
        (
            "Judge's calls",
            "of a step: answers, requests, repeated requests",
            parts("reward_cost/", CALLS, optional=True, floor=0),
        ),
        ("Judge's tokens", "of a step", parts("reward_cost/", ("_tokens",), optional=True, floor=0)),
        (
            "Held-out accuracy",
            "one line per set; unscored answers count as not correct",
            _by_set(lambda e: {"": e.accuracy}, unit=True),
        ),
        (
            "Held-out reward",
            "one line per set; mean over scored answers",
            _by_set(lambda e: {"": e.reward_mean}, unit=True),
        ),
        ("Pass@k and majority", "sets with several answers", _by_set(_of_several, optional=True, y_range=SHARE)),
        (
            "Held-out answer length",
            "mean of sampled tokens",
            _by_set(lambda e: {"": e.answer_tokens}, optional=True, floor=0),
        ),
        ("Held-out truncated", "share of answers", _by_set(lambda e: {"": e.truncated}, optional=True, y_range=SHARE)),
        ("Staleness", "trained tokens by versions of lag", Staleness()),
        ("Mean lag", "versions, trained tokens", Lines(lambda s: {"": s.mean_lag}, {"": 2}, floor=0)),
        (
            "Logprob mismatch",
            "mean |trainer - rollout|, nats",
            _metrics(
                ("older versions", "train/mismatch_stale", 1),
                ("all", "train/behaviour_mean_abs", 0),
                ("same version (numerics)", "train/mismatch_fresh", 2),
                log_y=True,
            ),
        ),
        ("Critic", "value loss per token; share of the returns' variance explained", Counts(_of_critic, optional=True)),
        ("Clipped fraction", "of the trained tokens", _metrics(("", "train/clip_fraction", 1), floor=0)),
        (
            "Entropy and gradient norm",
            "nats; before clipping",
            _metrics(
                ("entropy", "train/entropy", 4),
                ("-log p of sampled tokens", "train/sampled_nll", 3),
                ("gradient norm", "train/grad_norm", 5),
                floor=0,
            ),
        ),
        ("Step time", "seconds by phase", StackedBars(StepRecord.phases_s, StepRecord)),
        (
            "Idle",
            "fraction of the time without training, or without generation",
            Lines(
                lambda s: {"trainer": s.trainer_idle, "servers": s.metrics.get("train/servers_idle")},
                {"trainer": 0, "servers": 1},
                y_range=SHARE,
            ),
        ),
        ("Rollout speed", "tokens/s, all servers", _metrics(("", "train/rollout_tokens_per_s", 2), floor=0)),
        (
            "Groups in flight",
            "at the delivery of a batch",
            _metrics(
                ("running", "train/groups_running", 0),
                ("ready", "train/groups_ready", 2),
                ("leased", "train/groups_leased", 4),
                floor=0,
            ),
        ),
        (
            "Pacing",
            "seconds from a whole batch to its request, below 0: waited for; and the margin",
            _metrics(("spare", "time/batch_spare_s", 2), ("margin", "time/pacing_margin_s", 3)),
        ),
        ("Groups dropped", "by reason, since the start", Counts(lambda s: s.dropped, floor=0)),
        (
            "Groups retried",
            "since the start",
            Lines(
                lambda s: {
                    "retried": sum(s.retried.values()),
                    "re-issued": s.metrics.get("train/reissued"),
                    "late duplicates": s.metrics.get("train/late"),
                },
                {"retried": 0, "re-issued": 1, "late duplicates": 3},
                floor=0,
            ),
        ),
    ]


def _client_steps() -> list[Row]:
    return [
        ("Loss", "mean over the targets of a step", _metrics(("", "train/loss", 0))),
        ("Gradient norm", "before clipping", _metrics(("", "train/grad_norm", 5), floor=0)),
        ("Learning rate", "of the call", _metrics(("", "train/lr", 4), floor=0)),
        ("Trained tokens", "of a step", Lines(lambda s: {"": s.trained_tokens}, {"": 2}, floor=0)),
        (
            "Step time",
            "seconds since the step before: passes and step, and all",
            Lines(lambda s: {"trainer": s.spans.get("train"), "all": s.step_s}, {"trainer": 1, "all": 3}),
        ),
    ]


def _weights() -> list[Row]:
    probe = Lines(
        lambda p: {"largest": p.probe_max_abs, "mean": p.probe_mean_abs},
        {"largest": 3, "mean": 0},
        kind=PublishRecord,
        log_y=True,
    )
    written = Lines(lambda c: {"": None if c.failed else c.write_s}, {"": 4}, kind=CheckpointRecord, floor=0)
    return [
        ("Publish by phase", "ms", StackedBars(PublishRecord.sequence_ms, PublishRecord)),
        ("Publish, total", "ms", Lines(lambda p: {"": p.total_ms}, {"": 1}, kind=PublishRecord, floor=0)),
        ("Parity probe", "|logp trainer - logp server|", probe),
        ("Checkpoint", "seconds to write, in the background", written),
    ]


def _of_first(record: EvalRecord, name: str, value: float | None) -> Values:
    """A figure of the first set, which decides."""
    return {f"held-out {name}": value} if record.order == 0 else {}


def _of_several(record: EvalRecord) -> Values:
    values: dict[str, float | None] = {f"pass@{k}": value for k, value in record.pass_at.items() if k > 1}
    return values | {f"majority@{record.n_samples}": record.majority}


def _of_critic(step: StepRecord) -> Mapping[str, float]:
    figures = {name: step.metrics.get(f"train/{name}") for name in ("value_loss", "explained_variance")}
    return {name.replace("_", " "): value for name, value in figures.items() if value is not None}


def _unit_range(series: Sequence[svg.Series]) -> tuple[float, float] | None:
    """0 to 1 if all values are in this range."""
    return SHARE if all(0 <= y <= 1 for s in series for _, y in s.points) else None

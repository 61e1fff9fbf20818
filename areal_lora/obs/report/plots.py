"""Collect the plots of a run, one record at a time, in reading order. Memory does not grow with the number of records.

Points fall into buckets of equal width in x, one step or version wide at first. When there are too many buckets, the
width doubles and neighbours are merged. A line shows the first, lowest, highest and last point of each bucket, so a
spike of one step stays visible; bars and smoothed lines show the mean over all points of a bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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

Plot = tuple[str, str, str]
"""Title, note, drawing."""
Point = tuple[float, float]
Values: TypeAlias = Mapping[str, float | None]
BUCKETS = 320
"""Half the width of a plot in pixels; more buckets would not be visible."""
BARS = 80
SHARE = (0.0, 1.0)


@dataclass(slots=True)
class _Bucket:
    """Number and sums of its points; the first, lowest, highest and last one."""

    n: int
    sum_x: float
    sum_y: float
    first: Point
    lowest: Point
    highest: Point
    last: Point


class Curve:
    """Points in at most ``buckets`` buckets; ``x`` may come in any order. Iterates over the kept points."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._most, self._width, self._buckets = buckets, 1.0, dict[float, _Bucket]()

    def add(self, x: float, y: float) -> None:
        self._merge(x // self._width, _Bucket(1, x, y, *[(x, y)] * 4))
        while len(self._buckets) > self._most:
            self._width *= 2
            old, self._buckets = self._buckets, {}
            for place, bucket in old.items():
                self._merge(place // 2, bucket)

    def _merge(self, place: float, new: _Bucket) -> None:
        old = self._buckets.setdefault(place, new)
        if old is new:
            return
        old.n, old.sum_x, old.sum_y = old.n + new.n, old.sum_x + new.sum_x, old.sum_y + new.sum_y
        old.first = new.first if new.first[0] < old.first[0] else old.first
        old.lowest = new.lowest if new.lowest[1] < old.lowest[1] else old.lowest
        old.highest = new.highest if new.highest[1] > old.highest[1] else old.highest
        old.last = new.last if new.last[0] >= old.last[0] else old.last

    def __iter__(self) -> Iterator[Point]:
        for _, b in sorted(self._buckets.items()):
            yield from sorted({b.first, b.lowest, b.highest, b.last})

    def means(self) -> list[Point]:
        return [(b.sum_x / b.n, b.sum_y / b.n) for _, b in sorted(self._buckets.items())]

    def smoothed(self) -> list[Point]:
        """The moving mean over a twelfth of the run, at least three buckets."""
        means = self.means()
        half = max(3, len(means) // 12) // 2
        windows = [[y for _, y in means[max(0, i - half) : i + half + 1]] for i in range(len(means))]
        return [(x, sum(window) / len(window)) for (x, _), window in zip(means, windows)]


class Chart:
    """One plot: a line, or a layer of bars, per name that ``read`` has for a record of ``kind``; None is skipped.

    ``style`` is ``lines``, ``dots`` (a line that marks its points), ``smooth`` (a faint line and its moving mean),
    ``counts`` (a name without a value is 0, also before its first one) or ``bars`` (stacked). ``unit``: the y axis is
    0 to 1 if all values are, so that plots of runs are comparable. ``optional``: without a line there is no plot.
    ``axis`` are arguments of `svg.line_chart`.
    """

    def __init__(
        self,
        title: str,
        note: str,
        read: Callable[[Any], Values],
        *,
        kind: type[Record] = StepRecord,
        style: str = "lines",
        unit: bool = False,
        optional: bool = False,
        **axis: Any,
    ) -> None:
        self.title, self.note, self.kind, self.optional = title, note, kind, optional
        self._read, self._style, self._unit, self._axis = read, style, unit, axis
        self._curves: dict[str, Curve] = {}
        self._span: tuple[float, float] | None = None

    def add(self, record: Record) -> None:
        x, zeros = float(position(record)), dict.fromkeys(self._curves if self._style == "counts" else (), 0.0)
        values: Values = {**zeros, **self._read(record)}
        for name, value in values.items():
            if value is None:
                continue
            if name not in self._curves:
                self._curves[name] = Curve(BARS if self._style == "bars" else BUCKETS)
                for before in (self._span or ()) if self._style == "counts" else ():
                    self._curves[name].add(before, 0.0)
            self._curves[name].add(x, float(value))
        self._span = (self._span[0] if self._span else x, x)

    def smoothed(self, name: str, colour: int) -> svg.Series:
        points = [point for curve in self._curves.values() for point in curve.smoothed()]
        return svg.Series(name=name, points=points, colour=colour)

    def draw(self, marks: Sequence[float]) -> str:
        x_label = "optimizer step" if self.kind in (StepRecord, EvalRecord) else "version"
        if self._style == "bars":
            layers = {name: curve.means() for name, curve in self._curves.items()}
            xs = [x for x, _ in next(iter(layers.values()), [])]
            bars = {name: [y for _, y in points] for name, points in layers.items()}
            return svg.stacked_bars(xs, bars, x_label=x_label, marks=marks)
        curves = sorted(self._curves.items()) if self._style == "counts" else self._curves.items()
        faint, dots = self._style == "smooth", self._style == "dots"
        series = [svg.Series(name=n, points=c, colour=i, faint=faint, dots=dots) for i, (n, c) in enumerate(curves)]
        series += [self.smoothed("smoothed", 0)] if faint else []
        axis = self._axis | ({"y_range": SHARE} if self._unit and _is_share(series) else {})
        return svg.line_chart(series, x_label=x_label, marks=marks, **axis)

    @property
    def empty(self) -> bool:
        return not self._curves


class Staleness(Chart):
    """A bar per lag: its share of the trained tokens."""

    def __init__(self) -> None:
        super().__init__("Staleness", "share of the trained tokens by versions of lag", lambda _: {})
        self._tokens: Counter[int] = Counter()

    def add(self, record: Record) -> None:
        self._tokens.update(record.staleness if isinstance(record, StepRecord) else {})

    def draw(self, marks: Sequence[float]) -> str:
        lags, total = sorted(self._tokens), self._tokens.total()
        shares = {"": [self._tokens[lag] / total for lag in lags]}
        return svg.stacked_bars(lags, shares, x_label="versions behind at training")


class Plots:
    """``add`` valid records (`iter_metrics`), then draw."""

    def __init__(self) -> None:
        self._resumed: list[float] = []
        self.reward = _reward()
        weights = _weights()
        self._all, self._of_client = [self.reward, *_training(), *weights], [*_client_steps(), *weights]
        self._by_kind: dict[type[Record], list[Chart]] = {}
        for chart in dict.fromkeys((*self._all, *self._of_client)):
            self._by_kind.setdefault(chart.kind, []).append(chart)

    def add(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self._resumed.append(float(record.version))
        for chart in self._by_kind.get(type(record), ()):
            chart.add(record)

    def all(self) -> list[Plot]:
        """Draw every plot, except empty optional ones. Dotted vertical lines mark resumed versions."""
        return [(c.title, c.note, c.draw(self._resumed)) for c in self._all if not (c.optional and c.empty)]

    def of_client(self) -> list[Plot]:
        """Draw the plots of an adapter that a client drives.

        Steps are without marks: versions, at which a run resumes, do not count a client's steps.
        """
        return [(c.title, c.note, c.draw(() if c.kind is StepRecord else self._resumed)) for c in self._of_client]


def rewards_together(adapters: Mapping[str, Plots]) -> str:
    """One line per adapter: its smoothed reward over its own steps."""
    series = [plots.reward.smoothed(name, i) for i, (name, plots) in enumerate(adapters.items())]
    y_range = SHARE if _is_share(series) else None
    return svg.line_chart(series, x_label="optimizer step of the adapter", y_range=y_range)


def _is_share(series: Sequence[svg.Series]) -> bool:
    return all(0 <= y <= 1 for line in series for _, y in line.points)


def _metrics(**lines: str) -> Callable[[StepRecord], Values]:
    """Metrics of steps by the name of their line."""
    return lambda step: {name.replace("_", " "): step.metrics.get(tag) for name, tag in lines.items()}


def _parts(prefix: str, *endings: str) -> Callable[[StepRecord], Values]:
    return lambda step: {name: x for name, x in step.named(prefix).items() if name.endswith(endings or "")}


def _set(figure: str) -> Callable[[EvalRecord], Values]:
    """A figure of every evaluation set."""
    return lambda record: {record.name: getattr(record, figure)}


def _several(record: EvalRecord) -> Values:
    values = {f"{record.name} pass@{k}": value for k, value in record.pass_at.items() if k > 1}
    return {**values, f"{record.name} majority@{record.n_samples}": record.majority}


def _reward() -> Chart:
    note = "mean over the batch of a step"
    return Chart("Reward", note, lambda s: {"reward per step": s.reward_mean}, style="smooth", unit=True)


def _training() -> list[Chart]:
    mismatch = _metrics(
        older_versions="train/mismatch_stale", all="train/behaviour_mean_abs", same_version="train/mismatch_fresh"
    )
    entropy = _metrics(entropy="train/entropy", sampled="train/sampled_nll", gradient="train/grad_norm")
    groups = _metrics(running="train/groups_running", ready="train/groups_ready", leased="train/groups_leased")
    critic = _metrics(value_loss="train/value_loss", explained_variance="train/explained_variance")
    pacing = _metrics(spare="time/batch_spare_s", margin="time/pacing_margin_s")
    paced = "seconds from a whole batch to its request, below 0: waited for; and the margin"
    calls, tokens = _parts("reward_cost/", "/answers", "/calls", "/retries"), _parts("reward_cost/", "_tokens")
    speed, clipped = "train/rollout_tokens_per_s", "train/clip_fraction"
    held_out: dict[str, Any] = {"kind": EvalRecord, "style": "dots"}
    optional: dict[str, Any] = {**held_out, "optional": True}

    def idle(step: StepRecord) -> Values:
        return {"trainer": step.trainer_idle, "servers": step.metrics.get("train/servers_idle")}

    def retried(step: StepRecord) -> Values:
        again = {"re-issued": "train/reissued", "late duplicates": "train/late"}
        return {"retried": sum(step.retried.values())} | {name: step.metrics.get(tag) for name, tag in again.items()}

    return [
        Chart("Reward by part", "mean of each part that the reward names", _parts("reward/"), style="counts"),
        Chart("Judge's calls", "of a step: answers, requests, repeated requests", calls, optional=True, floor=0),
        Chart("Judge's tokens", "of a step", tokens, optional=True, floor=0),
        Chart("Held-out accuracy", "unscored answers count as not correct", _set("accuracy"), unit=True, **held_out),
        Chart("Held-out reward", "mean over scored answers", _set("reward_mean"), unit=True, **held_out),
        Chart("Pass@k and majority", "sets with several answers", _several, y_range=SHARE, **optional),
        Chart("Held-out answer length", "mean of sampled tokens", _set("answer_tokens"), floor=0, **optional),
        Chart("Held-out truncated", "share of answers", _set("truncated"), y_range=SHARE, **optional),
        Staleness(),
        Chart("Mean lag", "versions, trained tokens", lambda s: {"": s.mean_lag}, floor=0),
        Chart("Logprob mismatch", "mean |trainer - rollout|, nats; same version: numerics", mismatch, log_y=True),
        Chart("Critic", "value loss per token; share of the returns' variance explained", critic, optional=True),
        Chart("Clipped fraction", "of the trained tokens", lambda s: {"": s.metrics.get(clipped)}, floor=0),
        Chart("Entropy and gradient norm", "nats; -log p of sampled tokens; before clipping", entropy, floor=0),
        Chart("Step time", "seconds by phase", StepRecord.phases_s, style="bars"),
        Chart("Idle", "fraction of the time without training, or without generation", idle, y_range=SHARE),
        Chart("Rollout speed", "tokens/s, all servers", lambda s: {"": s.metrics.get(speed)}, floor=0),
        Chart("Groups in flight", "at the delivery of a batch", groups, floor=0),
        Chart("Pacing", paced, pacing),
        Chart("Groups dropped", "by reason, since the start", lambda s: s.dropped, style="counts", floor=0),
        Chart("Groups retried", "since the start", retried, floor=0),
    ]


def _client_steps() -> list[Chart]:
    def times(step: StepRecord) -> Values:
        return {"trainer": step.spans.get("train"), "all": step.step_s}

    return [
        Chart("Loss", "mean over the targets of a step", lambda s: {"": s.metrics.get("train/loss")}),
        Chart("Gradient norm", "before clipping", lambda s: {"": s.metrics.get("train/grad_norm")}, floor=0),
        Chart("Learning rate", "of the call", lambda s: {"": s.metrics.get("train/lr")}, floor=0),
        Chart("Trained tokens", "of a step", lambda s: {"": s.trained_tokens}, floor=0),
        Chart("Step time", "seconds since the step before: passes and step, and all", times),
    ]


def _weights() -> list[Chart]:
    def probe(record: PublishRecord) -> Values:
        return {"largest": record.probe_max_abs, "mean": record.probe_mean_abs}

    def written(record: CheckpointRecord) -> Values:
        return {"": None if record.failed else record.write_s}

    published = PublishRecord
    return [
        Chart("Publish by phase", "ms", published.sequence_ms, kind=published, style="bars"),
        Chart("Publish, total", "ms", lambda p: {"": p.total_ms}, kind=published, floor=0),
        Chart("Parity probe", "|logp trainer - logp server|", probe, kind=published, log_y=True),
        Chart("Checkpoint", "seconds to write, in the background", written, kind=CheckpointRecord, floor=0),
    ]


TURNS, MIN_BARS = 2, 4
"""A bar holds so many steps of each adapter on average, unless there would be fewer bars than these."""
DRAWN = 6
"""Adapters with a colour of their own; the rest is drawn as one."""
REST = "others"
UNITS = ((36_000.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From this many seconds on, the axis has this many seconds in a unit of this name."""


class Shares:
    """Sums trained tokens by adapter over equal spans of time, of a second at first; ``add`` valid records."""

    def __init__(self, adapters: Sequence[str]) -> None:
        self._names, self._span_s, self._steps = list(adapters), 1.0, 0
        self._tokens: dict[int, Counter[str]] = {}
        self._resumed_s: list[float] = []

    def add(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self._resumed_s.append(record.time_s)
        if isinstance(record, StepRecord):
            self._steps += 1
            span = self._tokens.setdefault(int(record.time_s // self._span_s), Counter())
            span[record.adapter] += record.trained_tokens
            while max(self._tokens) >= BARS:
                self._span_s *= 2
                self._tokens = self._merged(2)

    def _merged(self, width: int) -> dict[int, Counter[str]]:
        merged: dict[int, Counter[str]] = {}
        for place, tokens in self._tokens.items():
            merged.setdefault(place // width, Counter()).update(tokens)
        return merged

    def rows(self) -> list[tuple[float, dict[str, float]]]:
        """(middle of a bar in seconds, share by adapter), from the start to the last step; 0 where none was trained."""
        spans = max(self._tokens, default=-1) + 1
        bars = min(BARS, max(MIN_BARS, self._steps // (TURNS * len(self._names))))
        width = max(1, math.ceil(spans / bars))
        merged = self._merged(width)
        tokens = [merged.get(i, Counter[str]()) for i in range(math.ceil(spans / width))]
        shares = [{name: t[name] / max(1, t.total()) for name in self._names} for t in tokens]
        return [((i + 0.5) * width * self._span_s, share) for i, share in enumerate(shares)]

    def draw(self) -> str:
        rows = self.rows()
        last_s = rows[-1][0] if rows else 0.0
        unit_s, unit = next((size, name) for limit, size, name in UNITS if last_s >= limit)
        sums = sum(self._tokens.values(), Counter[str]())
        largest = sorted(self._names, key=lambda name: -sums[name])
        several = set(largest[DRAWN:] if len(largest) > DRAWN + 1 else ())
        layers = {name: [share[name] for _, share in rows] for name in self._names if name not in several}
        if several:
            layers[REST] = [sum(share[name] for name in several) for _, share in rows]
        times, marks = [at / unit_s for at, _ in rows], [at / unit_s for at in self._resumed_s]
        return svg.stacked_bars(times, layers, x_label=f"{unit} since the start", marks=marks)

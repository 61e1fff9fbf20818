"""Collect the plots of a run, one record at a time, in reading order. Memory does not grow with the number of records.

A line keeps the first, lowest, highest and last point of each stretch of its x axis, so a spike of one step stays
visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import fmean
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
STRETCHES = 320
"""Half the width of a plot in pixels; more would not be visible."""
SHARE = (0.0, 1.0)


class Curve:
    """Points of one line, in any order of x."""

    def __init__(self) -> None:
        self._points: list[Point] = []

    def add(self, x: float, y: float) -> None:
        self._points.append((x, y))
        if len(self._points) > 8 * STRETCHES:
            self._points = self.thinned()

    def _stretches(self) -> Iterable[list[Point]]:
        """The points by stretches of equal width, at least of one step or version."""
        points = sorted(self._points)
        width = max(1.0, (points[-1][0] - points[0][0]) / STRETCHES) if points else 1.0
        return (list(found) for _, found in groupby(points, lambda point: point[0] // width))

    def thinned(self) -> list[Point]:
        y = itemgetter(1)
        ends = ({part[0], min(part, key=y), max(part, key=y), part[-1]} for part in self._stretches())
        return [point for kept in ends for point in sorted(kept)]

    def smoothed(self) -> list[Point]:
        """The moving mean over a twelfth of the run, at least three stretches."""
        means = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in self._stretches()]
        half = max(3, len(means) // 12) // 2
        return [(x, fmean(y for _, y in means[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(means)]


class Chart:
    """One plot: a line per name that ``read`` has for a record of ``kind``; None is skipped.

    ``style`` is ``lines``, ``dots`` (a line that marks its points), ``smooth`` (a faint line and its moving mean) or
    ``counts`` (sorted names; one without a value is 0, also before its first one). ``unit``: the y axis is 0 to 1 if
    all values are, so that plots of runs are comparable. ``axis`` are arguments of `svg.line_chart`.
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
        **axis: Any,
    ) -> None:
        self.title, self.note, self.kind, self.curves = title, note, kind, dict[str, Curve]()
        self._read, self._style, self._unit, self._axis = read, style, unit, axis
        self._seen: tuple[float, ...] = ()
        """The first and the last x."""

    def add(self, record: Record) -> None:
        counts, x = self._style == "counts", float(position(record))
        values: Values = {**dict.fromkeys(self.curves if counts else (), 0.0), **self._read(record)}
        for name, value in values.items():
            if value is None:
                continue
            if name not in self.curves:
                self.curves[name] = Curve()
                for before in self._seen if counts else ():
                    self.curves[name].add(before, 0.0)
            self.curves[name].add(x, float(value))
        self._seen = (self._seen[0] if self._seen else x, x)

    def smoothed(self, name: str, colour: int) -> svg.Series:
        points = [point for curve in self.curves.values() for point in curve.smoothed()]
        return svg.Series(name=name, points=points, colour=colour)

    def draw(self, marks: Sequence[float]) -> str:
        x_label = "optimizer step" if self.kind in (StepRecord, EvalRecord) else "version"
        curves = sorted(self.curves.items()) if self._style == "counts" else self.curves.items()
        faint, dots = self._style == "smooth", self._style == "dots"
        series = [
            svg.Series(name=name, points=curve.thinned(), colour=i, faint=faint, dots=dots)
            for i, (name, curve) in enumerate(curves)
        ]
        series += [self.smoothed("smoothed", 0)] if faint else []
        axis = self._axis | ({"y_range": SHARE} if self._unit and _is_share(series) else {})
        return svg.line_chart(series, x_label=x_label, marks=marks, **axis)


class Plots:
    """``add`` valid records (`iter_metrics`), then draw."""

    def __init__(self) -> None:
        self._resumed: list[float] = []
        self._by_client = False
        self._charts = _charts()
        self.reward = self._charts[0]

    def add(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self._resumed.append(float(record.version))
        if isinstance(record, StepRecord):
            self._by_client = record.by_client
        for chart in self._charts:
            if type(record) is chart.kind:
                chart.add(record)

    def draw(self) -> list[Plot]:
        """Draw every plot that has a line. Dotted vertical lines mark resumed versions.

        A client's steps are without marks: versions, at which a run resumes, do not count them.
        """
        return [
            (c.title, c.note, c.draw(() if self._by_client and c.kind is StepRecord else self._resumed))
            for c in self._charts
            if c.curves
        ]


class RunPlots:
    """The plots of each adapter, and those of several together. ``add`` valid records (`iter_metrics`)."""

    def __init__(self, adapters: Sequence[str]) -> None:
        self.adapters = {name: Plots() for name in adapters}
        self._tokens: Counter[str] = Counter()
        self._shares = {name: Curve() for name in adapters}

    def add(self, record: Record) -> None:
        if isinstance(record, StepRecord) and record.adapter in self._shares:
            self._tokens[record.adapter] += record.trained_tokens
            share = self._tokens[record.adapter] / max(1, self._tokens.total())
            self._shares[record.adapter].add(record.time_s, share)
        only = next(iter(self.adapters)) if len(self.adapters) == 1 else None
        if (plots := self.adapters.get(only or record.adapter)) is not None:
            plots.add(record)

    def together(self, rewarded: Iterable[str]) -> list[Plot]:
        """Shares of all adapters over time, and the smoothed rewards of those that have some."""
        shares = [
            svg.Series(name=name, points=[(t / 60, y) for t, y in curve.thinned()], colour=i)
            for i, (name, curve) in enumerate(self._shares.items())
        ]
        rewards = [self.adapters[name].reward.smoothed(name, i) for i, name in enumerate(rewarded)]
        time, steps = "minutes since the start", "optimizer step of the adapter"
        y_range = SHARE if _is_share(rewards) else None
        return [
            ("Shares of trained tokens", "of all so far", svg.line_chart(shares, x_label=time, y_range=SHARE)),
            ("Reward", "smoothed", svg.line_chart(rewards, x_label=steps, y_range=y_range)),
        ]


def _is_share(series: Sequence[svg.Series]) -> bool:
    return all(0 <= y <= 1 for line in series for _, y in line.points)


def _metrics(**lines: str) -> Callable[[StepRecord], Values]:
    """Metrics of steps by the name of their line."""
    return lambda step: {name.replace("_", " "): step.metrics.get(tag) for name, tag in lines.items()}


def _metric(tag: str) -> Callable[[StepRecord], Values]:
    return lambda step: {"": step.metrics.get(tag)}


def _parts(prefix: str, *endings: str) -> Callable[[StepRecord], Values]:
    return lambda step: {name: x for name, x in step.named(prefix).items() if name.endswith(endings or "")}


def _set(figure: str) -> Callable[[EvalRecord], Values]:
    """A figure of every evaluation set."""
    return lambda record: {record.name: getattr(record, figure)}


def _several(record: EvalRecord) -> Values:
    values = {f"{record.name} pass@{k}": value for k, value in record.pass_at.items() if k > 1}
    return {**values, f"{record.name} majority@{record.n_samples}": record.majority}


def _lags(step: StepRecord) -> Values:
    tokens = sum(step.staleness.values())
    return {str(lag): n / tokens for lag, n in step.staleness.items() if tokens}


def _retried(step: StepRecord) -> Values:
    if step.by_client:
        return {}
    again = {"re-issued": "train/reissued", "late duplicates": "train/late"}
    return {"retried": sum(step.retried.values())} | {name: step.metrics.get(tag) for name, tag in again.items()}


def _charts() -> list[Chart]:
    mismatch = _metrics(
        older_versions="train/mismatch_stale", all="train/behaviour_mean_abs", same_version="train/mismatch_fresh"
    )
    entropy = _metrics(entropy="train/entropy", sampled="train/sampled_nll", gradient="train/grad_norm")
    groups = _metrics(running="train/groups_running", ready="train/groups_ready", leased="train/groups_leased")
    critic = _metrics(value_loss="train/value_loss", explained_variance="train/explained_variance")
    pacing = _metrics(spare="time/batch_spare_s", margin="time/pacing_margin_s")
    paced = "seconds from a whole batch to its request, below 0: waited for; and the margin"
    calls, tokens = _parts("reward_cost/", "/answers", "/calls", "/retries"), _parts("reward_cost/", "_tokens")
    held_out: dict[str, Any] = {"kind": EvalRecord, "style": "dots"}
    published: dict[str, Any] = {"kind": PublishRecord}

    def idle(step: StepRecord) -> Values:
        return {"trainer": step.trainer_idle, "servers": step.metrics.get("train/servers_idle")}

    def probe(record: PublishRecord) -> Values:
        return {"largest": record.probe_max_abs, "mean": record.probe_mean_abs}

    def written(record: CheckpointRecord) -> Values:
        return {"": None if record.failed else record.write_s}

    reward, batch = (lambda s: {"reward per step": s.reward_mean}), "mean over the batch of a step"
    return [
        Chart("Reward", batch, reward, style="smooth", unit=True),
        Chart("Reward by part", "mean of each part that the reward names", _parts("reward/"), style="counts"),
        Chart("Judge's calls", "of a step: answers, requests, repeated requests", calls, floor=0),
        Chart("Judge's tokens", "of a step", tokens, floor=0),
        Chart("Held-out accuracy", "unscored answers count as not correct", _set("accuracy"), unit=True, **held_out),
        Chart("Held-out reward", "mean over scored answers", _set("reward_mean"), unit=True, **held_out),
        Chart("Pass@k and majority", "sets with several answers", _several, y_range=SHARE, **held_out),
        Chart("Held-out answer length", "mean of sampled tokens", _set("answer_tokens"), floor=0, **held_out),
        Chart("Held-out truncated", "share of answers", _set("truncated"), y_range=SHARE, **held_out),
        Chart("Staleness", "share of the trained tokens by versions of lag", _lags, style="counts", y_range=SHARE),
        Chart("Mean lag", "versions, trained tokens", lambda s: {"": s.mean_lag}, floor=0),
        Chart("Logprob mismatch", "mean |trainer - rollout|, nats; same version: numerics", mismatch, log_y=True),
        Chart("Critic", "value loss per token; share of the returns' variance explained", critic),
        Chart("Clipped fraction", "of the trained tokens", _metric("train/clip_fraction"), floor=0),
        Chart("Loss", "of a step", _metric("train/loss")),
        Chart("Entropy and gradient norm", "nats; -log p of sampled tokens; before clipping", entropy, floor=0),
        Chart("Learning rate", "of a step", _metric("train/lr"), floor=0),
        Chart("Trained tokens", "of a step", lambda s: {"": s.trained_tokens}, floor=0),
        Chart("Step time", "seconds by phase", lambda s: {**s.phases_s(), "all": s.step_s}, floor=0),
        Chart("Idle", "fraction of the time without training, or without generation", idle, y_range=SHARE),
        Chart("Rollout speed", "tokens/s, all servers", _metric("train/rollout_tokens_per_s"), floor=0),
        Chart("Groups in flight", "at the delivery of a batch", groups, floor=0),
        Chart("Pacing", paced, pacing),
        Chart("Groups dropped", "by reason, since the start", lambda s: s.dropped, style="counts", floor=0),
        Chart("Groups retried", "since the start", _retried, floor=0),
        Chart("Publish by phase", "ms", PublishRecord.sequence_ms, floor=0, **published),
        Chart("Publish, total", "ms", lambda p: {"": p.total_ms}, floor=0, **published),
        Chart("Parity probe", "|logp trainer - logp server|", probe, log_y=True, **published),
        Chart("Checkpoint", "seconds to write, in the background", written, kind=CheckpointRecord, floor=0),
    ]

"""The plots of a run, from the scalars that TensorBoard has, one record at a time.

Memory does not grow with the number of records: a line keeps the first, lowest, highest and last point of each
stretch of its x axis, so a spike of one step stays visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from operator import itemgetter
from statistics import fmean

from areal_lora.obs.metrics.records import Record, ResumeRecord, StepRecord, position, scalars
from areal_lora.obs.report import svg

Plot = tuple[str, str, str]
"""Title, note, drawing."""
Point = tuple[float, float]
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

    def smoothed(self, name: str, colour: int) -> svg.Series:
        """The moving mean over a twelfth of the run, at least three stretches."""
        means = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in self._stretches()]
        half = max(3, len(means) // 12) // 2
        windows = [means[max(0, i - half) : i + half + 1] for i in range(len(means))]
        points = [(x, fmean(y for _, y in window)) for (x, _), window in zip(means, windows, strict=True)]
        return svg.Series(name=name, points=points, colour=colour)


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot: a line for each tag of TensorBoard that a pattern among ``tags`` matches (`fnmatchcase`).

    ``unit``: the y axis is 0 to 1 if all values are, so that plots of runs are comparable.
    """

    title: str
    note: str
    tags: str
    unit: bool = False
    log: bool = False
    smooth: bool = False

    def draw(self, curves: Mapping[str, Curve], marks: Sequence[float]) -> str:
        dots, x_label = self.tags.startswith("eval/"), "version" if self.of_versions else "optimizer step"
        series = [
            svg.Series(name=name, points=curve.thinned(), colour=i, faint=self.smooth, dots=dots)
            for i, (name, curve) in enumerate(curves.items())
        ]
        series += [curve.smoothed("smoothed", 0) for curve in curves.values() if self.smooth]
        y_range = SHARE if self.unit and _is_share(series) else None
        floor = None if self.log else 0.0
        return svg.line_chart(series, x_label=x_label, marks=marks, y_range=y_range, log_y=self.log, floor=floor)

    @property
    def of_versions(self) -> bool:
        return self.tags.startswith(("publish/", "checkpoint/"))


CALLS = "reward_cost/*/answers reward_cost/*/calls reward_cost/*/retries"
PHASES = "time/wait_batch_s time/annotate_s time/train_s time/checkpoint_*_s time/publish_*_s time/step_s"
CHARTS = (
    Chart("Reward", "mean over the batch of a step", "train/reward_mean", unit=True, smooth=True),
    Chart("Reward by part", "mean of each part that the reward names", "reward/*"),
    Chart("Judge's calls", "of a step: answers, requests, repeated requests", CALLS),
    Chart("Judge's tokens", "of a step", "reward_cost/*_tokens"),
    Chart("Held-out accuracy", "unscored answers count as not correct", "eval/*/accuracy", unit=True),
    Chart("Held-out reward", "mean over scored answers", "eval/*/reward_mean", unit=True),
    Chart("Pass@k and majority", "sets with several answers", "eval/*/majority eval/*/pass@*", unit=True),
    Chart("Held-out answer length", "mean of sampled tokens", "eval/*/answer_tokens"),
    Chart("Held-out truncated", "share of answers", "eval/*/truncated", unit=True),
    Chart("Staleness", "versions of lag of the trained tokens: mean and largest", "train/mean_lag train/max_staleness"),
    Chart(
        "Logprob mismatch",
        "mean |trainer - rollout|, nats: of tokens of the same version (fresh, numerics only), older ones, all",
        "train/mismatch_* train/behaviour_mean_abs",
        log=True,
    ),
    Chart(
        "Critic",
        "value loss per token; share of the returns' variance explained",
        "train/value_loss train/explained_variance",
    ),
    Chart("Clipped fraction", "of the trained tokens", "train/clip_fraction"),
    Chart("Loss", "of a step", "train/loss"),
    Chart(
        "Entropy and gradient norm",
        "nats; -log p of sampled tokens; before clipping",
        "train/entropy train/sampled_nll train/grad_norm",
    ),
    Chart("Learning rate", "of a step", "train/lr"),
    Chart("Tokens", "of a step", "train/n_tokens train/n_targets"),
    Chart("Step time", "seconds by phase, and all", PHASES),
    Chart("Idle", "fraction of the time without training, or without generation", "train/*_idle", unit=True),
    Chart("Rollout speed", "tokens/s, all servers", "train/rollout_tokens_per_s"),
    Chart(
        "Groups in flight", "at the delivery of a batch", "train/groups_running train/groups_ready train/groups_leased"
    ),
    Chart(
        "Pacing",
        "seconds from a whole batch to its request, below 0: waited for; and the margin",
        "time/batch_spare_s time/pacing_margin_s",
    ),
    Chart("Groups dropped", "by reason, since the start", "dropped/*"),
    Chart(
        "Groups retried",
        "by fault, since the start; repeated requests, late answers",
        "retried/* train/reissued train/late",
    ),
    Chart("Publish", "ms, by phase and in total; phases may overlap", "publish/*_ms"),
    Chart("Parity probe", "|logp trainer - logp server|", "publish/probe_*", log=True),
    Chart("Checkpoint", "seconds to write, in the background", "checkpoint/write_s"),
)


@cache
def _line_of(tag: str) -> tuple[Chart, str] | None:
    """The chart of a tag, and the name of its line: what distinguishes it from the chart's other tags."""
    for chart in CHARTS:
        if any(fnmatchcase(tag, pattern) for pattern in chart.tags.split()):
            same = chart.tags.rpartition("*")[2]  # `/accuracy` of `eval/*/accuracy`
            return chart, "" if tag == chart.tags else tag.partition("/")[2].removesuffix(same)
    return None


class Plots:
    """``add`` valid records (`iter_metrics`), then draw."""

    def __init__(self) -> None:
        self._resumed: list[float] = []
        self._by_client = False
        self._curves: dict[str, dict[str, Curve]] = {chart.title: {} for chart in CHARTS}

    def add(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self._resumed.append(float(record.version))
        if isinstance(record, StepRecord):
            self._by_client = record.by_client
        for tag, value in scalars(record).items():
            if (found := _line_of(tag.removeprefix(f"{record.adapter}/"))) is not None:
                self._curves[found[0].title].setdefault(found[1], Curve()).add(float(position(record)), value)

    def reward(self, name: str, colour: int) -> list[svg.Series]:
        return [curve.smoothed(name, colour) for curve in self._curves[CHARTS[0].title].values()]

    def draw(self) -> list[Plot]:
        """Draw every plot that has a line. Dotted vertical lines mark resumed versions.

        A client's steps are without marks: versions, at which a run resumes, do not count them.
        """
        return [
            (c.title, c.note, c.draw(curves, () if self._by_client and not c.of_versions else self._resumed))
            for c in CHARTS
            if (curves := self._curves[c.title])
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
        rewards = [line for i, name in enumerate(rewarded) for line in self.adapters[name].reward(name, i)]
        time, steps = "minutes since the start", "optimizer step of the adapter"
        y_range = SHARE if _is_share(rewards) else None
        return [
            ("Shares of trained tokens", "of all so far", svg.line_chart(shares, x_label=time, y_range=SHARE)),
            ("Reward", "smoothed", svg.line_chart(rewards, x_label=steps, y_range=y_range)),
        ]


def _is_share(series: Sequence[svg.Series]) -> bool:
    return all(0 <= y <= 1 for line in series for _, y in line.points)

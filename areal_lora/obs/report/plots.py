"""The plots of a run, from the scalars that TensorBoard has, one record at a time.

Memory does not grow with the number of records: a line keeps the first, lowest, highest and last point of each
stretch of its x axis, so a spike of one step stays visible. Drawings are SVG text, with no plotting library and no
scripts; colours are CSS variables (``STYLE``), so a plot follows the reader's light or dark theme.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from html import escape
from itertools import groupby
from operator import itemgetter
from statistics import fmean

from areal_lora.obs.metrics.records import Record, ResumeRecord, StepRecord, position, scalars

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 34, 44
N_COLOURS = 7
CHARACTER_PX = 7.0
"""Width of a legend character at 12 px, on the generous side."""

STYLE = """
:root { --c0: #2563eb; --c1: #d97706; --c2: #0f9d74; --c3: #b13d8e; --c4: #7c5cd6; --c5: #64748b; --c6: #b45309;
  --ink: #1f2937; --soft: #6b7280; --grid: #e5e7eb; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --c0: #6ea8fe; --c1: #f0ab4a; --c2: #4fd1a5; --c3: #e58bc7; --c4: #b09df2; --c5: #94a3b8; --c6: #f59e0b;
    --ink: #e5e7eb; --soft: #9ca3af; --grid: #313a48; --paper: #161b22; } }
.plot text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; fill: var(--soft); }
.plot .legend { fill: var(--ink); } .plot .grid { stroke: var(--grid); stroke-width: 1; }
.plot .none { fill: var(--soft); } .plot .mark { stroke: var(--c1); stroke-width: 1; stroke-dasharray: 2 3; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line. ``points`` are (x, y); ``faint`` draws it thin, ``dots`` marks each point."""

    name: str
    points: Iterable[tuple[float, float]]
    colour: int = 0
    faint: bool = False
    dots: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels; ``ticks`` are (value, label)."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: tuple[tuple[float, str], ...]

    def px(self, value: float) -> float:
        return self.start_px + (value - self.low) / (self.high - self.low) * (self.end_px - self.start_px)


def label(value: float) -> str:
    """A tick label: ``0.25``, ``1.5k``, ``2M``, ``1e-06``."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            scale = 1e3 if suffix == "k" else limit
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.0e}" if 0 < abs(value) < 1e-3 else f"{value:.6g}"


def nice_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 x 10^k that covers ``span`` in at most ``count`` steps."""
    power = 10.0 ** math.floor(math.log10(span / count))
    return next((m * power for m in (1, 2, 5) if m * power * count >= span * (1 - 1e-9)), 10 * power)


def linear_axis(
    low: float,
    high: float,
    start_px: float,
    end_px: float,
    *,
    count: int = 5,
    whole: bool = False,
    name: Callable[[float], str] = label,
) -> Axis:
    """Round ticks that cover [low, high]; ``whole``: only at whole numbers."""
    if high <= low:
        high = low + 1.0
    step = nice_step(high - low, count)
    step = max(1.0, step) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple((i * step, name(round(i * step, 12))) for i in range(first, last + 1))
    return Axis(first * step, last * step, start_px, end_px, ticks)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_range: tuple[float, float] | None = None,
    log_y: bool = False,
    floor: float | None = None,
    marks: Sequence[float] = (),
) -> str:
    """Lines over a shared x. ``y_range`` fixes the axis, ``floor`` is a lowest y that is always shown.

    ``marks`` are x at which something happened to the whole run: thin vertical lines.

    A logarithmic axis has whole decades and omits values that are not positive. A chart without any point states that.
    """
    drawn = [(s, [(x, y) for x, y in s.points if math.isfinite(y) and (y > 0 or not log_y)]) for s in series]
    if log_y:
        drawn = [(s, [(x, math.log10(y)) for x, y in kept]) for s, kept in drawn]
    points = [p for _, kept in drawn for p in kept]
    if not points:
        return _frame([_text(WIDTH / 2, HEIGHT / 2, "nothing recorded", "middle", "none")])
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = y_range or (min(ys) if floor is None else min(floor, *ys), max(ys))
    x_axis = _x_axis(min(xs), max(xs))
    name = (lambda exponent: f"1e{exponent:.0f}") if log_y else label
    y_axis = linear_axis(low, high, HEIGHT - BOTTOM, TOP, whole=log_y, name=name)
    lines = [_line(s, [(x_axis.px(x), y_axis.px(y)) for x, y in kept]) for s, kept in drawn if kept]
    legend = [s for s, kept in drawn if s.name and kept]
    return _frame([_grid(x_axis, y_axis, x_label), _marks(x_axis, marks), *lines, _legend(legend)])


def _x_axis(low: float, high: float) -> Axis:
    """Steps or versions: ticks at whole numbers, the line fills the width."""
    ticks = linear_axis(low, high, 0, 1, count=8, whole=True).ticks
    high = max(high, low + 1)
    return Axis(low, high, LEFT, WIDTH - RIGHT, tuple(t for t in ticks if low <= t[0] <= high))


def _frame(parts: Sequence[str]) -> str:
    return f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(parts)}</svg>'


def _grid(x_axis: Axis, y_axis: Axis, x_label: str) -> str:
    parts = []
    for value, name in y_axis.ticks:
        y = y_axis.px(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, name, "end"))
    parts += [_text(x_axis.px(value), HEIGHT - BOTTOM + 16, name, "middle") for value, name in x_axis.ticks]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, "middle"))
    return "".join(parts)


def _marks(x_axis: Axis, places: Sequence[float]) -> str:
    inside = [x_axis.px(place) for place in places if x_axis.low <= place <= x_axis.high]
    return "".join(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>' for x in inside)


def _legend(entries: Sequence[Series]) -> str:
    widths = [17 + len(entry.name) * CHARACTER_PX + 16 for entry in entries]
    wraps = LEFT + sum(widths) > WIDTH
    parts, x, y = [], float(LEFT), 5 if wraps else 12
    for entry, width in zip(entries, widths, strict=True):
        if wraps and x > LEFT and x + width > WIDTH:
            x, y = float(LEFT), y + 14  # there is room for two lines
        look = f"fill:var(--c{entry.colour % N_COLOURS})" + (";opacity:.4" if entry.faint else "")
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="12" height="4" style="{look}"/>')
        parts.append(_text(x + 17, y + 6, entry.name, "start", "legend"))
        x += width
    return "".join(parts)


def _line(series: Series, pixels: Sequence[tuple[float, float]]) -> str:
    colour = f"var(--c{series.colour % N_COLOURS})"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    look = "stroke-width:1;opacity:.4" if series.faint else "stroke-width:2"
    look += ";stroke-dasharray:5 4" if series.dashed else ""
    parts = [f'<polyline points="{path}" style="fill:none;stroke:{colour};{look};stroke-linejoin:round"/>']
    if series.dots or len(pixels) == 1:
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" style="fill:{colour}"/>' for x, y in pixels]
    return "".join(parts)


def _text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{escape(content)}</text>'


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

    def smoothed(self, name: str, colour: int) -> Series:
        """The moving mean over a twelfth of the run, at least three stretches."""
        means = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in self._stretches()]
        half = max(3, len(means) // 12) // 2
        windows = [means[max(0, i - half) : i + half + 1] for i in range(len(means))]
        points = [(x, fmean(y for _, y in window)) for (x, _), window in zip(means, windows, strict=True)]
        return Series(name=name, points=points, colour=colour)


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
            Series(name=name, points=curve.thinned(), colour=i, faint=self.smooth, dots=dots)
            for i, (name, curve) in enumerate(curves.items())
        ]
        series += [curve.smoothed("smoothed", 0) for curve in curves.values() if self.smooth]
        y_range = SHARE if self.unit and _is_share(series) else None
        floor = None if self.log else 0.0
        return line_chart(series, x_label=x_label, marks=marks, y_range=y_range, log_y=self.log, floor=floor)

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
    Chart(
        "Parts of a step",
        "seconds: the batch to all ranks, its arrays, scores, training passes, optimizer",
        "time/exchange_s time/collate_s time/score_s time/passes_s time/optimizer_s",
    ),
    Chart("Training speed", "tokens/s of a device, over the whole step", "speed/tokens_per_s"),
    Chart("Training passes", "TFLOP/s of a device", "speed/tflops"),
    Chart("Share of the peak", "without (mfu) and with recomputation (hfu)", "speed/mfu speed/hfu", unit=True),
    Chart("Device memory", "GiB on the fullest trainer device at its peak", "memory/*_gib"),
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

    def reward(self, name: str, colour: int) -> list[Series]:
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
            Series(name=name, points=[(t / 60, y) for t, y in curve.thinned()], colour=i)
            for i, (name, curve) in enumerate(self._shares.items())
        ]
        rewards = [line for i, name in enumerate(rewarded) for line in self.adapters[name].reward(name, i)]
        time, steps = "minutes since the start", "optimizer step of the adapter"
        y_range = SHARE if _is_share(rewards) else None
        return [
            ("Shares of trained tokens", "of all so far", line_chart(shares, x_label=time, y_range=SHARE)),
            ("Reward", "smoothed", line_chart(rewards, x_label=steps, y_range=y_range)),
        ]


def _is_share(series: Sequence[Series]) -> bool:
    return all(0 <= y <= 1 for line in series for _, y in line.points)

"""The charts of a run as data, from the scalars that TensorBoard has, one record at a time; ``page.js`` draws them.

Memory does not grow with the number of records: a line keeps the first, lowest, highest and last point of each
stretch of its x axis, so a spike of one step stays visible.
"""

import math
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import Self

import msgspec
import numpy as np

from areal_lora.obs.metrics.records import Record, ResumeRecord, StepRecord, figures, position

STRETCHES = 320
"""Half the width of a chart in pixels; more would not be visible."""
FULL, FEWEST = 16, 32
"""Adapters whose lines have all stretches, and stretches of a line among any number of adapters."""
STEP, VERSION, MINUTES = "optimizer step", "version", "minutes since the start"


class Line(msgspec.Struct, frozen=True):
    """Points of one line, ``x`` ascending, both rounded to six digits."""

    name: str
    x: list[float]
    y: list[float]


class Chart(msgspec.Struct, frozen=True):
    """A chart, with a line for each tag of TensorBoard that a pattern among ``tags`` matches (`fnmatchcase`).

    ``unit``: y is 0 to 1; of a row of `CHARTS` only if all values are, so that charts of runs are comparable.
    ``log``: y is logarithmic. ``smooth``: the moving mean is drawn over the points. ``dots``: every point is marked.
    ``x`` names its axis: `STEP`, `VERSION` or `MINUTES`. ``marks`` are the x at which the run resumed.
    """

    title: str
    note: str
    tags: str = ""
    unit: bool = False
    log: bool = False
    smooth: bool = False
    x: str = STEP
    lines: list[Line] = []
    dots: bool = False
    marks: list[float] = []

    def drawn(self, curves: "Mapping[str, Curve]", marks: Sequence[float]) -> Self:
        """The chart with these lines by name."""
        lines = [curve.line(name) for name, curve in curves.items()]
        return msgspec.structs.replace(
            self,
            x=VERSION if self.of_versions else STEP,
            lines=lines,
            unit=self.unit and all(0 <= y <= 1 for line in lines for y in line.y),
            dots=self.tags.startswith("eval/"),
            marks=list(marks),
        )

    @property
    def of_versions(self) -> bool:
        return self.tags.startswith(("publish/", "checkpoint/"))


class ClockData(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steps of one adapter: seconds since the start of the run, and tokens trained so far."""

    seconds: Line
    tokens: Line


class Curve:
    """Points of one line, in any order of x."""

    def __init__(self, stretches: int = STRETCHES) -> None:
        self._stretches = stretches
        self._x, self._y = array("d"), array("d")
        self._lines: dict[tuple[str, float], Line] = {}

    def add(self, x: float, y: float) -> None:
        self._lines.clear()
        self._x.append(x)
        self._y.append(y)
        if len(self._x) > 8 * self._stretches:
            self._x, self._y = (array("d", column.tobytes()) for column in self.thinned())

    def thinned(self) -> tuple[np.ndarray, np.ndarray]:
        """The points by stretches of equal width, at least of one step or version; of each four at most."""
        x, y = np.array(self._x), np.array(self._y)
        order = np.lexsort((y, x))
        x, y = x[order], y[order]
        stretches = x // max(1.0, (x[-1] - x[0]) / self._stretches) if len(x) else x
        ends = np.flatnonzero(np.diff(stretches, append=np.inf))
        starts, by_height = np.append(0, ends[:-1] + 1)[: len(ends)], np.lexsort((y, stretches))
        kept = np.unique(np.concatenate([starts, ends, by_height[starts], by_height[ends]]))
        return x[kept], y[kept]

    def line(self, name: str, scale: float = 1.0) -> Line:
        """The thinned points, x times ``scale``; kept until the next point, for a live page."""
        if (name, scale) not in self._lines:
            x, y = self.thinned()
            self._lines[name, scale] = Line(name, [*map(_short, (x * scale).tolist())], [*map(_short, y.tolist())])
        return self._lines[name, scale]


def _short(value: float) -> float:
    return float(f"{value:.6g}")


CALLS = "reward_cost/*/answers reward_cost/*/calls reward_cost/*/retries"
PHASES = "time/wait_batch_s time/annotate_s time/train_s time/checkpoint_*_s time/publish_*_s time/step_s"
CHARTS = (
    Chart("Reward", "mean over the batch of a step", "train/reward_mean", unit=True, smooth=True),
    Chart("Reward of all answers", "since the step before", "train/reward_sampled", unit=True, smooth=True),
    Chart("Reward by part", "mean of each part over the answers for which the reward names it", "reward/*"),
    Chart("Scoring time", "mean seconds of a group", "reward_cost/seconds"),
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
    Chart("Mismatch by cause", "nats; parts of mean |trainer - rollout| of audited tokens", "mismatch/*"),
    Chart("Mismatch by cause, KL", "nats; parts of the divergence", "mismatch_kl/*"),
    Chart("Router flips", "share of choices that differ from the replayed ones", "train/router_flips", unit=True),
    Chart(
        "Critic",
        "value loss per token; share of the returns' variance explained",
        "train/value_loss train/explained_variance",
    ),
    Chart("Ratio and clip", "clipped share, mean |log ratio|", "train/clip_fraction train/log_ratio_abs"),
    Chart("Loss", "of a step", "train/loss"),
    Chart("Divergence from the reference", "KL, nats per token", "train/kl"),
    Chart(
        "Groups that teach little",
        "shares of the answered groups: equal rewards, all answers correct, all wrong",
        "train/groups_equal train/groups_all_*",
        unit=True,
    ),
    Chart("Reward spread", "standard deviation over the batch", "train/reward_std"),
    Chart(
        "Answer length", "tokens: mean of the sequences; of samples", "train/mean_answer_tokens train/answer_tokens_*"
    ),
    Chart("Prompt length", "mean tokens before the first answer of a sample", "train/prompt_tokens"),
    Chart("Turns", "of a sample: mean and most", "train/turns train/turns_max"),
    Chart("Truncated", "share of the answers that the limit of tokens ended", "train/truncated", unit=True),
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
    Chart("CPUs", "share of a node's CPUs that the processes of a role use", "machine/*/cpu_share", unit=True),
    Chart("One CPU", "share that the busiest process of a role uses", "machine/*/core_share", unit=True),
    Chart("Host memory", "GiB resident, by role and node", "machine/*/memory_gib"),
    Chart("GPU utilisation", "share of the time (NVML), by role, node and GPU", "machine/*/gpu_share", unit=True),
    Chart("GPU memory", "GiB in use, by any process", "machine/*/gpu_gib"),
    Chart("GPU power", "watts", "machine/*/gpu_watts"),
    Chart("GPU temperature", "degrees Celsius", "machine/*/gpu_celsius"),
    Chart("Sequences", "of servers: running, waiting; of the controller: not answered", "machine/*/sequences_*"),
    Chart("Preemptions", "of sequences per second, by node", "machine/*/preemptions_per_s"),
    Chart("KV cache", "share in use, of the fullest server of a node", "machine/*/kv_cache_share", unit=True),
    Chart("Prefix cache", "share of the prompt tokens found there, by node", "machine/*/prefix_cache_share", unit=True),
    Chart("Free disk", "GiB for the run folder", "machine/*/disk_free_gib"),
    Chart("Idle", "fraction of the time without training, or without a group in flight", "train/*_idle", unit=True),
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
COMPARED = ("Reward", "Held-out accuracy", "Held-out reward", "Learning rate")
"""Titles of the charts that several adapters share."""


@cache
def _line_of(tag: str) -> tuple[Chart, str] | None:
    """The chart of a tag, and the name of its line: what distinguishes it from the chart's other tags."""
    for chart in CHARTS:
        if any(fnmatchcase(tag, pattern) for pattern in chart.tags.split()):
            same = chart.tags.rpartition("*")[2]  # `/accuracy` of `eval/*/accuracy`
            return chart, "" if tag == chart.tags else tag.partition("/")[2].removesuffix(same)
    return None


class Charts:
    """The charts of one adapter: ``add`` valid records (`iter_metrics`), then take ``data``."""

    def __init__(self, stretches: int = STRETCHES) -> None:
        self._stretches = stretches
        self._resumed: list[float] = []
        self._by_client = False
        self._curves: dict[str, dict[str, Curve]] = {chart.title: {} for chart in CHARTS}
        self._by_tag: dict[str, Curve | None] = {}
        self._seconds, self._tokens, self._trained = Curve(stretches), Curve(stretches), 0

    def add(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self._resumed.append(float(record.version))
        if isinstance(record, StepRecord):
            self._by_client = record.by_client
            self._trained += record.trained_tokens
            self._seconds.add(record.step, record.time_s)
            self._tokens.add(record.step, self._trained)
        at, known = float(position(record)), self._by_tag
        for tag, value in figures(record).items():
            if value is not None and math.isfinite(value):
                curve = known[tag] if tag in known else self._new_line(tag)
                if curve is not None:
                    curve.add(at, value)

    def _new_line(self, tag: str) -> Curve | None:
        """The curve of a tag; None where no chart shows it."""
        found = _line_of(tag)
        curve = self._by_tag[tag] = found and self._curves[found[0].title].setdefault(found[1], Curve(self._stretches))
        return curve

    def curves(self, chart: Chart, name: str) -> dict[str, Curve]:
        """The curves of ``chart`` by ``name`` and the name of their line."""
        return {f"{name} {line}".rstrip(): curve for line, curve in self._curves[chart.title].items()}

    def clock(self) -> ClockData:
        return ClockData(seconds=self._seconds.line("seconds"), tokens=self._tokens.line("tokens"))

    def data(self) -> list[Chart]:
        """Every chart that has a line.

        A client's steps are without marks: versions, at which a run resumes, do not count them.
        """
        return [
            chart.drawn(curves, () if self._by_client and not chart.of_versions else self._resumed)
            for chart in CHARTS
            if (curves := self._curves[chart.title])
        ]


class RunCharts:
    """The charts of each adapter, and those of several together. ``add`` valid records (`iter_metrics`)."""

    def __init__(self, adapters: Sequence[str]) -> None:
        # The page of many adapters is not larger than that of `FULL`.
        stretches = max(FEWEST, STRETCHES * FULL // max(FULL, len(adapters)))
        self.adapters = {name: Charts(stretches) for name in adapters}
        self._tokens: Counter[str] = Counter()
        self._shares = {name: Curve(stretches) for name in adapters}

    def add(self, record: Record) -> None:
        if isinstance(record, StepRecord) and record.adapter in self._shares:
            self._tokens[record.adapter] += record.trained_tokens
            share = self._tokens[record.adapter] / max(1, self._tokens.total())
            self._shares[record.adapter].add(record.time_s, share)
        only = next(iter(self.adapters)) if len(self.adapters) == 1 else ""
        if (charts := self.adapters.get(record.adapter or only)) is not None:
            charts.add(record)

    def together(self, compared: Sequence[str]) -> list[Chart]:
        """What decides between ``compared`` adapters (`COMPARED`), and the shares of all over time."""
        found = [
            chart.drawn({k: v for name in compared for k, v in self.adapters[name].curves(chart, name).items()}, ())
            for chart in CHARTS
            if chart.title in COMPARED
        ]
        shares = [line for name, curve in self._shares.items() if (line := curve.line(name, 1 / 60)).x]
        title, note = "Shares of trained tokens", "of all so far"
        found.append(Chart(title, note, x=MINUTES, lines=shares, unit=True))
        # Rates that are compared are decades apart.
        found = [msgspec.structs.replace(c, log=c.title == "Learning rate") for c in found]
        return [chart for chart in found if chart.lines]

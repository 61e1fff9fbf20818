"""``report.html``: one file with the figures, plots and samples of a run; opens anywhere, loads nothing."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TypeVar

from areal_lora.obs import svg
from areal_lora.obs.console import duration, number
from areal_lora.obs.metrics import PublishRecord, RolloutSampleRecord, RunMetrics, StepRecord, read_metrics
from areal_lora.obs.summary import largest, read_config

R = TypeVar("R", StepRecord, PublishRecord)

REPORT_FILE = "report.html"
SAMPLES_SHOWN = 4
"""Early and late sample rollouts shown, each."""

PAGE_STYLE = """
* { box-sizing: border-box; } html { color-scheme: light dark; }
body { margin: 0 auto; max-width: 1180px; padding: 40px 24px 80px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
h1 { font-size: 26px; margin: 0; letter-spacing: -.01em; } h2 { font-size: 18px; margin: 44px 0 14px; }
p.sub { color: var(--soft); margin: 4px 0 26px; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; }
.figure:first-child { grid-column: span 2; }
@media (max-width: 760px) { .figures { grid-template-columns: repeat(2, 1fr); } }
.figure, figure, .sample { border: 1px solid var(--grid); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.figure b { display: block; font-size: 22px; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.figure span { color: var(--soft); font-size: 13px; }
.plots, .samples { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 16px; }
figure { margin: 0; } figure svg { display: block; width: 100%; height: auto; }
figcaption { font-weight: 600; margin-bottom: 4px; } figcaption small { color: var(--soft); font-weight: 400; }
pre { margin: 6px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.5 ui-monospace, monospace; }
.sample + .sample { margin-top: 12px; } h3 { font-size: 15px; margin: 0 0 8px; }
.sample .head { display: flex; gap: 14px; color: var(--soft); font-size: 13px; flex-wrap: wrap; }
.sample .prompt { color: var(--soft); } .good { color: var(--c2); font-weight: 600; }
.bad { color: var(--c1); font-weight: 600; }
details { border: 1px solid var(--grid); border-radius: 10px; padding: 12px 16px; } summary { cursor: pointer; }
"""


def write_report(run_folder: Path | str) -> Path:
    """Write ``report.html`` from what the run folder holds now; also works on a run that is not finished."""
    folder = Path(run_folder)
    metrics = read_metrics(folder)
    config, digest = read_config(folder)
    name = escape(config.run.name)
    subtitle = f"{config.model.path} · seed {config.run.seed} · configuration {digest[:12]}"
    resolved = escape(config.model_dump_json(indent=2))
    plots = "".join(_figure(title, note, chart) for title, note, chart in _plots(metrics))
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><style>{svg.STYLE}{PAGE_STYLE}</style></head><body>
<h1>{name}</h1><p class="sub">{escape(subtitle)}</p>
<div class="figures">{"".join(_headline(label, value) for label, value in _headlines(metrics))}</div>
<h2>The run</h2><div class="plots">{plots}</div>
<h2>Sample rollouts</h2>{_samples(metrics.samples)}
<h2>Configuration</h2><details><summary>As resolved</summary><pre>{resolved}</pre></details>
</body></html>
"""
    target = folder / REPORT_FILE
    temporary = folder / f".{REPORT_FILE}.tmp"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(target)
    return target


def write_plot(run_folder: Path | str, path: Path | str) -> Path:
    """Reward and held-out accuracy of a run as one SVG file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    metrics = read_metrics(run_folder)
    series = [*_reward_series(metrics.steps), _eval_series(metrics, colour=2)]
    chart = svg.line_chart(series, x_label="optimizer step", y_range=_unit_range(series))
    target.write_text(svg.standalone(chart), encoding="utf-8")
    return target


def _headlines(metrics: RunMetrics) -> list[tuple[str, str]]:
    steps, publishes, evals = metrics.steps, metrics.publishes, metrics.evals
    totals = [p.total_ms for p in publishes if p.total_ms is not None]
    speeds = [s.rollout_tokens_per_s for s in steps if s.rollout_tokens_per_s is not None]
    lags = [lag for s in steps for lag, n in s.staleness.items() if n]
    accuracy = " → ".join(f"{e.accuracy:.3f}" for e in (evals[:1] + evals[-1:] if len(evals) > 1 else evals)) or "-"
    return [
        ("held-out greedy accuracy", accuracy),
        ("optimizer steps", str(len(steps))),
        ("wall time", duration(steps[-1].time_s) if steps else "-"),
        ("publish, median", f"{statistics.median(totals):.1f} ms" if totals else "-"),
        ("largest mean probe error, nats", number(largest(p.probe_mean_abs for p in publishes), 2)),
        ("largest staleness, versions", str(max(lags, default="-"))),
        ("rollout, median", f"{svg.label(round(statistics.median(speeds)))} tok/s" if speeds else "-"),
    ]


def _plots(metrics: RunMetrics) -> list[tuple[str, str, str]]:
    """(title, note, chart) in reading order."""
    steps, publishes = metrics.steps, metrics.publishes
    reward, accuracy = _reward_series(steps), _eval_series(metrics)
    staleness: Counter[int] = Counter()
    for record in steps:
        staleness.update(record.staleness)
    bars = [(str(lag), float(n)) for lag, n in sorted(staleness.items())]
    return [
        ("Reward", "mean over the batch of a step",
         svg.line_chart(reward, x_label="optimizer step", y_range=_unit_range(reward))),
        ("Held-out accuracy", "greedy",
         svg.line_chart([accuracy], x_label="optimizer step", y_range=_unit_range([accuracy]))),
        ("Staleness", "trained tokens by versions of lag", svg.bar_chart(bars, x_label="versions behind at training")),
        ("Step time", "seconds by phase",
         svg.stacked_bars([s.step for s in steps], _step_layers(steps), x_label="optimizer step")),
        ("Publish by phase", "ms",
         svg.stacked_bars([p.version for p in publishes], _publish_layers(publishes), x_label="version")),
        ("Publish, total", "ms", svg.line_chart(
            [_over(publishes, "", lambda p: p.total_ms, 1)], x_label="version", floor=0)),
        ("Parity probe", "|logp trainer - logp server|", svg.line_chart(
            [_over(publishes, "largest", lambda p: p.probe_max_abs, 3),
             _over(publishes, "mean", lambda p: p.probe_mean_abs, 0)], x_label="version", log_y=True)),
        ("Rollout speed", "tokens/s, all servers", svg.line_chart(
            [_over(steps, "", lambda s: s.rollout_tokens_per_s, 2)], x_label="optimizer step", floor=0)),
        ("Off-policy gap", "mean |proximal - behaviour| logprob, clipped fraction", svg.line_chart(
            [_over(steps, "behaviour gap", lambda s: s.behaviour_mean_abs, 0),
             _over(steps, "clipped fraction", lambda s: s.clip_fraction, 1)], x_label="optimizer step", floor=0)),
        ("Entropy and gradient norm", "nats; before clipping", svg.line_chart(
            [_over(steps, "entropy", lambda s: s.entropy, 4),
             _over(steps, "gradient norm", lambda s: s.grad_norm, 5)], x_label="optimizer step", floor=0)),
    ]  # fmt: skip


def _over(records: Sequence[R], name: str, read: Callable[[R], float | None], colour: int) -> svg.Series:
    """One value of each record over its step or version; what was not measured is left out."""
    places = [r.version if isinstance(r, PublishRecord) else r.step for r in records]
    points = [(float(x), y) for x, r in zip(places, records) if (y := read(r)) is not None]
    return svg.Series(name=name, points=points, colour=colour)


def _reward_series(steps: Sequence[StepRecord]) -> list[svg.Series]:
    raw = _over(steps, "reward", lambda s: s.reward_mean, 0)
    smooth = svg.moving_mean(raw.points, max(3, len(raw.points) // 12))
    faint = svg.Series(name="reward per step", points=raw.points, faint=True)
    return [faint, svg.Series(name="smoothed", points=smooth)]


def _eval_series(metrics: RunMetrics, colour: int = 2) -> svg.Series:
    points = [(float(e.step), e.accuracy) for e in metrics.evals]
    return svg.Series(name="held-out accuracy", points=points, colour=colour, dots=True)


def _unit_range(series: Sequence[svg.Series]) -> tuple[float, float] | None:
    """0 to 1 where all values lie there, so that runs can be compared by eye."""
    return (0.0, 1.0) if all(0 <= y <= 1 for s in series for _, y in s.points) else None


def _step_layers(steps: Sequence[StepRecord]) -> dict[str, Sequence[float]]:
    named = {
        "wait for batch": [s.wait_batch_s for s in steps],
        "annotate": [s.annotate_s for s in steps],
        "train": [s.train_s for s in steps],
        "wait for publish": [s.publish_join_s for s in steps],
    }
    measured = [sum(parts) for parts in zip(*named.values())]
    return {**named, "other": [max(0.0, s.step_s - known) for s, known in zip(steps, measured)]}


def _publish_layers(publishes: Sequence[PublishRecord]) -> dict[str, Sequence[float]]:
    rows = [p.sequence_ms() for p in publishes]
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def _headline(label: str, value: str) -> str:
    return f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _figure(title: str, note: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(title)} <small>{escape(note)}</small></figcaption>{chart}</figure>"


def _samples(samples: Sequence[RolloutSampleRecord]) -> str:
    if not samples:
        return '<p class="sub">None recorded.</p>'
    early = samples[:SAMPLES_SHOWN]
    late = samples[max(len(early), len(samples) - SAMPLES_SHOWN) :]
    # Early and late side by side: the grid fills row by row.
    columns = [f"<div><h3>{title}</h3>{''.join(map(_sample, group))}</div>"
               for title, group in (("Early", early), ("Late", late)) if group]  # fmt: skip
    return f'<div class="samples">{"".join(columns)}</div>'


def _sample(sample: RolloutSampleRecord) -> str:
    tone = "good" if sample.reward > 0 else "bad"
    versions = ", ".join(f"v{v}" for v in sample.versions)
    head = [f"<span>step {sample.step}</span>", f'<span class="{tone}">reward {sample.reward:g}</span>']
    head += [f"<span>written by {escape(versions)}</span>"] if versions else []
    head += [f"<span>gold {escape(sample.gold)}</span>"] if sample.gold is not None else []
    return (
        f'<div class="sample"><div class="head">{"".join(head)}</div>'
        f'<pre class="prompt">{escape(sample.prompt)}</pre><pre>{escape(sample.completion)}</pre></div>'
    )

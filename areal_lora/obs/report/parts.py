"""Pieces of the report's HTML. What a model, a user or a process wrote is escaped here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape

from areal_lora.obs.console import duration, number
from areal_lora.obs.metrics.records import RolloutSampleRecord
from areal_lora.obs.metrics.writer import cut_middle
from areal_lora.obs.report import svg
from areal_lora.obs.report.figures import Figures
from areal_lora.obs.report.plots import Plot


def figures_of(metrics: Figures) -> str:
    """The figures of one adapter."""
    return figures([*eval_headlines(metrics), *headlines(metrics)])


def figures(pairs: Iterable[tuple[str, str]]) -> str:
    """Boxes with a label and a value each."""
    return f'<div class="figures">{"".join(headline(label, value) for label, value in pairs)}</div>'


def charts(plots: Iterable[Plot]) -> str:
    return f'<div class="plots">{"".join(figure(*plot) for plot in plots)}</div>'


def eval_headlines(metrics: Figures) -> list[tuple[str, str]]:
    evals = metrics.evals
    return [
        ("held-out greedy accuracy", course(e.accuracy for e in evals)),
        ("held-out mean reward", course(e.reward_mean for e in evals)),
        ("held-out answers unscored", f"{evals[-1].unscored} of {evals[-1].n}" if evals else "-"),
        ("held-out prompts left out", str(evals[-1].left_out) if evals else "-"),
    ]


def headlines(metrics: Figures) -> list[tuple[str, str]]:
    last, totals, speeds = metrics.last_step, metrics.publish_ms, metrics.speeds
    return [
        ("optimizer steps", str(metrics.steps)),
        ("wall time", duration(last.time_s) if last else "-"),
        ("publish, median", f"{statistics.median(totals):.1f} ms" if totals else "-"),
        ("largest mean probe error, nats", number(metrics.probe_mean_abs, 2)),
        ("staleness, versions: mean, largest", staleness(metrics)),
        ("rollout, median", f"{svg.label(round(statistics.median(speeds)))} tok/s" if speeds else "-"),
    ]


def client_headlines(metrics: Figures) -> list[tuple[str, str]]:
    """The figures of an adapter that a client drives: what is known of it."""
    last = metrics.last_step
    known = [pair for pair in headlines(metrics) if not pair[0].startswith(("staleness", "rollout"))]
    known += [("loss of the last step", number(last.metrics.get("train/loss") if last else None))]
    return [*known, ("trained tokens", svg.label(metrics.trained_tokens))]


def staleness(metrics: Figures) -> str:
    return "-" if metrics.max_staleness is None else f"{number(metrics.mean_lag, 2)}, {metrics.max_staleness}"


def course(values: Iterable[float | None]) -> str:
    return " → ".join(number(v) for v in values if v is not None) or "-"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{title}</h2><table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{body}</table>"


def headline(label: str, value: str) -> str:
    return f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def figure(title: str, note: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(title)} <small>{escape(note)}</small></figcaption>{chart}</figure>"


def samples(early: Sequence[RolloutSampleRecord], late: Sequence[RolloutSampleRecord]) -> str:
    if not early:
        return '<p class="sub">None recorded.</p>'
    # Early and late side by side: the grid fills row by row.
    columns = [
        f"<div><h3>{title}</h3>{''.join(map(_sample, group))}</div>"
        for title, group in (("Early", early), ("Late", late))
        if group
    ]
    return f'<div class="samples">{"".join(columns)}</div>'


def _sample(sample: RolloutSampleRecord) -> str:
    tone = "good" if sample.reward > 0 else "bad"
    versions = ", ".join(f"v{v}" for v in sample.versions)
    head = [f"<span>step {sample.step}</span>", f'<span class="{tone}">reward {sample.reward:g}</span>']
    head += [f"<span>written by {escape(versions)}</span>"] if versions else []
    head += [f"<span>gold {escape(sample.gold)}</span>"] if sample.gold is not None else []
    return (
        f'<div class="sample"><div class="head">{"".join(head)}</div>'
        f'<pre class="prompt">{escape(cut_middle(sample.prompt))}</pre>'
        f"<pre>{escape(cut_middle(sample.completion))}</pre></div>"
    )

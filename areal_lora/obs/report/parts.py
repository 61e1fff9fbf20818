"""Pieces of the report's HTML, and the parts of a run with several adapters: the overview, and a section of each.

What a model, a user or a process wrote is escaped here.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from areal_lora.config.recorded import AdapterRun
from areal_lora.obs.console import duration, eval_text, number, percent
from areal_lora.obs.metrics.records import RolloutSampleRecord
from areal_lora.obs.metrics.writer import cut_middle
from areal_lora.obs.report import svg
from areal_lora.obs.report.plots import Plot, Plots, RunPlots
from areal_lora.obs.report.summary import Figures, RunFigures
from areal_lora.obs.run_view import newest_state
from areal_lora.run_folder.paths import RunFolder


def overview(folder: RunFolder, runs: Mapping[str, AdapterRun], found: RunFigures, plots: RunPlots) -> str:
    """The run's figures, a row per adapter, and what shows them together."""
    states = Counter(str(_state(run, found.adapters[name])) for name, run in runs.items())
    counted = ", ".join(f"{n} {state}" for state, n in states.items())
    rows = [_row(folder, name, run, found) for name, run in runs.items()]
    together = plots.together(name for name, run in runs.items() if not run.endless)
    total = [(f"adapters: {counted}", str(len(runs)))]
    total += [pair for pair in headlines(found.total) if not pair[0].startswith("held-out")]
    return f"{boxes(total)}{table('Adapters', rows)}<h2>The run</h2>{charts(together)}"


def sections(runs: Mapping[str, AdapterRun], found: RunFigures, plots: RunPlots) -> str:
    """A section per adapter: its state with the reason, its figures, plots and samples."""
    return "".join(_section(name, run, found.adapters[name], plots.adapters[name]) for name, run in runs.items())


def _section(name: str, run: AdapterRun, its: Figures, plots: Plots) -> str:
    why = f": {its.recorded.reason}" if its.recorded and its.recorded.reason else ""
    about = f"{_state(run, its)} after {_made(run, its)} steps{why} · seed {run.seed} · weight {run.weight:g} · "
    about += "driven by a client" if run.endless else f"staleness up to {run.max_staleness}"
    shown = f"<summary>{len(its.early) + len(its.late)} sample rollouts</summary>{samples(its.early, list(its.late))}"
    return (
        f'<section id="adapter-{escape(name)}"><h2>{escape(name)}</h2><p class="sub">{escape(about)}</p>'
        f"{boxes(headlines(its))}<h3>Plots</h3>{charts(plots.draw())}"
        f"{'' if run.endless else f'<details>{shown}</details>'}</section>"
    )


def _made(run: AdapterRun, its: Figures) -> str:
    return f"{its.steps}" if run.endless else f"{its.steps} of {run.steps}"


def _row(folder: RunFolder, name: str, run: AdapterRun, found: RunFigures) -> dict[str, str]:
    its, export = found.adapters[name], folder.adapter_export(name)
    return {
        "adapter": name,
        "state": str(_state(run, its)),
        "steps": _made(run, its),
        "weight": f"{run.weight:g}",
        "trained tokens": percent(found.share(name)),
        "accuracy": course(e.accuracy for e in its.evals),
        "best": eval_text(its.best_eval),
        "mean reward": course(e.reward_mean for e in its.evals),
        "staleness: mean, largest": staleness(its),
        "folder": str(export.relative_to(folder.path)) if export.is_dir() else "-",
        "why": (its.recorded.reason if its.recorded else "") or "-",
    }


def _state(run: AdapterRun, its: Figures) -> str:
    return newest_state(its.recorded, its.steps, run.end)


def boxes(pairs: Iterable[tuple[str, str]]) -> str:
    """Boxes with a label and a value each."""
    found = [f'<div class="figure"><b>{escape(v)}</b><span>{escape(label)}</span></div>' for label, v in pairs]
    return f'<div class="figures">{"".join(found)}</div>'


def charts(plots: Sequence[Plot]) -> str:
    if not plots:
        return '<p class="sub">Nothing recorded.</p>'
    figures = [
        f"<figure><figcaption>{escape(title)} <small>{escape(note)}</small></figcaption>{chart}</figure>"
        for title, note, chart in plots
    ]
    return f'<div class="plots">{"".join(figures)}</div>'


def headlines(metrics: Figures) -> list[tuple[str, str]]:
    """The figures of a run or of one adapter, evaluations first; what was not measured is left out."""
    last, totals, speeds, evals = metrics.last_step, metrics.publish_ms, metrics.speeds, metrics.evals
    pairs = [
        ("held-out greedy accuracy", course(e.accuracy for e in evals)),
        ("held-out mean reward", course(e.reward_mean for e in evals)),
        ("held-out answers unscored", f"{evals[-1].unscored} of {evals[-1].n}" if evals else "-"),
        ("held-out prompts left out", str(evals[-1].left_out) if evals else "-"),
        ("optimizer steps", str(metrics.steps)),
        ("trained tokens", svg.label(metrics.trained_tokens)),
        ("loss of the last step", number(last.metrics.get("train/loss") if last else None)),
        ("wall time", duration(last.time_s) if last else "-"),
        ("publish, median", f"{statistics.median(totals):.1f} ms" if totals else "-"),
        ("largest mean probe error, nats", number(metrics.probe_mean_abs, 2)),
        ("staleness, versions: mean, largest", staleness(metrics)),
        ("rollout, median", f"{svg.label(round(statistics.median(speeds)))} tok/s" if speeds else "-"),
    ]
    return [(label, value) for label, value in pairs if value != "-"]


def staleness(metrics: Figures) -> str:
    return "-" if metrics.max_staleness is None else f"{number(metrics.mean_lag, 2)}, {metrics.max_staleness}"


def course(values: Iterable[float | None]) -> str:
    return " → ".join(number(v) for v in values if v is not None) or "-"


def table(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of cells by the heads of their columns; nothing without rows."""
    if not rows:
        return ""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row.values()) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{title}</h2><table><tr>{''.join(f'<th>{name}</th>' for name in rows[0])}</tr>{body}</table>"


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

"""Write ``report.html``: figures, plots and samples of a run in one file without external resources."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from areal_lora.config.recorded import config_digest, read_config
from areal_lora.obs.console import duration, number
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import RolloutSampleRecord
from areal_lora.obs.metrics.samples import cut_middle
from areal_lora.obs.report import svg
from areal_lora.obs.report.figures import Figures
from areal_lora.obs.report.plots import Plots
from areal_lora.run_folder.events import RestartEvent, StallEvent, read_events
from areal_lora.run_folder.paths import RunFolder

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
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { color: var(--soft); font-weight: 400; font-size: 13px; }
details { border: 1px solid var(--grid); border-radius: 10px; padding: 12px 16px; } summary { cursor: pointer; }
"""


def write_report(run_folder: RunFolder | Path | str) -> Path:
    """Write ``report.html`` from the current run folder; the run need not be finished."""
    folder = RunFolder.of(run_folder)
    config, digest = read_config(folder), config_digest(folder)
    metrics, plots = Figures(), Plots()
    for record in iter_metrics(folder):
        metrics.add(record)
        plots.add(record)
    name = escape(config.run.name)
    subtitle = f"{config.model.path} · seed {config.run.seed} · configuration {digest[:12]}"
    resolved = escape(config.model_dump_json(indent=2))
    figures = "".join(_figure(*plot) for plot in plots.all())
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><style>{svg.STYLE}{PAGE_STYLE}</style></head><body>
<h1>{name}</h1><p class="sub">{escape(subtitle)}</p>
<div class="figures">{"".join(_headline(label, value) for label, value in _headlines(metrics))}</div>
<h2>The run</h2><div class="plots">{figures}</div>
{_counts(metrics)}{_resumes(metrics)}{_restarts(folder)}
<h2>Sample rollouts</h2>{_samples(metrics.early, list(metrics.late))}
<h2>Configuration</h2><details><summary>As resolved</summary><pre>{resolved}</pre></details>
</body></html>
"""
    target = folder.report
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(target)
    return target


def write_plot(run_folder: RunFolder | Path | str, path: Path | str) -> Path:
    """Draw reward and held-out accuracy of a run as one SVG file."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    plots = Plots()
    for record in iter_metrics(run_folder):
        plots.add(record)
    target.write_text(svg.standalone(plots.reward_and_accuracy()), encoding="utf-8")
    return target


def _headlines(metrics: Figures) -> list[tuple[str, str]]:
    last, totals, speeds, evals = metrics.last_step, metrics.publish_ms, metrics.speeds, metrics.evals
    return [
        ("held-out greedy accuracy", _course(e.accuracy for e in evals)),
        ("held-out mean reward", _course(e.reward_mean for e in evals)),
        ("held-out answers unscored", f"{evals[-1].unscored} of {evals[-1].n}" if evals else "-"),
        ("held-out prompts left out", str(evals[-1].left_out) if evals else "-"),
        ("optimizer steps", str(metrics.steps)),
        ("wall time", duration(last.time_s) if last else "-"),
        ("publish, median", f"{statistics.median(totals):.1f} ms" if totals else "-"),
        ("largest mean probe error, nats", number(metrics.probe_mean_abs, 2)),
        ("staleness, versions: mean, largest", _staleness(metrics)),
        ("rollout, median", f"{svg.label(round(statistics.median(speeds)))} tok/s" if speeds else "-"),
    ]


def _staleness(metrics: Figures) -> str:
    return "-" if metrics.max_staleness is None else f"{number(metrics.mean_lag, 2)}, {metrics.max_staleness}"


def _course(values: Iterable[float | None]) -> str:
    return " → ".join(number(v) for v in values if v is not None) or "-"


def _counts(metrics: Figures) -> str:
    """Outcomes of the groups of each adapter, from the adapter's last step."""
    sizes, rows = metrics.checkpoint_bytes, []
    for name, step in metrics.last_by_adapter.items():
        rows.append(
            (
                name or "-",
                str(step.groups_issued),
                str(step.groups_consumed),
                _listed(step.dropped),
                _listed(step.retried),
                str(step.reissued),
                str(step.late),
                f"{sizes[name] / 2**20:.1f} MiB" if name in sizes else "-",
                str(metrics.checkpoints_failed[name]),
            )
        )
    head = (
        "adapter",
        "issued",
        "consumed",
        "dropped",
        "retried",
        "re-issued",
        "late duplicates",
        "checkpoint",
        "checkpoints failed",
    )
    return _table("Groups and checkpoints", head, rows)


def _resumes(metrics: Figures) -> str:
    rows = [(resume.adapter or "-", f"v{resume.version}", duration(resume.time_s)) for resume in metrics.resumes]
    return _table("Resumed from a checkpoint", ("adapter", "version", "after"), rows)


def _restarts(folder: RunFolder) -> str:
    rows = []
    for event in read_events(folder):
        match event:
            case RestartEvent():
                rows.append((event.at, event.who, event.how))
            case StallEvent():
                rows.append((event.at, event.who, f"sent no heartbeat; stacks in {event.stacks}"))
    return _table("Restarts", ("at", "process", "because it"), rows)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "0"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{title}</h2><table><tr>{''.join(f'<th>{name}</th>' for name in head)}</tr>{body}</table>"


def _headline(label: str, value: str) -> str:
    return f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _figure(title: str, note: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(title)} <small>{escape(note)}</small></figcaption>{chart}</figure>"


def _samples(early: Sequence[RolloutSampleRecord], late: Sequence[RolloutSampleRecord]) -> str:
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

"""Write ``report.html``: figures, plots and samples of a run in one file without external resources.

What a model, a user or a process wrote is escaped here.
"""

import json
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from rich.console import Console

from areal_lora.config.load import examples
from areal_lora.config.models import Config
from areal_lora.config.recorded import AdapterRun, adapter_runs, config_digest, more_steps, read_config, with_joined
from areal_lora.obs.console import duration, eval_text, number, percent
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import RolloutSampleRecord, StepRecord
from areal_lora.obs.metrics.writer import cut_middle
from areal_lora.obs.report.plots import STYLE, Plot, Plots, RunPlots, label
from areal_lora.obs.report.summary import AdapterSummary, Figures, RunFigures, read_summary
from areal_lora.obs.run_view import newest_state
from areal_lora.run_folder import events
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase

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
    page = report_page(folder, lambda config: config.model_dump_json(indent=2))
    write_file(folder.report, page)
    return folder.report


def report_page(folder: RunFolder, shown: Callable[[Config], str]) -> str:
    """The text of the page, with the configuration as ``shown``."""
    config, digest = with_joined(read_config(folder), folder), config_digest(folder)
    runs = adapter_runs(config)
    found, plots = RunFigures(list(runs)), RunPlots(list(runs))
    for record in iter_metrics(folder):
        found.add(record)
        plots.add(record)
    name = escape(config.run.name)
    subtitle = f"{config.model.path} · seed {config.run.seed} · configuration {digest[:12]}"
    total = found.total
    several = len(runs) != 1 or any(run.endless for run in runs.values())
    if several:
        run, rollouts = overview(folder, runs, found, plots), sections(runs, found, plots)
    else:
        drawn = charts(next(iter(plots.adapters.values())).draw())
        run = f"{boxes(headlines(total))}\n<h2>The run</h2>{drawn}"
        rollouts = f"<h2>Sample rollouts</h2>{samples(total.early, list(total.late))}"
    end = events.last_end(folder)
    failure = f'\n<p class="sub"><b>Ended with exit code {end.code}: {escape(str(end))}</b></p>' if end else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><style>{STYLE}{PAGE_STYLE}</style></head><body>
<h1>{name}</h1><p class="sub">{escape(subtitle)}</p>{failure}
{run}
{_evals(total, several)}{_counts(total)}{_resumes(total)}{_restarts(folder)}
{rollouts}
<h2>Configuration</h2><details><summary>As resolved</summary><pre>{escape(shown(config))}</pre></details>
</body></html>
"""


def _evals(metrics: Figures, several: bool) -> str:
    """The last evaluation of each set."""
    lasts = sorted((records[-1] for records in metrics.sets.values()), key=lambda last: (last.adapter, last.order))
    rows = [
        ({"adapter": last.adapter} if several else {})
        | {
            "set": last.name,
            "version": f"v{last.version}",
            "problems x answers": f"{last.n} x {last.n_samples}",
            "temperature": f"{last.temperature:g}",
            **{figure: number(value) for figure, value in last.scalars().items()},
            "accuracy, 95 %": _range(last.accuracy_95) + (f" ({last.interval})" if last.interval else ""),
            "reward, 95 %": _range(last.reward_95),
            "left out": str(last.left_out),
        }
        for last in lasts
    ]
    return table("Evaluations, the last of each set", rows)


def _range(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{number(ends[0])} to {number(ends[1])}"


def _counts(metrics: Figures) -> str:
    """Outcomes of the groups of each adapter, from the adapter's last step; a client's has none."""
    rows = []
    for name, step in metrics.last_by_adapter.items():
        groups = {
            "issued": _metric(step, "groups_issued"),
            "consumed": _metric(step, "groups_consumed"),
            "dropped": _listed(step.dropped),
            "retried": _listed(step.retried),
            "re-issued": _metric(step, "reissued"),
            "late duplicates": _metric(step, "late"),
            "last faults": step.faults_text or "-",
        }
        size = metrics.checkpoint_bytes.get(name)
        written = {"checkpoint": "-" if size is None else f"{size / 2**20:.1f} MiB"}
        written["checkpoints failed"] = str(metrics.checkpoints_failed[name])
        rows.append({"adapter": name or "-"} | (dict.fromkeys(groups, "-") if step.by_client else groups) | written)
    return table("Groups and checkpoints", rows)


def _metric(step: StepRecord, name: str) -> str:
    return f"{step.metrics.get(f'train/{name}') or 0:.0f}"


def _resumes(metrics: Figures) -> str:
    rows = [
        {"adapter": r.adapter or "-", "version": f"v{r.version}", "after": duration(r.time_s)} for r in metrics.resumes
    ]
    return table("Resumed from a checkpoint", rows)


def _restarts(folder: RunFolder) -> str:
    rows = []
    for event in events.read_events(folder):
        match event:
            case events.RestartEvent(process=process, how=why):
                pass
            case events.StallEvent(process=process, stacks=stacks):
                why = f"sent no heartbeat; stacks in {stacks}"
            case events.AbandonEvent(process=process, how=how):
                why = f"{how}; the run continues without it"
            case events.RequeueEvent(job=job, why=reason):
                process, why = f"Slurm job {job}", f"requeued: {reason}"
            case events.EndEvent(process=process, code=code):
                why = f"{event}; the run ended with exit code {code}"
            case _:
                continue
        rows.append({"at": event.at, "process": process, "because it": why})
    return table("Restarts and failures", rows)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "0"


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
    """The figures of a run or of one adapter, evaluations first, without those that were not measured."""
    last, totals, speeds, evals = metrics.last_step, metrics.publish_ms, metrics.speeds, metrics.evals
    pairs = [
        ("held-out greedy accuracy", course(e.accuracy for e in evals)),
        ("held-out mean reward", course(e.reward_mean for e in evals)),
        ("held-out answers unscored", f"{evals[-1].unscored} of {evals[-1].n}" if evals else "-"),
        ("held-out prompts left out", str(evals[-1].left_out) if evals else "-"),
        ("optimizer steps", str(metrics.steps)),
        ("trained tokens", label(metrics.trained_tokens)),
        ("loss of the last step", number(last.metrics.get("train/loss") if last else None)),
        ("wall time", duration(last.time_s) if last else "-"),
        ("publish, median", f"{statistics.median(totals):.1f} ms" if totals else "-"),
        ("largest mean probe error, nats", number(metrics.probe_mean_abs, 2)),
        ("staleness, versions: mean, largest", staleness(metrics)),
        ("rollout, median", f"{label(round(statistics.median(speeds)))} tok/s" if speeds else "-"),
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
    heads = dict.fromkeys(head for row in rows for head in row)
    lines = ["".join(f"<td>{escape(row.get(head, '-'))}</td>" for head in heads) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<h2>{title}</h2><table><tr>{''.join(f'<th>{name}</th>' for name in heads)}</tr>{body}</table>"


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


EVALUATE = examples() / "math" / "evaluate.py"


def print_closing(run_folder: RunFolder, console: Console) -> None:
    """Print the closing lines: result, a line per adapter, report, how to talk to it, how to continue."""
    for line in closing_lines(run_folder):
        # Wrapped or coloured lines cannot be copied or parsed.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def closing_lines(run_folder: RunFolder) -> list[str]:
    """Commands run as pasted, from any folder and without an activated environment."""
    summary, config = read_summary(run_folder), with_joined(read_config(run_folder), run_folder)
    areal_lora, run = f"{shlex.quote(sys.executable)} -m areal_lora", shlex.quote(str(run_folder))
    parts = summary.adapters
    # The first adapter of those with most steps that have not failed; of all, where all have.
    most_trained = max(parts, key=lambda n: (parts[n].state is not AdapterPhase.FAILED, parts[n].steps), default="")
    chosen = f" --adapter {shlex.quote(most_trained)}" if parts else ""
    made = {adapter.name: summary.steps_of(adapter.name) for adapter in config.adapters}
    unfinished = any(part.steps < (part.steps_wanted or 0) for part in parts.values())
    again = shlex.join([str(run_folder), *([] if unfinished else more_steps(config, made))])
    adapters = [f"{name}: {_adapter_result(part)}" for name, part in parts.items()] or [
        summary.adapter_path or "not exported"
    ]
    many = f" of {len(parts)} adapters" if parts else ""
    failed = sum(part.state is AdapterPhase.FAILED for part in parts.values())
    result = [f"{summary.steps} steps{many} in {duration(summary.wall_s)}", *([f"{failed} failed"] if failed else [])]
    result += _courses(summary.eval_before, summary.eval_after, summary.eval_reward_before, summary.eval_reward_after)
    return [
        f"result   {', '.join(result)}",
        *(f"adapter  {text}" for text in adapters),
        f"report   {summary.report_path}",
        *([f"profile  {run_folder.profile}"] if run_folder.profile.is_dir() else []),
        f"chat     {areal_lora} chat {run}{chosen}",
        f"resume   {areal_lora} resume {again}",
    ]


def _adapter_result(part: AdapterSummary) -> str:
    """``8 steps, accuracy 0.250 -> 0.500, best 0.550 (v6), 40% of the trained tokens, in FOLDER``; why at the end."""
    ended = f"{part.state} after " if part.state is not AdapterPhase.DONE else ""
    text = [f"{ended}{part.steps} steps"]
    text += _courses(part.eval_first, part.eval_last, part.eval_reward_first, part.eval_reward_last)
    best, *known = part.eval_best, part.eval_first, part.eval_last
    if best is None:
        best, *known = part.eval_reward_best, part.eval_reward_first, part.eval_reward_last
    text += [f"best {number(best)} (v{part.best_version})"] if best not in known else []
    text += [f"{percent(part.share)} of the trained tokens", f"in {part.path}" if part.path else "not exported"]
    return ", ".join(text) + (f": {part.reason}" if part.reason else "")


def _courses(
    before: float | None, after: float | None, reward_before: float | None, reward_after: float | None
) -> list[str]:
    """``accuracy 0.250 -> 0.500``, ``mean reward 0.300``; nothing for what was not measured."""
    figures = (("accuracy", before, after), ("mean reward", reward_before, reward_after))
    return [
        f"{name} {number(first)}" + ("" if last is None else f" -> {number(last)}")
        for name, first, last in figures
        if first is not None
    ]


def detail_lines(run_folder: RunFolder) -> list[str]:
    """What else can be done with a finished run, and all its figures as ``key: JSON value``."""
    summary = read_summary(run_folder)
    config = with_joined(read_config(run_folder), run_folder)
    model, trainer = config.model.folder, shlex.quote(config.trainer.python or sys.executable)
    areal_lora, run = f"{shlex.quote(sys.executable)} -m areal_lora", shlex.quote(str(run_folder))
    parts = {f" --adapter {shlex.quote(name)}": part.path for name, part in summary.adapters.items()}
    exported = [(option, path) for option, path in (parts or {"": summary.adapter_path}).items() if path is not None]
    lines = [
        f"metrics      {run_folder.metrics}",
        f"TensorBoard  {trainer} -m tensorboard.main --logdir {shlex.quote(str(run_folder.tensorboard))}",
        *(f"serve        {areal_lora} serve {run}{option}" for option, _ in exported),
        *(f"evaluate     {trainer} {shlex.quote(str(EVALUATE))} {run}{option}" for option, _ in exported),
        "",
        f"Load it with stock peft, in {trainer}:",
        # Not indented: Python rejects pasted lines with indentation.
        "from peft import PeftModel; from transformers import AutoModelForCausalLM",
        *(
            f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({model!r}), {path!r})"
            for _, path in exported
        ),
        "",
    ]
    return lines + [f"{key}: {json.dumps(value)}" for key, value in summary.values().items()]

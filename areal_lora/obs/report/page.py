"""Write ``report.html``: figures, plots and samples of a run in one file without external resources."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path

from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_runs, config_digest, more_steps, read_config, with_joined
from areal_lora.config.sources import examples
from areal_lora.obs.console import duration, number, percent
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.report import svg
from areal_lora.obs.report.adapters import RunPlots, overview, sections
from areal_lora.obs.report.figures import Figures, RunFigures
from areal_lora.obs.report.parts import charts, figures_of, samples, table
from areal_lora.obs.report.plots import Plots
from areal_lora.obs.report.summary import AdapterSummary, Summary, read_summary
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.events import (
    AbandonEvent,
    EndEvent,
    RequeueEvent,
    RestartEvent,
    StallEvent,
    last_end,
    read_events,
)
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
    resolved = escape(shown(config))
    total = found.total
    several = len(runs) != 1 or any(run.endless for run in runs.values())
    end = last_end(folder)
    failure = f'\n<p class="sub"><b>Ended with exit code {end.code}: {escape(str(end))}</b></p>' if end else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><style>{svg.STYLE}{PAGE_STYLE}</style></head><body>
<h1>{name}</h1><p class="sub">{escape(subtitle)}</p>{failure}
{overview(folder, runs, found, plots) if several else _one(total, plots)}
{_evals(total, several)}{_counts(total)}{_resumes(total)}{_restarts(folder)}
{sections(runs, found, plots) if several else _sample_rollouts(total)}
<h2>Configuration</h2><details><summary>As resolved</summary><pre>{resolved}</pre></details>
</body></html>
"""


def _one(figures: Figures, plots: RunPlots) -> str:
    """The figures and plots of a run with one adapter."""
    [its_own] = plots.adapters.values()
    return f"{figures_of(figures)}\n<h2>The run</h2>{charts(its_own.all())}"


def _sample_rollouts(figures: Figures) -> str:
    return f"<h2>Sample rollouts</h2>{samples(figures.early, list(figures.late))}"


def write_plot(run_folder: RunFolder | Path | str, path: Path | str, adapter: str | None = None) -> Path:
    """Draw reward and held-out accuracy of an adapter as one SVG file; a run with one needs no name of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    plots = Plots()
    for record in iter_metrics(run_folder):
        if adapter in (None, record.adapter):
            plots.add(record)
    target.write_text(svg.standalone(plots.reward_and_accuracy()), encoding="utf-8")
    return target


def _evals(metrics: Figures, several: bool) -> str:
    """The last evaluation of each set."""
    ordered = sorted(metrics.sets.values(), key=lambda records: (records[-1].adapter, records[-1].order))
    head: tuple[str, ...] = (
        "set",
        "version",
        "problems x answers",
        "temperature",
        "accuracy",
        "95 %",
        "mean reward",
        "95 %",
        "pass@k",
        "majority",
        "tokens",
        "truncated",
        "unscored",
        "left out",
    )
    rows: list[tuple[str, ...]] = [
        (
            last.name,
            f"v{last.version}",
            f"{last.n} x {last.n_samples}",
            f"{last.temperature:g}",
            number(last.accuracy),
            _range(last.accuracy_95) + (f" ({last.interval})" if last.interval else ""),
            number(last.reward_mean),
            _range(last.reward_95),
            "  ".join(f"@{k} {number(value)}" for k, value in last.pass_at.items()) or "-",
            number(last.majority),
            number(last.answer_tokens, 1),
            number(last.truncated),
            str(last.unscored),
            str(last.left_out),
        )
        for *_, last in ordered
    ]
    if several:
        head, rows = ("adapter", *head), [(last.adapter, *row) for (*_, last), row in zip(ordered, rows, strict=True)]
    return table("Evaluations, the last of each set", head, rows)


def _range(ends: tuple[float, float] | None) -> str:
    return "-" if ends is None else f"{number(ends[0])} to {number(ends[1])}"


def _counts(metrics: Figures) -> str:
    """Outcomes of the groups of each adapter, from the adapter's last step."""
    sizes, rows = metrics.checkpoint_bytes, []
    for name, step in metrics.last_by_adapter.items():
        names = ("groups_issued", "groups_consumed", "reissued", "late")
        issued, consumed, reissued, late = (f"{step.metrics.get(f'train/{n}') or 0:.0f}" for n in names)
        groups = [issued, consumed, _listed(step.dropped), _listed(step.retried), reissued, late]
        groups += [step.faults_text or "-"]
        rows.append(
            (
                name or "-",
                *(["-"] * len(groups) if step.by_client else groups),
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
        "last faults",
        "checkpoint",
        "checkpoints failed",
    )
    return table("Groups and checkpoints", head, rows)


def _resumes(metrics: Figures) -> str:
    rows = [(resume.adapter or "-", f"v{resume.version}", duration(resume.time_s)) for resume in metrics.resumes]
    return table("Resumed from a checkpoint", ("adapter", "version", "after"), rows)


def _restarts(folder: RunFolder) -> str:
    rows = []
    for event in read_events(folder):
        match event:
            case RestartEvent():
                rows.append((event.at, event.process, event.how))
            case StallEvent():
                rows.append((event.at, event.process, f"sent no heartbeat; stacks in {event.stacks}"))
            case AbandonEvent():
                rows.append((event.at, event.process, f"{event.how}; the run continues without it"))
            case RequeueEvent():
                rows.append((event.at, f"Slurm job {event.job}", f"requeued: {event.why}"))
            case EndEvent():
                rows.append((event.at, event.process, f"{event}; the run ended with exit code {event.code}"))
    return table("Restarts and failures", ("at", "process", "because it"), rows)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items())) or "0"


EVALUATE = examples() / "math" / "evaluate.py"


def print_closing(run_folder: RunFolder, console: Console) -> None:
    """Print the closing lines: result, a line per adapter, report, how to talk to it, how to continue."""
    for line in closing_lines(run_folder):
        # Wrapped or coloured lines cannot be copied or parsed.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def closing_lines(run_folder: RunFolder) -> list[str]:
    """Commands run as pasted, from any folder and without an activated environment."""
    summary, config = read_summary(run_folder), with_joined(read_config(run_folder), run_folder)
    areal_lora, run = f"{_python(None)} -m areal_lora", shlex.quote(str(run_folder))
    parts = summary.adapters
    chosen = f" --adapter {shlex.quote(_most_trained(parts))}" if parts else ""
    made = {adapter.name: summary.steps_of(adapter.name) for adapter in config.adapters}
    unfinished = any(part.steps < (part.steps_wanted or 0) for part in parts.values())
    again = shlex.join([str(run_folder), *([] if unfinished else more_steps(config, made))])
    adapters = [f"{name}: {_adapter_result(part)}" for name, part in parts.items()] or [
        summary.adapter_path or "not exported"
    ]
    return [
        f"result   {_result(summary)}",
        *(f"adapter  {text}" for text in adapters),
        f"report   {summary.report_path}",
        f"chat     {areal_lora} chat {run}{chosen}",
        f"resume   {areal_lora} resume {again}",
    ]


def _most_trained(parts: Mapping[str, AdapterSummary]) -> str:
    """The first adapter of those with most steps that have not failed; of all, where all have."""
    return max(parts, key=lambda name: (parts[name].state is not AdapterPhase.FAILED, parts[name].steps))


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


def _result(summary: Summary) -> str:
    many = f" of {len(summary.adapters)} adapters" if summary.adapters else ""
    failed = sum(part.state is AdapterPhase.FAILED for part in summary.adapters.values())
    parts = [f"{summary.steps} steps{many} in {duration(summary.wall_s)}", *([f"{failed} failed"] if failed else [])]
    parts += _courses(summary.eval_before, summary.eval_after, summary.eval_reward_before, summary.eval_reward_after)
    return ", ".join(parts)


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
    model, trainer = config.model.folder, _python(config.trainer.python)
    areal_lora, run = f"{_python(None)} -m areal_lora", shlex.quote(str(run_folder))
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


def _python(role: str | None) -> str:
    """The interpreter of a role, quoted for a shell."""
    return shlex.quote(role or sys.executable)

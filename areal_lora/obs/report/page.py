"""Write ``report.html``: figures, plots and samples of a run in one file without external resources."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

from rich.console import Console

from areal_lora.config.load import examples
from areal_lora.config.models import Config
from areal_lora.config.recorded import adapter_runs, config_digest, more_steps, read_config, with_joined
from areal_lora.obs.console import duration, number, percent
from areal_lora.obs.metrics.reader import iter_metrics
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.report import svg
from areal_lora.obs.report.parts import RunPlots, charts, figures_of, overview, samples, sections, table
from areal_lora.obs.report.summary import AdapterSummary, Figures, RunFigures, read_summary
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
    resolved = escape(shown(config))
    total = found.total
    several = len(runs) != 1 or any(run.endless for run in runs.values())
    one = "" if several else f"{figures_of(total)}\n<h2>The run</h2>{charts(next(iter(plots.adapters.values())).all())}"
    rollouts = f"<h2>Sample rollouts</h2>{samples(total.early, list(total.late))}"
    end = events.last_end(folder)
    failure = f'\n<p class="sub"><b>Ended with exit code {end.code}: {escape(str(end))}</b></p>' if end else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title><style>{svg.STYLE}{PAGE_STYLE}</style></head><body>
<h1>{name}</h1><p class="sub">{escape(subtitle)}</p>{failure}
{overview(folder, runs, found, plots) if several else one}
{_evals(total, several)}{_counts(total)}{_resumes(total)}{_restarts(folder)}
{sections(runs, found, plots) if several else rollouts}
<h2>Configuration</h2><details><summary>As resolved</summary><pre>{resolved}</pre></details>
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
            "accuracy": number(last.accuracy),
            "its 95 %": _range(last.accuracy_95) + (f" ({last.interval})" if last.interval else ""),
            "mean reward": number(last.reward_mean),
            "95 %": _range(last.reward_95),
            "pass@k": "  ".join(f"@{k} {number(value)}" for k, value in last.pass_at.items()) or "-",
            "majority": number(last.majority),
            "tokens": number(last.answer_tokens, 1),
            "truncated": number(last.truncated),
            "unscored": str(last.unscored),
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

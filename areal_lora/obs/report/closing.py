"""Closing lines of a run on the console: its result, and the commands to talk to it and to continue."""

import json
import shlex
import sys

from rich.console import Console

from areal_lora.config.load import examples
from areal_lora.config.recorded import more_steps, read_config, with_joined
from areal_lora.errors import ArealLoraError
from areal_lora.obs.console import duration, number, percent, print_line
from areal_lora.obs.report.page import write_report
from areal_lora.obs.report.summary import AdapterSummary, read_summary
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterPhase

EVALUATE = examples() / "math" / "evaluate.py"


def print_closing(run_folder: RunFolder, console: Console) -> None:
    """Print the closing lines: result, a line per adapter, report, how to talk to it, how to continue."""
    for line in closing_lines(run_folder):
        # Wrapped or coloured lines cannot be copied or parsed.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def print_report(run_folder: RunFolder, console: Console) -> None:
    """Write the report of a run that ended before its last step and print its path, or why there is none."""
    try:
        line = str(write_report(run_folder))
    except (ArealLoraError, OSError) as error:
        line = f"not written: {error}"
    print_line(console, f"report   {line}")


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
    result += _course("accuracy", summary.eval_before, summary.eval_after)
    result += _course("mean reward", summary.eval_reward_before, summary.eval_reward_after)
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
    text = [f"{ended}{part.steps} steps", *_course("accuracy", part.eval_first, part.eval_last)]
    text += _course("mean reward", part.eval_reward_first, part.eval_reward_last)
    best, *known = part.eval_best, part.eval_first, part.eval_last
    if best is None:
        best, *known = part.eval_reward_best, part.eval_reward_first, part.eval_reward_last
    text += [f"best {number(best)} (v{part.best_version})"] if best not in known else []
    text += [f"{percent(part.share)} of the trained tokens", f"in {part.path}" if part.path else "not exported"]
    return ", ".join(text) + (f": {part.reason}" if part.reason else "")


def _course(name: str, first: float | None, last: float | None) -> list[str]:
    """``accuracy 0.250 -> 0.500``, ``mean reward 0.300``; nothing for what was not measured."""
    return [] if first is None else [f"{name} {number(first)}" + ("" if last is None else f" -> {number(last)}")]


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

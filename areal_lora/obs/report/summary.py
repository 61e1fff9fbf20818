"""End a run: write ``summary.json`` and print the closing lines (paths, commands, figures)."""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console

from areal_lora.config.models import Config
from areal_lora.config.recorded import config_digest, read_config
from areal_lora.obs.report.figures import read_figures
from areal_lora.run_folder.events import count_restarts
from areal_lora.run_folder.paths import RunFolder

SERVE_PORT = 8000
EVALUATE = Path(__file__).resolve().parents[3] / "examples" / "math" / "evaluate.py"
"""Exists only in a checkout of the repository."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a run. None: not measured.

    ``eval_before`` and ``eval_after`` are greedy accuracies of the first and last evaluation; None if there was only
    one, or the task has no rule for correctness. ``eval_reward_*`` are the mean rewards of both.
    ``eval_problems``, ``eval_unscored`` and ``eval_left_out`` count the last evaluation's problems, unscored answers
    and over-long prompts.
    ``probe_*_abs_dlogp`` are the largest values over all probed publishes of the probe's largest and mean
    |logp trainer - logp server|.
    ``staleness_histogram`` counts trained tokens by versions of lag; ``max_staleness`` is the largest lag,
    ``mean_lag`` the mean.
    ``restarts`` counts restarts by process; ``trainer`` stands for all ranks together.
    """

    run: str
    model: str
    seed: int
    config_sha256: str
    steps: int
    wall_s: float
    eval_before: float | None
    eval_after: float | None
    eval_reward_before: float | None = None
    eval_reward_after: float | None = None
    eval_problems: int = 0
    eval_unscored: int = 0
    eval_left_out: int = 0
    publishes: int
    publishes_probed: int
    probe_max_abs_dlogp: float | None
    probe_mean_abs_dlogp: float | None
    staleness_histogram: dict[int, int]
    max_staleness: int | None
    mean_lag: float | None = None
    max_staleness_allowed: int
    dropped: dict[str, int]
    restarts: dict[str, int] = {}
    adapter_path: str
    report_path: str


def write_summary(run_folder: RunFolder, *, wall_s: float, adapter_path: Path | str, report_path: Path | str) -> Path:
    """Write ``summary.json`` from the metrics and the resolved configuration of the run folder."""
    config = read_config(run_folder)
    figures = read_figures(run_folder)
    dropped: Counter[str] = Counter()
    for step in figures.last_by_adapter.values():
        dropped.update(step.dropped)
    evals = figures.evals
    summary = Summary(
        run=config.run.name,
        model=config.model.path,
        seed=config.run.seed,
        config_sha256=config_digest(run_folder),
        steps=figures.steps,
        wall_s=round(wall_s, 3),
        eval_before=evals[0].accuracy if evals else None,
        eval_after=evals[-1].accuracy if len(evals) > 1 else None,
        eval_reward_before=evals[0].reward_mean if evals else None,
        eval_reward_after=evals[-1].reward_mean if len(evals) > 1 else None,
        eval_problems=evals[-1].n if evals else 0,
        eval_unscored=evals[-1].unscored if evals else 0,
        eval_left_out=evals[-1].left_out if evals else 0,
        publishes=figures.publishes,
        publishes_probed=figures.publishes_probed,
        probe_max_abs_dlogp=figures.probe_max_abs,
        probe_mean_abs_dlogp=figures.probe_mean_abs,
        staleness_histogram=dict(sorted(figures.staleness.items())),
        max_staleness=figures.max_staleness,
        mean_lag=None if figures.mean_lag is None else round(figures.mean_lag, 4),
        max_staleness_allowed=config.rollout.max_staleness,
        dropped=dict(sorted(dropped.items())),
        restarts=count_restarts(run_folder),
        adapter_path=str(adapter_path),
        report_path=str(report_path),
    )
    target = run_folder.summary
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    temporary.replace(target)
    return target


def read_summary(run_folder: RunFolder | Path | str) -> Summary:
    """Read ``summary.json``; inverse of ``write_summary``."""
    return msgspec.json.decode(RunFolder.of(run_folder).summary.read_bytes(), type=Summary)


def print_closing(run_folder: RunFolder, console: Console) -> None:
    """Print paths, commands and, as the last lines, the summary as ``key: JSON value``."""
    summary = read_summary(run_folder)
    config = read_config(run_folder)
    lines = [
        "",
        f"adapter      {summary.adapter_path}",
        f"report       {summary.report_path}",
        f"metrics      {run_folder.metrics}",
        f"TensorBoard  {_python(config.trainer.python)} -m tensorboard.main"
        f" --logdir {shlex.quote(str(run_folder.tensorboard))}",
        "",
        *_how_to_use(run_folder, config, summary),
        "",
        *(f"{key}: {json.dumps(value)}" for key, value in msgspec.to_builtins(summary, str_keys=True).items()),
    ]
    for line in lines:
        # Wrapped or coloured lines cannot be copied or parsed.
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _how_to_use(folder: RunFolder, config: Config, summary: Summary) -> list[str]:
    """Commands and Python lines that run as pasted, from any folder and without an activated environment."""
    name, model = config.adapters[0].name, config.model.folder
    cpu = " --enforce-eager" if config.cluster.device == "cpu" else ""
    if config.cluster.device == "cpu" and config.rollout.kv_cache_gib is not None:
        # By default vLLM reserves nearly all memory of the machine and fails if less is free.
        cpu += f" --kv-cache-memory-bytes {int(config.rollout.kv_cache_gib * 2**30)}"
    lines = [
        f"Serve it with stock vLLM (then POST to http://127.0.0.1:{SERVE_PORT}/v1/completions, model {name}):",
        # Not `vllm serve`: its command line rejects the CPU distribution of vLLM, which has a different name.
        f"  {_python(config.rollout.python)} -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port {SERVE_PORT}"
        f" --model {shlex.quote(model)} --dtype {config.model.dtype}{cpu}"
        f" --max-model-len {config.rollout.max_model_len} --enable-lora --max-lora-rank {config.rollout.max_lora_rank}"
        f" --lora-modules {name}={shlex.quote(summary.adapter_path)}",
        f"Load it with stock peft, in {_python(config.trainer.python)}:",
        # Not indented: Python rejects pasted lines with indentation.
        "from peft import PeftModel; from transformers import AutoModelForCausalLM",
        f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({model!r}), {summary.adapter_path!r})",
    ]
    if EVALUATE.is_file():
        command = f"{_python(config.trainer.python)} {shlex.quote(str(EVALUATE))} {shlex.quote(str(folder))}"
        lines += ["Evaluate it with stock peft, independently of training and serving code:", f"  {command}"]
    return lines


def _python(role: str | None) -> str:
    """The interpreter of a role, quoted for a shell."""
    return shlex.quote(role or sys.executable)

"""One run of either side of ``versus.py``, and the figures of a run."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from run_times import StartWatch
from tree_watch import TreeWatch, Usage

from areal_lora.config.load import load_config
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.run_folder.paths import RunFolder

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "math"
CONFIGS = (EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml")
UNEVALUATED = ("eval.every_steps=0", 'adapters.0.evals=[{"name": "eval", "n": 1}]', "checkpoint.keep_last=1000")
"""Our runs answer one held-out problem at the start and one at the end. They keep every version, evaluated later."""
PHASES = {
    "wait": ("wait_batch",),
    "annotate": ("annotate",),
    "train": ("train",),
    "checkpoint": ("checkpoint_join", "checkpoint_copy"),
    "publish": ("publish_join", "publish_pack"),
}
"""Phases of one of our steps, and the spans that are part of each."""
WARM_UP = 3
"""Steps at the start that rates and means leave out: kernels and buffers fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A finished training step: seconds since the start of the process, and seconds of its phases.

    ``wall_s`` also counts TRL's evaluations, ``at_s`` does not; our runs have none. ``lag`` is the mean age of the
    trained tokens in versions.
    """

    at_s: float
    wall_s: float
    phases: dict[str, float]
    lag: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``accuracy`` is held-out greedy accuracy by the number of steps taken; 0 is the base model."""

    side: str
    seed: int
    samples_per_step: int
    first_step_s: float
    steps: list[Step]
    accuracy: dict[int, float]
    usage: Usage

    @property
    def step_s(self) -> list[float]:
        """Seconds from step to step, without the first ones."""
        return [b.at_s - a.at_s for a, b in pairwise(self.steps[WARM_UP - 1 :])]

    @property
    def samples_per_s(self) -> float:
        return self.samples_per_step * len(self.step_s) / sum(self.step_s)

    @property
    def mean_lag(self) -> float:
        """Mean over the steps after the first ones, which have nothing older to train on."""
        return statistics.mean(step.lag for step in self.steps[WARM_UP:])

    @property
    def cores(self) -> float:
        return self.usage.cores(self.steps[WARM_UP - 1].wall_s, self.steps[-1].wall_s)

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds from the start of the process until the first evaluated policy this good existed; None: never."""
        good = [taken for taken, value in sorted(self.accuracy.items()) if taken and value >= accuracy]
        return self.steps[good[0] - 1].at_s if good else None

    def phases(self) -> dict[str, float]:
        """Median seconds of each phase of a step."""
        steps = self.steps[WARM_UP:]
        return {name: statistics.median(step.phases[name] for step in steps) for name in steps[0].phases}


class RunFailed(Exception):
    """The text says where the log is."""


def run_ours(root: Path, side: str, *, seed: int, steps: int, overrides: Sequence[str]) -> Run:
    """Train the shipped example in its own layout. Raises RunFailed."""
    name = f"{side}-{seed}"
    settings = [f"run.root={json.dumps(str(root))}", f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}"]
    settings += [*UNEVALUATED, *overrides]
    configs = [part for path in CONFIGS for part in ("--config", str(path))]
    command = [sys.executable, "-m", "areal_lora.launch", *configs, *settings]
    folder, log = RunFolder(root / name), root / f"{name}.log"
    started_s = time.monotonic()
    with log.open("w") as file:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        with TreeWatch(launcher.pid, started_s) as tree, StartWatch(launcher.pid, folder, started_s) as start:
            finish(launcher, log)
    metrics, first_step_s = read_metrics(folder), start.times.first_step_s
    if first_step_s is None:
        raise RunFailed(f"no step was taken; see {log}")
    adapter = load_config(CONFIGS, overrides).adapters[0]
    offset_s = first_step_s - metrics.steps[0].time_s  # records count from the trainer's start
    ends_s = [step.time_s + offset_s for step in metrics.steps]
    return Run(
        side=side,
        seed=seed,
        samples_per_step=adapter.sampling.prompts_per_step * adapter.sampling.n_samples,
        first_step_s=first_step_s,
        steps=[
            Step(at_s=end_s, wall_s=end_s, phases=phases_of(s), lag=s.mean_lag or 0.0)
            for end_s, s in zip(ends_s, metrics.steps, strict=True)
        ],
        accuracy=accuracy_by_version(folder, log),
        usage=tree.usage,
    )


def accuracy_by_version(folder: RunFolder, log: Path) -> dict[int, float]:
    """Evaluate the versions of a finished run, as ``versus_trl.py`` does its own. Raises RunFailed."""
    command = [sys.executable, str(Path(__file__).with_name("versus_accuracy.py")), str(folder.path)]
    with log.open("a") as file:
        measured = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, check=False)
    if measured.returncode:
        raise RunFailed(f"the versions of {folder.path} were not evaluated; see {log}")
    versions: dict[str, float] = json.loads(measured.stdout)
    return {int(version): accuracy for version, accuracy in versions.items()}


def phases_of(step: StepRecord) -> dict[str, float]:
    """Where rank 0 spent the step. Sampling, scoring of answers and transfers run beside it in other processes."""
    phases = {name: sum(step.spans.get(span, 0.0) for span in spans) for name, spans in PHASES.items()}
    phases["other"] = max(0.0, step.step_s - sum(phases.values()))
    return {"wait for samples": phases.pop("wait"), **phases}


def run_trl(root: Path, python: Path, *, seed: int, steps: int, threads: int, overrides: Sequence[str]) -> Run:
    """Train with TRL. Its clock stands still during evaluations. Raises RunFailed."""
    sampling = load_config(CONFIGS, overrides).adapters[0].sampling
    out, log = root / f"trl-{seed}.jsonl", root / f"trl-{seed}.log"
    started_s = time.monotonic()
    command = [str(python), str(Path(__file__).with_name("versus_trl.py")), "--out", str(out), "--seed", str(seed)]
    command += ["--started-s", str(started_s), "--steps", str(steps)]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {
        "PYTHONPATH": str(ROOT)
    }
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--threads", str(threads), *overrides],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        with TreeWatch(process.pid, started_s) as tree:
            finish(process, log)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    return read_trl(records, seed, sampling.prompts_per_step * sampling.n_samples, tree.usage)


def read_trl(records: list[dict[str, Any]], seed: int, samples: int, usage: Usage) -> Run:
    """The run that ``versus_trl.py`` recorded."""
    steps = [Step(at_s=r["at_s"], wall_s=r["wall_s"], phases=r["phases"]) for r in records if r["kind"] == "step"]
    return Run(
        side="trl",
        seed=seed,
        samples_per_step=samples,
        first_step_s=steps[0].at_s,
        steps=steps,
        accuracy={r["step"]: r["accuracy"] for r in records if r["kind"] == "eval"},
        usage=usage,
    )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the end; an interrupt of the benchmark ends the process, too. Raises RunFailed."""
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if code:
        raise RunFailed(f"a run ended with code {code}; see {log}")

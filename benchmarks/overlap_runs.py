"""One run of ``async_overlap.py``: a configuration, its processes on chosen cores, what came of it."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.rules.findings import Severity, resolve_targets
from areal_lora.config.rules.guardrails import check
from areal_lora.errors import ExitCode
from areal_lora.launcher.plan import JobPlan, ProcessSpec, make_plan
from areal_lora.launcher.run import start
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import RunMetrics, mean_lag

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "math"
EMBEDDED = (EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml")
MODEL_LEN, LONGEST = 512, 440
WARM_UP, WIND_DOWN = 3, 2
"""Steps not measured: kernels and buffers fill at the start; the last steps have nothing to roll out beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """``cores`` are indices into the machine's cores by role; a role that is not named may use all.

    ``at_once`` is what a server samples at the same time, in steps: each variant has what is fastest for it.
    """

    name: str
    overrides: tuple[str, ...]
    cores: dict[str, tuple[int, ...]]
    at_once: float = 1.0


def pinned(eta: int, pacing: str = "fresh") -> Variant:
    """Asynchronous ones do better with half a step at once: what runs later starts with a newer version."""
    return Variant(
        name=f"eta {eta}" if pacing == "fresh" else f"eta {eta}, {pacing}",
        cores={"trainer": (0,), "server": (1,)},
        at_once=0.5 if eta else 1.0,
        overrides=(f"rollout.max_staleness={eta}", f"rollout.pacing={pacing}", "trainer.world_size=1"),
    )


IN_TURN = (
    Variant(
        name="in turn, 2 processes",
        cores={"trainer-0": (0,), "trainer-1": (1,), "server-0": (0,), "server-1": (1,)},
        overrides=("rollout.max_staleness=0", "trainer.world_size=2", "rollout.servers=2"),
    ),
    Variant(
        name="in turn, 2 threads",
        cores={},
        overrides=("rollout.max_staleness=0", "trainer.world_size=1", "cluster.threads=2"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of one step. ``ladder`` are the longest answers, taken in turn by step.

    With fewer prompts a server's step costs mostly what it costs without any, and rollouts are twice as slow as
    training at every length of answers.
    """

    prompts: int = 64
    samples: int = 8
    shortest: int = 24
    ladder: tuple[int, ...] = (384,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of the steps between warm-up and wind-down; ``g_s`` waiting for rollouts, ``t_s`` all else of a step.

    ``mean_lag`` is of the trained tokens, in versions. ``dropped`` counts groups of the whole run.
    """

    variant: str
    step_s: list[float]
    g_s: list[float]
    t_s: list[float]
    tokens: list[int]
    steps_per_hour: float
    final_accuracy: float
    mean_lag: float
    dropped: dict[str, int]
    publish_ms: list[float]

    def line(self) -> str:
        ordered = sorted(self.step_s)
        high = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
        dropped = ", ".join(f"{n} {reason}" for reason, n in self.dropped.items()) or "none"
        return (
            f"{self.variant:22} {self.steps_per_hour:7.0f} steps/h  step min {ordered[0]:.2f} "
            f"p50 {statistics.median(ordered):.2f} p99 {high:.2f} s  waiting {statistics.mean(self.g_s):.2f} s, "
            f"training {statistics.mean(self.t_s):.2f} s, {statistics.mean(self.tokens) / 1000:.1f} k tokens, "
            f"lag {self.mean_lag:.2f}; final eval {self.final_accuracy:.3f}; dropped groups: {dropped}"
        )


class RunFailed(Exception):
    """The text says where its logs are."""


def run(variant: Variant, load: Load, steps: int, n_eval: int, root: Path, name: str) -> Measured:
    """Train ``steps`` steps under the real launcher. Raises RunFailed, SystemExit for an interrupt."""
    return measure(variant.name, execute(variant, settings(variant, load, steps, n_eval, root, name), root, name))


def execute(
    variant: Variant, overlaid: dict[str, Any], root: Path, name: str, base: tuple[Path, ...] = EMBEDDED
) -> RunMetrics:
    """Run ``base`` with ``overlaid`` on the variant's cores. Raises as :func:`run`."""
    overlay = root / f"{name}.yaml"
    overlay.write_text(json.dumps(overlaid), encoding="utf-8")
    config = load_config([*base, overlay], variant.overrides)
    facts = gather_facts(config, runs_here=True)
    for finding in check(config, facts):
        if finding.severity is Severity.ERROR:
            raise finding.error()
    config = resolve_targets(config, facts)
    with (root / f"{name}.log").open("w") as log:
        code = start(config, placed(make_plan(config, facts), variant), Console(file=log, highlight=False), False).code
    if code == ExitCode.INTERRUPTED:
        raise SystemExit(code)
    if code:
        raise RunFailed(f"{variant.name} ended with code {code}; see {log.name} and {config.run_folder}/logs")
    return read_metrics(config.run_folder)


def settings(variant: Variant, load: Load, steps: int, n_eval: int, root: Path, name: str) -> dict[str, Any]:
    workflow = {
        "kind": "custom",
        "path": f"{Path(__file__).with_name('overlap_workflow.py')}:LongTail",
        "args": {"shortest": load.shortest, "ladder": " ".join(map(str, load.ladder))},
    }
    return {
        "run": {"root": str(root), "name": name, "steps": steps},
        "eval": {"every_steps": 0},
        "trainer": {"ep": 1},
        "rollout": {"max_model_len": MODEL_LEN, "max_num_seqs": int(load.prompts * load.samples * variant.at_once)},
        "adapters": [
            {
                "name": "gsm8k",
                "minibatches": 2,
                "workflow": workflow,
                "task": {"n_eval": n_eval},
                "sampling": {"prompts_per_step": load.prompts, "n_samples": load.samples, "max_new_tokens": LONGEST},
            }
        ],
    }


def placed(plan: JobPlan, variant: Variant) -> JobPlan:
    """The plan with every process on its cores from its first instruction on."""
    cores = sorted(os.sched_getaffinity(0))[:2]

    def place(spec: ProcessSpec) -> ProcessSpec:
        chosen = variant.cores.get(spec.name, variant.cores.get(spec.role, (0, 1)))
        names = ",".join(str(cores[i]) for i in chosen)
        return replace(spec, argv=("taskset", "-c", names, *spec.argv))

    return replace(plan, processes=tuple(place(spec) for spec in plan.processes))


def measure(variant: str, metrics: RunMetrics) -> Measured:
    steps = metrics.steps[WARM_UP : len(metrics.steps) - WIND_DOWN]
    before, last = metrics.steps[WARM_UP - 1], steps[-1]
    accuracy = metrics.evals[-1].accuracy
    assert accuracy is not None, "the word problems have a rule for what is correct"
    return Measured(
        variant=variant,
        step_s=[b.time_s - a.time_s for a, b in zip([before, *steps], steps, strict=False)],
        g_s=[s.spans.get("wait_batch", 0.0) for s in steps],
        t_s=[s.step_s - s.spans.get("wait_batch", 0.0) for s in steps],
        tokens=[int(s.metrics["train/n_tokens"] or 0) for s in steps],
        steps_per_hour=3600 * len(steps) / (last.time_s - before.time_s),
        final_accuracy=accuracy,
        mean_lag=mean_lag(sum((Counter(s.staleness) for s in steps), Counter())) or 0.0,
        dropped=dict(metrics.steps[-1].dropped),
        publish_ms=[p.total_ms for p in metrics.publishes[WARM_UP:] if p.total_ms is not None],
    )

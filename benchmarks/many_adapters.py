"""What a second adapter costs: ``python benchmarks/many_adapters.py [--json FILE] [--quick]``; about 20 minutes.

Two cores and the whole stack, trainer on one and server on the other. Every run is synchronous (``max_staleness`` 0):
one adapter alone trains while the server waits, and waits while the server rolls out. Adapters of one run are equal
but for name and seed. The trainer recomputes activations, as larger models must; without that the server is the
slower side at every length of the answers. First the load is balanced, as in ``async_overlap.py``. The rounds then run
one and two adapters in turn; ratios are of the same round. Four and eight adapters run once, and give the share of
the trainer's time that publishing takes. At the end three adapters with weights 1, 2 and 4 and short answers train
``--share-steps`` steps together: their shares of the trained tokens, as long as all three train. It refuses a busy
machine unless ``--force``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from async_overlap import balance
from machine import environment, require_idle
from overlap_runs import EXAMPLES, LONGEST, MODEL_LEN, Load, RunFailed, Variant, execute

from areal_lora.obs.metrics.records import RunMetrics, StepRecord

WARM_UP = 3
"""Steps of each adapter that are not measured."""
PLACED = Variant(name="many", overrides=(), cores={"trainer": (0,), "server": (1,)})
WEIGHTS = (1, 2, 4)
ADAPTERS = (1, 2, 4, 8)
FEWER = 8
"""Steps of each adapter, at most, where more than two train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Many:
    """One run, from the first step after all adapters' warm-up to the last before one ends. ``step_s``: seconds
    between the ends of consecutive steps, of whichever adapter. ``publish_share``: of the trainer's time, what packing
    and waiting for earlier publishes takes."""

    adapters: int
    steps: int
    steps_per_hour: float
    step_s: list[float]
    wait_share: float
    publish_share: float
    longest_wait: int
    final_accuracy: list[float]

    def line(self) -> str:
        ordered = sorted(self.step_s)
        high = ordered[min(len(ordered) - 1, round(0.99 * (len(ordered) - 1)))]
        return (
            f"{self.adapters} adapters: {self.steps_per_hour:6.0f} steps/h of {self.steps} steps; step min "
            f"{ordered[0]:.2f} p50 {statistics.median(ordered):.2f} p99 {high:.2f} s; waiting for rollouts "
            f"{self.wait_share:.0%}, publishing {self.publish_share:.1%} of the time; longest wait of an adapter "
            f"{self.longest_wait} steps; final eval {min(self.final_accuracy):.3f} .. {max(self.final_accuracy):.3f}"
        )


def configuration(
    root: Path, name: str, load: Load, *, weights: tuple[int, ...], steps: int, eta: int, n_eval: int
) -> dict[str, Any]:
    """Equal adapters ``a0``, ``a1``, ... of the given weights with ``steps`` steps each."""
    workflow = {
        "kind": "custom",
        "path": f"{Path(__file__).with_name('overlap_workflow.py')}:LongTail",
        "args": {"shortest": load.shortest, "ladder": " ".join(map(str, load.ladder))},
    }
    sampling = {"prompts_per_step": load.prompts, "n_samples": load.samples, "max_new_tokens": LONGEST}
    adapters = [
        {
            "name": f"a{i}",
            "rank": 8,
            "alpha": 16,
            "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
            "weight": weight,
            "steps": steps * weight,
            "seed": 1 + i,
            "minibatches": 2,
            "workflow": workflow,
            "task": {"kind": "word_problems", "n_eval": n_eval},
            "reward": {"kind": "numeric_match"},
            "algorithm": {"kind": "grpo"},
            "optimizer": {"lr": 1e-3},
            "sampling": sampling,
        }
        for i, weight in enumerate(weights)
    ]
    return {
        "run": {"root": str(root), "name": name, "steps": steps},
        "model": {"path": str(EXAMPLES / "tiny_model"), "dtype": "float32"},
        "adapters": adapters,
        "trainer": {"world_size": 1, "max_tokens_per_microbatch": 8192, "recompute": "full"},
        "rollout": {
            "max_staleness": eta,
            "max_lora_rank": 8,
            "max_model_len": MODEL_LEN,
            "max_num_seqs": load.prompts * load.samples,
            "max_num_batched_tokens": 1024,
            "kv_cache_gib": 0.5,
            "enforce_eager": True,
        },
        "weight_sync": {"bucket_mib": 16},
        "eval": {"every_steps": 0},
        "cluster": {"kind": "local", "device": "cpu"},
    }


def run(load: Load, root: Path, name: str, *, weights: tuple[int, ...], steps: int, eta: int = 0) -> RunMetrics:
    """Train under the real launcher. Raises RunFailed."""
    settings = configuration(root, name, load, weights=weights, steps=steps, eta=eta, n_eval=64)
    return execute(PLACED, settings, root, name, base=())


def while_all_train(metrics: RunMetrics, adapters: int, warm_up: int) -> list[StepRecord]:
    """Steps, one before them included, from the last adapter's ``warm_up``-th step until the first adapter's last."""
    steps = sorted(metrics.steps, key=lambda s: s.time_s)
    names = {s.adapter for s in steps}
    assert len(names) == adapters, names
    seen, last = Counter[str](), {n: max(i for i, s in enumerate(steps) if s.adapter == n) for n in names}
    first = 0
    for i, step in enumerate(steps):
        seen[step.adapter] += 1
        if all(seen[n] >= warm_up for n in names):
            first = i
            break
    return steps[first : min(last.values()) + 1]


def measure(metrics: RunMetrics, adapters: int) -> Many:
    before, *steps = while_all_train(metrics, adapters, WARM_UP)
    wall_s = steps[-1].time_s - before.time_s
    evals = {e.adapter: e.accuracy for e in sorted(metrics.evals, key=lambda e: e.version)}
    return Many(
        adapters=adapters,
        steps=len(steps),
        steps_per_hour=3600 * len(steps) / wall_s,
        step_s=[b.time_s - a.time_s for a, b in zip([before, *steps], steps, strict=False)],
        wait_share=sum(s.spans.get("wait_batch", 0.0) for s in steps) / wall_s,
        publish_share=sum(s.spans.get(name, 0.0) for s in steps for name in ("publish_join", "publish_pack")) / wall_s,
        longest_wait=longest_wait([s.adapter for s in steps]),
        final_accuracy=[a for a in evals.values() if a is not None],
    )


def longest_wait(order: list[str]) -> int:
    """The most steps of others between two steps of one adapter."""
    last, longest = dict[str, int](), 0
    for i, name in enumerate(order):
        longest = max(longest, i - last.get(name, i - 1) - 1)
        last[name] = i
    return longest


def rounds(load: Load, root: Path, *, n: int, steps: int, adapters: tuple[int, ...]) -> list[dict[int, Many]]:
    """``adapters`` in the first round, one and two in the others, in turn."""
    found: list[dict[int, Many]] = []
    for number in range(n):
        chosen = adapters if number == 0 else (2, 1) if number % 2 else (1, 2)
        found.append({})
        for count in chosen:
            metrics = run(
                load, root, f"{number}-{count}", weights=(1,) * count, steps=steps if count <= 2 else min(steps, FEWER)
            )
            found[-1][count] = measure(metrics, count)
            print(f"round {number}: {found[-1][count].line()}", flush=True)
    return found


def shares(root: Path, total: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Weights 1:2:4 over about ``total`` steps. Which side is slower depends on the machine, and must not matter."""
    load = Load(prompts=8, samples=8, shortest=16, ladder=(17,))
    metrics = run(load, root, "shares", weights=WEIGHTS, steps=round(total / sum(WEIGHTS)) + WARM_UP, eta=4)
    before, *steps = while_all_train(metrics, len(WEIGHTS), WARM_UP)
    tokens = Counter[str]()
    for step in steps:
        tokens[step.adapter] += step.trained_tokens
    expected = {f"a{i}": weight / sum(WEIGHTS) for i, weight in enumerate(WEIGHTS)}
    got = {name: tokens[name] / tokens.total() for name in expected}
    error = max(abs(got[name] / share - 1) for name, share in expected.items())
    wait = longest_wait([s.adapter for s in steps])
    text = ", ".join(f"{name} {share:.3f} of {expected[name]:.3f}" for name, share in got.items())
    waited = sum(s.spans.get("wait_batch", 0.0) for s in steps) / (steps[-1].time_s - before.time_s)
    print(
        f"weights 1:2:4, {len(steps)} steps: {text}; off by {error:.1%}; longest wait {wait} steps; waiting for "
        f"rollouts {waited:.0%} of the time",
        flush=True,
    )
    return {"share_error": error, "share_longest_wait": float(wait)}, {
        "shares": got,
        "share_steps": len(steps),
        "share_wait": waited,
    }


def report(found: list[dict[int, Many]]) -> dict[str, float]:
    """Print the claims and return them."""
    ratios = [r[2].steps_per_hour / r[1].steps_per_hour for r in found]
    claims = {"two_vs_one": statistics.median(ratios)}
    print(f"two adapters against one: {claims['two_vs_one']:.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
    alone = found[0][1].steps_per_hour
    for count, many in found[0].items():
        claims[f"publish_share_{count}"] = many.publish_share
        claims[f"steps_vs_one_{count}"] = many.steps_per_hour / alone
    return claims


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write claims, environment and all figures here")
    parser.add_argument("--shares", action="store_true", help="only the weighted adapters")
    parser.add_argument("--quick", action="store_true", help="one short round of one and two adapters, no balancing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each adapter")
    parser.add_argument("--share-steps", type=int, default=200)
    parser.add_argument("--longest", type=int, help="longest answer in tokens; balanced if not given")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine all the same")
    options = parser.parse_args()
    require_idle(0.15, options.force)
    started_s, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="many-"))
    try:
        claims, figures = ({}, {}) if options.shares else overlap(options, root)
        weighted, shared = shares(root, 42 if options.quick else options.share_steps)
    except RunFailed as failure:
        raise SystemExit(str(failure)) from None
    shutil.rmtree(root)
    print(f"{time.monotonic() - started_s:.0f} s")
    if options.json:
        result = {"claims": claims | weighted, "environment": environment(), **figures, **shared}
        options.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


def overlap(options: argparse.Namespace, root: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """What further equal adapters cost: the claims, and all figures. Raises RunFailed."""
    load, quick = Load(), options.quick
    if options.longest or quick:
        load = replace(load, ladder=(options.longest or load.ladder[0],))
    else:
        load = balance(load, root)
    print(f"load: {load}", flush=True)
    n, steps, adapters = (1, 8, ADAPTERS[:2]) if quick else (options.rounds, options.steps, ADAPTERS)
    found = rounds(load, root, n=n, steps=steps, adapters=adapters)
    measured = [{str(count): asdict(many) for count, many in r.items()} for r in found]
    return report(found), {"load": asdict(load), "rounds": measured}


if __name__ == "__main__":
    main()

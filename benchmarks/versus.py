"""The demo beside TRL on the same machine: ``python benchmarks/versus.py [--json FILE] [--quick]``.

All train the demo's model on its problems with its batch, LoRA and learning rate: ``ours`` in the demo's own layout,
``full`` the same with ``rollout.pacing: full``, ``trl`` with TRL's GRPOTrainer and transformers' generate in an
environment that the script makes (`versus_env`). Runs take turns, over several seeds; ratios are of the same seed.
`docs/en/results.md` lists what differs. Then `train_speed` measures training alone. It refuses a busy
machine unless ``--force``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import train_speed
from machine import environment, require_idle
from train_case import CASES, make_model
from versus_env import TRL, default_cache, make_environment
from versus_runs import Run, RunFailed, run_ours, run_trl

GOAL = 0.9
SIDES = ("ours", "full", "trl")
PACING = {"ours": (), "full": ("rollout.pacing=full",)}
Round = Mapping[str, Run]
"""Runs of one seed by side."""


def measure_round(number: int, steps: int, threads: int, overrides: list[str], python: Path, root: Path) -> Round:
    """Run every side once; the order changes from round to round."""
    seed = number + 1
    found = {}
    for side in SIDES if number % 2 == 0 else reversed(SIDES):
        if side == "trl":
            run = run_trl(root, python, seed=seed, steps=steps, threads=threads, overrides=overrides)
        else:
            run = run_ours(root, side, seed=seed, steps=steps, overrides=[*PACING[side], *overrides])
        found[side] = run
        print(line(run), flush=True)
    return {side: found[side] for side in SIDES}


def line(run: Run) -> str:
    reached_s = run.seconds_to(GOAL)
    reached = f"accuracy {GOAL} after {reached_s:.0f} s" if reached_s else f"accuracy {GOAL} not reached"
    return (
        f"seed {run.seed}, {run.side:5} first step {run.first_step_s:5.1f} s, "
        f"step {statistics.median(run.step_s):5.2f} s, "
        f"{run.samples_per_s:6.1f} samples/s, {reached}, best {max(run.accuracy.values()):.3f}; "
        f"{run.usage.peak_bytes / 2**30:.1f} GiB, {run.cores:.2f} cores busy"
    )


def claims(rounds: list[Round], trained: list[train_speed.Measured]) -> dict[str, float | None]:
    """Medians over the seeds; None where a side did not reach the goal with any seed."""
    ours = [r["ours"] for r in rounds]
    times = [(r["ours"].seconds_to(GOAL), r["trl"].seconds_to(GOAL)) for r in rounds]
    found = {
        "samples_vs_trl": [r["ours"].samples_per_s / r["trl"].samples_per_s for r in rounds],
        "time_to_090_vs_trl": [a / b for a, b in times if a is not None and b is not None],
        "train_phase_s": [run.phases()["train"] for run in ours],
        "step_s": [statistics.median(run.step_s) for run in ours],
        "first_step_s": [run.first_step_s for run in ours],
        "mean_lag": [run.mean_lag for run in ours],
        "steps_vs_full_pacing": [r["ours"].samples_per_s / r["full"].samples_per_s for r in rounds],
    }
    medians = {name: round(statistics.median(values), 3) if values else None for name, values in found.items()}
    return medians | train_speed.claims(trained)


def report(rounds: list[Round]) -> None:
    """Print medians over the seeds, side by side: figures, phases of a step, CPU seconds per step by process."""
    print(f"\n{'median of ' + str(len(rounds)) + ' seeds':34}" + "".join(f"{side:>12}" for side in rounds[0]))
    runs = {side: [r[side] for r in rounds] for side in rounds[0]}
    table = {
        "samples/s": [run_median([x.samples_per_s for x in found]) for found in runs.values()],
        "seconds of a step": [run_median([statistics.median(x.step_s) for x in found]) for found in runs.values()],
        "seconds to the first step": [run_median([x.first_step_s for x in found]) for found in runs.values()],
        f"seconds to accuracy {GOAL}": [run_median([x.seconds_to(GOAL) for x in found]) for found in runs.values()],
        "peak memory, GiB": [run_median([x.usage.peak_bytes / 2**30 for x in found]) for found in runs.values()],
        "busy cores": [run_median([x.cores for x in found]) for found in runs.values()],
        "mean lag, versions": [run_median([x.mean_lag for x in found]) for found in runs.values()],
    }
    for name, values in table.items():
        print(f"{name:34}" + "".join(f"{'never' if v is None else f'{v:.2f}':>12}" for v in values))
    for side, found in runs.items():
        print(f"\n{side}: seconds of a step, median (rank 0)" if side != "trl" else f"\n{side}: seconds of a step")
        for phase in found[0].phases():
            print(f"  {phase:32}{statistics.median(x.phases()[phase] for x in found):10.2f}")
        print(f"{side}: CPU seconds of the whole run, by process")
        for process, used_s in sorted(found[0].usage.by_name.items(), key=lambda item: -item[1]):
            if used_s >= 0.5:
                print(f"  {process:32}{used_s:10.1f}")


def run_median(values: list[float] | list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def measure_training(rounds: int, profiled: bool) -> list[train_speed.Measured]:
    peak_flops = train_speed.machine_peak()
    with tempfile.TemporaryDirectory() as scratch:
        results = [
            train_speed.measure(case, make_model(case, Path(scratch)), rounds, profiled) for case in CASES.values()
        ]
    train_speed.report(results, peak_flops)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write claims, environment and all figures here")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: about five minutes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--training-rounds", type=int, default=9, help="steps of each side, training alone")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of TRL; all cores")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="where TRL's environment is")
    parser.add_argument("--keep", type=Path, help="keep run folders and logs here")
    parser.add_argument("--profile", action="store_true", help="print the operators of a training step, too")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine, too")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="override one key of both configurations")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run in progress is ended, too
    python = make_environment(options.cache)
    require_idle(train_speed.MAX_BUSY, options.force)
    where, began_s = environment(), time.monotonic()
    seeds, steps = (1, 12) if options.quick else (options.seeds, options.steps)
    root = (options.keep or Path(tempfile.mkdtemp(prefix="versus-"))).resolve()
    root.mkdir(parents=True, exist_ok=True)
    try:
        rounds = [measure_round(n, steps, options.threads, options.overrides, python, root) for n in range(seeds)]
    except RunFailed as failure:
        raise SystemExit(str(failure)) from None  # the run folder stays for its logs
    trained = measure_training(2 if options.quick else options.training_rounds, options.profile)
    report(rounds)
    found = claims(rounds, trained)
    print()
    for name, value in found.items():
        print(f"{name}: {'not reached' if value is None else value}")
    print(f"{seeds} seeds, {steps} steps; {time.monotonic() - began_s:.0f} s")
    if options.json:
        result = {
            "claims": found,
            "environment": where | {"trl": TRL},
            "rounds": [{side: asdict(run) for side, run in r.items()} for r in rounds],
            "training": [asdict(result) for result in trained],
        }
        options.json.write_text(json.dumps(result, indent=1))
    if options.keep is None:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

"""What pacing costs and gives where the trainer is the slower side: the embedded example, ``fresh`` against ``full``.

``compare_pacing`` is for other benchmarks; ``async_overlap.py --pacing`` prints it.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from overlap_runs import Measured, Variant, execute, measure

FRESH, FULL = (Variant(name=name, overrides=(f"rollout.pacing={name}",), cores={}) for name in ("fresh", "full"))


def compare_pacing(root: Path, *, rounds: int, steps: int) -> tuple[dict[str, float], list[dict[str, Measured]]]:
    """Return the claims, and the measurements by round and pacing; prints a line for each run.

    ``mean_lag`` is of the tokens trained with ``fresh``, in versions, ``mean_lag_full`` with ``full``.
    ``steps_vs_full_pacing`` is the median over the rounds of the ratio of their steps per hour. Every round runs
    both, in turn first. Warm-up and wind-down are not counted. Raises RunFailed.
    """
    measured: list[dict[str, Measured]] = []
    for number in range(rounds):
        results = {}
        for variant in (FRESH, FULL) if number % 2 == 0 else (FULL, FRESH):
            name = f"pacing-{number}-{variant.name}"
            results[variant.name] = measure(variant.name, execute(variant, demo(steps, root, name), root, name))
            print(f"pacing, round {number}: {results[variant.name].line()}", flush=True)
        measured.append(results)
    lag, lag_full = (statistics.mean(r[v.name].mean_lag for r in measured) for v in (FRESH, FULL))
    ratios = [r[FRESH.name].steps_per_hour / r[FULL.name].steps_per_hour for r in measured]
    claims = {"mean_lag": lag, "mean_lag_full": lag_full, "steps_vs_full_pacing": statistics.median(ratios)}
    print(
        f"pacing fresh against full: {claims['steps_vs_full_pacing']:.3f} of the steps per hour "
        f"({min(ratios):.3f} .. {max(ratios):.3f}), mean lag {lag:.2f} against {lag_full:.2f}",
        flush=True,
    )
    return claims, measured


def demo(steps: int, root: Path, name: str) -> dict[str, Any]:
    return {
        "run": {"root": str(root), "name": name, "steps": steps},
        "eval": {"every_steps": 0},
        "adapters": [{"name": "gsm8k", "task": {"n_eval": 64}}],
    }

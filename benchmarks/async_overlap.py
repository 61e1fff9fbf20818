"""What asynchrony buys: ``python benchmarks/async_overlap.py [--json FILE] [--quick]``; about 20 minutes.

Two cores and the whole stack: launcher, Megatron, vLLM, controller, checkpoints, weight sync. Every
variant trains the same tiny model on the same prompts with the same long-tailed answer lengths:

- ``eta N``: trainer on one core, server on the other, ``max_staleness`` N. ``eta 0`` is synchronous.
- ``in turn``: both cores roll out, then both train; two processes of one thread each per role, with
  ``--threads`` also one process of two threads, and then the faster of the two is compared with.

- ``eta 2, full`` is eta 2 without pacing.

First the load is balanced: a run of eta 0 goes through several longest lengths, and the one at which
rolling out (G) takes as long as training (T) is taken. The rounds then go through the variants one
after the other; ratios are of the same round. At the end the embedded example, whose trainer is the slower side,
runs with pacing ``fresh`` and ``full`` in turn; ``--pacing`` does only this. It refuses a busy machine unless
``--force``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from machine import environment, require_idle
from overlap_runs import IN_TURN, WARM_UP, WIND_DOWN, Load, Measured, RunFailed, Variant, pinned, run
from pacing_runs import compare_pacing

SYNC, OVERLAP, UNPACED = pinned(0), pinned(2), pinned(2, "full")
OTHERS = (pinned(1), pinned(4), pinned(8))
LADDER = (60, 120, 200, 300, 440)
"""Longest answers in tokens. Wide: which of them makes both sides equal depends on the machine and the versions."""
REPEATS = 3
"""Steps of each rung that are measured."""


def balance(load: Load, root: Path) -> Load:
    """The load whose longest answers make G = T, interpolated between the rungs of a ladder."""
    steps = REPEATS * len(LADDER) + WARM_UP + WIND_DOWN
    measured = run(SYNC, replace(load, ladder=LADDER), steps, 64, root, "balance")
    surplus = []
    for rung, longest in enumerate(LADDER):
        taken = [i for i in range(len(measured.step_s)) if (i + WARM_UP) % len(LADDER) == rung]
        g_s, t_s = (statistics.median(values[i] for i in taken) for values in (measured.g_s, measured.t_s))
        surplus.append((g_s - t_s) / (g_s + t_s))
        print(f"balance: longest answer {longest:3}: G {g_s:.2f} s, T {t_s:.2f} s", flush=True)
    if min(surplus) > 0 or max(surplus) < 0:
        print("balance: one side is slower at every length; taken is the length at which they differ least", flush=True)
    return replace(load, ladder=(balanced_at(LADDER, surplus),))


def balanced_at(lengths: tuple[int, ...], surplus: list[float]) -> int:
    """Where ``surplus`` first rises through zero, straight between neighbours; else where it is nearest to zero.

    Not a line through all points: the time of a step is no straight line over so wide a ladder.
    """
    for (x0, y0), (x1, y1) in itertools.pairwise(zip(lengths, surplus, strict=True)):
        if y0 <= 0 < y1:
            return round(x0 + (x1 - x0) * -y0 / (y1 - y0))
    return min(zip(lengths, surplus, strict=True), key=lambda point: abs(point[1]))[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="eta 0, eta 2 and no pacing only, one short round without balancing"
    )
    parser.add_argument("--threads", action="store_true", help="also take turns with one process of two threads")
    parser.add_argument("--pacing", action="store_true", help="only the embedded example with both kinds of pacing")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--longest", type=int, help="longest answer in tokens; balanced if not given")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine all the same")
    parser.add_argument("--keep", type=Path, help="keep the run folders here")
    options = parser.parse_args()
    require_idle(0.15, options.force)
    started_s = time.monotonic()
    root = options.keep or Path(tempfile.mkdtemp(prefix="overlap-"))
    root.mkdir(parents=True, exist_ok=True)
    rounds = 1 if options.quick else options.rounds
    steps = 10 if options.quick else options.steps
    claims, measured = ({}, {}) if options.pacing else overlap(options, rounds, steps, root)
    more, paced = compare_pacing(root, rounds=rounds, steps=steps)
    if options.keep is None:
        shutil.rmtree(root)
    print(f"{time.monotonic() - started_s:.0f} s")
    if options.json:
        result = {"claims": claims | more, "environment": environment(), **measured, "pacing": paced}
        options.json.write_text(json.dumps(result, indent=1, default=asdict))


def overlap(
    options: argparse.Namespace, n_rounds: int, steps: int, root: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Balance the load and measure the variants; the claims, and what was measured."""
    load = Load()
    if options.longest or options.quick:
        load = replace(load, ladder=(options.longest or load.ladder[0],))
    else:
        load = balance(load, root)
    print(f"load: {load}", flush=True)
    rounds: list[dict[str, Measured]] = []
    for number in range(n_rounds):
        variants = chosen(rounds, options.quick, options.threads)
        rounds.append(measure_round(variants, load, number, steps, 64 if options.quick else 512, root))
    return report(rounds), {"load": load, "rounds": rounds}


def chosen(rounds: list[dict[str, Measured]], quick: bool, threads: bool) -> tuple[Variant, ...]:
    """All in the first round; later eta 0, eta 2 with and without pacing, and the faster way of taking turns."""
    if quick:
        return SYNC, OVERLAP, UNPACED
    if not rounds:
        return SYNC, OVERLAP, UNPACED, *(IN_TURN if threads else IN_TURN[:1]), *OTHERS
    in_turn = [v for v in IN_TURN if v.name in rounds[0]]
    return SYNC, OVERLAP, UNPACED, *sorted(in_turn, key=lambda v: -rounds[0][v.name].steps_per_hour)[:1]


def measure_round(
    variants: tuple[Variant, ...], load: Load, number: int, steps: int, n_eval: int, root: Path
) -> dict[str, Measured]:
    results = {}
    for variant in variants:
        name = f"{number}-{variant.name}".replace(",", "").replace(" ", "-")
        try:
            results[variant.name] = run(variant, load, steps, n_eval, root, name)
        except RunFailed as failure:
            if variant in (SYNC, OVERLAP, UNPACED):
                raise SystemExit(str(failure)) from None
            print(f"round {number}: {failure}; left out", flush=True)
            continue
        print(f"round {number}: {results[variant.name].line()}", flush=True)
    return results


def report(rounds: list[dict[str, Measured]]) -> dict[str, float]:
    """Print the claims and return them."""
    sync = [r[SYNC.name] for r in rounds]
    g_s, t_s = (statistics.mean(x for m in sync for x in getattr(m, field)) for field in ("g_s", "t_s"))
    claims = {"ideal": (g_s + t_s) / max(g_s, t_s)}
    print(f"G {g_s:.2f} s, T {t_s:.2f} s: ideal (G + T) / max(G, T) = {claims['ideal']:.2f}")
    names = [name for name in rounds[0] if name != SYNC.name]
    for name in names:
        ratios = [r[name].steps_per_hour / r[SYNC.name].steps_per_hour for r in rounds if name in r]
        middle = statistics.median(ratios)
        print(f"{name:22} against {SYNC.name}: {middle:.2f} ({min(ratios):.2f} .. {max(ratios):.2f})")
        if name == OVERLAP.name:
            claims["overlap_vs_sync"] = middle
    fastest = [max((r[v.name].steps_per_hour for v in IN_TURN if v.name in r), default=0.0) for r in rounds]
    if all(fastest):
        ratios = [r[OVERLAP.name].steps_per_hour / speed for r, speed in zip(rounds, fastest, strict=True)]
        claims["overlap_vs_colocated"] = statistics.median(ratios)
        print(
            f"{OVERLAP.name} against the faster of both cores in turn: {claims['overlap_vs_colocated']:.2f} "
            f"({min(ratios):.2f} .. {max(ratios):.2f})"
        )
    ratios = [r[OVERLAP.name].steps_per_hour / r[UNPACED.name].steps_per_hour for r in rounds]
    claims["long_tail_steps_vs_full_pacing"] = statistics.median(ratios)
    for variant, key in ((OVERLAP, "long_tail_stale"), (UNPACED, "long_tail_stale_full_pacing")):
        claims[key] = statistics.mean(r[variant.name].dropped.get("stale", 0) for r in rounds)
    print(
        f"{OVERLAP.name} against {UNPACED.name}: {claims['long_tail_steps_vs_full_pacing']:.2f} ({min(ratios):.2f} .. "
        f"{max(ratios):.2f}); groups too old {claims['long_tail_stale']:.0f}, "
        f"{claims['long_tail_stale_full_pacing']:.0f}"
    )
    final = {n: statistics.mean(r[n].final_accuracy for r in rounds) for n in (SYNC.name, OVERLAP.name)}
    claims["reward_gap"] = abs(final[SYNC.name] - final[OVERLAP.name])
    print(f"final eval: {SYNC.name} {final[SYNC.name]:.3f}, {OVERLAP.name} {final[OVERLAP.name]:.3f}")
    return claims


if __name__ == "__main__":
    main()

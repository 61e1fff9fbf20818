"""Measure training tokens per second of one rank: ``python benchmarks/train_speed.py [--quick] [--profile]``.

A step (forward, backward, clipping, Adam) of the Megatron engine against the same step written with transformers and
PEFT, for the demo's model and batch and for a model of 154 M parameters with 128 experts and random weights. Both
sides are processes of one thread that take turns, so that what else happens on the machine meets both; `train_sides`
says what they share. Times are CPU seconds of the process, which on an idle machine are wall seconds; ratios are of
the same round. Also printed: the share of the machine's peak, a large product of float32 matrices on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import environment, require_idle
from train_case import CASES, TINY, Case, make_batch, make_model, step_flops
from train_sides import SIDES

from areal_lora.families.shape import read_hf_config

MAX_BUSY = 0.15
TOLERANCE = 1e-4  # largest difference of a token's log-probability between the sides
TIES = 1e-3
"""Share of tokens that may differ more: where two experts are equally good, a rounding error chooses."""
PEAK_SIZE, PEAK_ROUNDS = 2048, 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One case. ``cpu_s`` and ``wall_s`` are seconds of a step by side, one per round; ``flops`` those of a step."""

    case: str
    tokens: int
    flops: float
    cpu_s: dict[str, list[float]]
    wall_s: dict[str, list[float]]

    def tokens_per_s(self, side: str) -> list[float]:
        return [self.tokens / s for s in self.cpu_s[side]]

    def ratio(self) -> float:
        """Speed of ours against the bound: the median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.cpu_s["ours"], self.cpu_s["peft"], strict=True))

    def peak_share(self, side: str, peak_flops: float) -> float:
        return self.flops / statistics.median(self.cpu_s[side]) / peak_flops


def machine_peak() -> float:
    """Floating point operations per second of a float32 matrix product on one thread, the best of some."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(PEAK_SIZE, PEAK_SIZE), torch.randn(PEAK_SIZE, PEAK_SIZE)
    out, best_s = torch.empty(PEAK_SIZE, PEAK_SIZE), float("inf")
    for _ in range(PEAK_ROUNDS):
        started = time.process_time()
        torch.mm(a, b, out=out)
        best_s = min(best_s, time.process_time() - started)
    return 2 * PEAK_SIZE**3 / best_s


class Process:
    """One side in a process of its own."""

    def __init__(self, side: str, case: Case, folder: Path) -> None:
        script = Path(__file__).with_name("train_sides.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), side, case.name, str(case.groups), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def wait(self) -> Any:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            sys.exit("a side ended; its error is above")
        return json.loads(line)

    def ask(self, command: str) -> Any:
        assert self._process.stdin
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self.wait()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def compare(name: str, differences: np.ndarray) -> None:
    """Print how far the sides' log-probabilities [tokens] are apart; exits if they compute different models."""
    within = float(np.quantile(differences, 1 - TIES, method="higher"))
    beyond = int((~(differences <= TOLERANCE)).sum())
    print(
        f"{name}: log-probabilities differ by {within:.1e} at most in {1 - TIES:.1%} of {len(differences)} tokens, "
        f"by more than {TOLERANCE:.0e} in {beyond}",
        flush=True,
    )
    if not within <= TOLERANCE:
        sys.exit(f"the sides compute different models: more than {TOLERANCE} in more than {TIES:.1%} of the tokens")


def measure(case: Case, folder: Path, rounds: int, profiled: bool) -> Measured:
    """Measure interleaved steps; the first of each side is dropped."""
    processes = {side: Process(side, case, folder) for side in SIDES}
    try:
        for process in processes.values():
            process.wait()
        scores = [np.array(process.ask("logprobs")) for process in processes.values()]
        compare(case.name, np.abs(scores[0] - scores[1]))
        seconds = [
            {side: processes[side].ask("step") for side in (SIDES if n % 2 else reversed(SIDES))}
            for n in range(rounds + 1)
        ][1:]
        if profiled:
            for side, process in processes.items():
                print(f"\n{case.name}, {side}\n{process.ask('profile')}")
    finally:
        for process in processes.values():
            process.close()
    model, config = read_hf_config(folder), case.config(folder)
    lengths = make_batch(case, model["vocab_size"], "a").cu_seqlens.diff().tolist()
    return Measured(
        case=case.name,
        tokens=sum(lengths),
        flops=step_flops(model, config.adapters[0].rank, lengths),
        cpu_s={side: [n[side]["cpu_s"] for n in seconds] for side in SIDES},
        wall_s={side: [n[side]["wall_s"] for n in seconds] for side in SIDES},
    )


def claims(results: list[Measured]) -> dict[str, float]:
    """The speed of ours against transformers and PEFT, the smaller of the two models."""
    return {"train_vs_transformers": round(min(result.ratio() for result in results), 3)}


def report(results: list[Measured], peak_flops: float) -> None:
    print(f"\nmachine: {peak_flops / 1e9:.0f} GFLOP/s, float32, one thread")
    print(f"{'tokens/s, one rank':22}{'':6}{'min':>9}{'p50':>9}{'p99':>9}{'step s':>9}{'of peak':>9}{'ours / it':>11}")
    for result in results:
        for side in SIDES:
            low, p50, high = np.percentile(result.tokens_per_s(side), [0, 50, 99])
            step_s, share = statistics.median(result.cpu_s[side]), result.peak_share(side, peak_flops)
            ratio = f"{result.ratio():11.2f}" if side == "peft" else ""
            print(f"{result.case:22}{side:6}{low:9.0f}{p50:9.0f}{high:9.0f}{step_s:9.2f}{share:9.1%}{ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write claims, environment and all figures here")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--only", choices=("tiny", "wide"), help="one of the models")
    parser.add_argument("--rounds", type=int, help="steps of each side that count")
    parser.add_argument("--groups", type=int, help="prompts of a step; the demo has 64")
    parser.add_argument("--profile", action="store_true", help="print the operators of one more step")
    parser.add_argument("--force", action="store_true", help="measure on a busy machine, too")
    options = parser.parse_args()
    require_idle(MAX_BUSY, options.force)
    where = environment()
    rounds = options.rounds or (3 if options.quick else 9)
    peak_flops = machine_peak()
    cases = [c for c in CASES.values() if options.only in (None, "tiny" if c is TINY else "wide")]
    cases = [replace(c, groups=options.groups or c.groups) for c in cases]
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            results.append(measure(case, make_model(case, Path(scratch)), rounds, options.profile))
    report(results, peak_flops)
    found = claims(results)
    print(f"\ntrain_vs_transformers: {found['train_vs_transformers']:.2f}, {rounds} rounds")
    if options.json:
        figures = [asdict(r) for r in results]
        result = {"claims": found, "environment": where, "peak_flops": peak_flops, "results": figures}
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

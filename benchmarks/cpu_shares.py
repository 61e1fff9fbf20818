"""CPU seconds per step of every process of a run: ``python benchmarks/cpu_shares.py [--json FILE] [a.b=c ...]``.

Runs the demo (or its rollout side alone, with ``--rollout-only``) for a few steps and reads the processes' CPU
clocks from /proc. CPU seconds depend little on what else the machine does, unlike the wall time beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from machine import environment
from rollout_side import FILES, ROOT, RolloutSide

from areal_lora.config.load import load_config

WARM_UP = 3
SETTLE_S = 10.0
ROLES = (
    (r"areal_lora\.trainer\.main", "trainer"),
    (r"areal_lora\.engine\.vllm_ext\.server", "server"),
    (r"areal_lora\.rollout\.main", "controller"),
    (r"areal_lora\.tasks\.scorer_child", "scorer"),
    (r"areal_lora\.launch\b", "launcher"),
)
ROLLOUT = ("server", "engine", "controller", "scorer")
Times = dict[int, tuple[str, float, float]]  # by pid: role, user seconds, system seconds


def role_of(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    if command.startswith("VLLM::"):
        return "engine"
    return next((role for pattern, role in ROLES if re.search(pattern, command)), "other")


def cpu_times(roots: list[int]) -> Times:
    """CPU times so far of the processes ``roots`` and of all their descendants."""
    times: Times = {}
    for root in roots:
        for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
            try:
                spent = process.cpu_times()
                times[process.pid] = (role_of(process), spent.user, spent.system)
            except psutil.NoSuchProcess:
                continue
    return times


def spent(before: Times, after: Times) -> dict[str, tuple[float, float]]:
    """User and system seconds by role between two readings. A process that ended between them is not counted."""
    user: Counter[str] = Counter()
    system: Counter[str] = Counter()
    for pid, (role, used, in_system) in after.items():
        _, used_before, in_system_before = before.get(pid, (role, 0.0, 0.0))
        user[role] += used - used_before
        system[role] += in_system - in_system_before
    return {role: (user[role], system[role]) for role in user}


def measure_rollout(options: argparse.Namespace, root: Path) -> dict[str, float]:
    """Drive the rollout side alone; return the seconds of ``report``."""
    with RolloutSide(root, "rollout", options.overrides, options.tree) as side:
        pids = [child.pid for child in side.children]
        for _ in range(WARM_UP):
            side.step()
        before, began_s = cpu_times(pids), time.monotonic()
        sampled = [t for _ in range(options.steps) for group in side.step().groups for t in group.trajectories]
        after, ended_s = cpu_times(pids), time.monotonic()
        tokens = sum(sum(t.loss_mask) for t in sampled)
        print(f"{len(sampled) / options.steps:.0f} answers, {tokens / options.steps:.0f} sampled tokens a step")
        claims = report(spent(before, after), options.steps, ended_s - began_s, len(sampled) / options.steps)
        if options.idle:
            time.sleep(SETTLE_S)  # groups that were admitted are finished first
            before = cpu_times(pids)
            time.sleep(options.idle)
            print(f"without work, shares of one core over {options.idle:g} s:")
            for role, (user, system) in spent(before, cpu_times(pids)).items():
                print(f"  {role:12} {(user + system) / options.idle:7.2%}")
        return claims


def measure_demo(options: argparse.Namespace, root: Path) -> dict[str, float]:
    """Run the demo and read the clocks when step ``WARM_UP`` and the last one but one have ended."""
    command = [sys.executable, "-m", "areal_lora.launch"]
    for file in FILES:
        command += ["--config", str(file)]
    command += [f"run.root={root}", "run.name=demo", f"run.steps={WARM_UP + options.steps + 1}", *options.overrides]
    metrics = root / "demo" / "metrics.jsonl"
    variables = os.environ | {"PYTHONPATH": str(options.tree)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables, cwd=options.tree) as launcher:
        before, began_s = wait_step(metrics, WARM_UP, launcher)
        after, ended_s = wait_step(metrics, WARM_UP + options.steps, launcher)
        sampling = load_config(list(FILES), options.overrides).adapters[0].sampling
        samples = sampling.prompts_per_step * sampling.n_samples
        return report(spent(before, after), options.steps, ended_s - began_s, samples)


def wait_step(metrics: Path, steps: int, launcher: subprocess.Popen[bytes]) -> tuple[Times, float]:
    while True:
        if metrics.exists() and metrics.read_bytes().count(b'"kind":"step"') >= steps:
            return cpu_times([launcher.pid]), time.monotonic()
        if launcher.poll() is not None:
            sys.exit(f"the run ended with code {launcher.returncode} before step {steps}")
        time.sleep(0.05)


def report(seconds: dict[str, tuple[float, float]], steps: int, wall_s: float, samples: float) -> dict[str, float]:
    """Print and return CPU seconds per step of ``samples``: by role, of the rollout side, of all; and wall seconds."""
    print(f"{'CPU s per step':14}   user  system   total  ms a sample  (load {os.getloadavg()[0]:.1f}, {steps} steps)")
    rows = {role: (user / steps, system / steps) for role, (user, system) in seconds.items()}
    for role, (user, system) in rows.items():
        print(f"{role:14} {user:6.3f}  {system:6.3f}  {user + system:6.3f}  {1e3 * (user + system) / samples:11.3f}")
    side_s, all_s = sum(sum(rows.get(role, (0.0, 0.0))) for role in ROLLOUT), sum(map(sum, rows.values()))
    for name, total in (("rollout side", side_s), ("all", all_s)):
        print(f"{name:14} {'':14}  {total:6.3f}  {1e3 * total / samples:11.3f}")
    print(f"wall {wall_s / steps:.2f} s a step", flush=True)
    by_role = {f"{role}_cpu_s": sum(both) for role, both in rows.items()}
    totals = {"rollout_cpu_s": side_s, "cpu_s": all_s, "cpu_ms_per_sample": 1e3 * all_s / samples}
    return by_role | totals | {"wall_s": wall_s / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rollout-only", action="store_true", help="without trainer and launcher")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--idle", type=float, default=0.0, help="also measure so many seconds without work")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout whose code the processes run")
    parser.add_argument("--keep", type=Path, help="keep the run folder here")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    root = options.keep or Path(tempfile.mkdtemp(prefix="cpu-shares-"))
    claims = (measure_rollout if options.rollout_only else measure_demo)(options, root)
    if options.keep is None:
        shutil.rmtree(root)
    if options.json:
        options.json.write_text(json.dumps({"claims": claims, "environment": environment()}, indent=1))


if __name__ == "__main__":
    main()

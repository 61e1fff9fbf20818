"""What it costs to keep rollouts, and to find them: a run folder of generated rollouts.

    python benchmarks/rollout_inspector.py [--rollouts 1e6] [--tokens 100] [--limit-mib 1024] [--folder FOLDER]

Steps of 1,024 random answers of ``--tokens`` tokens to prompts of 24, groups of 16. ``hand over`` is the time of the
calling thread, ``write`` the processor time of the thread that writes. Then an index is opened and queried: ``first
page`` reads the scalars of all files, each other query is the slowest of three.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from areal_lora.obs.metrics.records import GroupText
from areal_lora.obs.metrics.rollout_store import TOKEN_BYTES, RolloutWriter, StepRollouts
from areal_lora.obs.report.inspector import GroupPlace, RolloutFilter, RolloutIndex
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, TokenColumns, Trajectory, TrajectoryGroup

GROUPS, N, PROMPT, VOCABULARY = 64, 16, 24, 50_000
DISTINCT = 8
"""Steps that are generated; later ones are these again, under other numbers."""
FILTERS = {
    "solved": RolloutFilter(outcome="solved"),
    "stale, reward from 0.9": RolloutFilter(outcome="stale", lowest=0.9),
    "one step": RolloutFilter(step=3),
    "text, frequent": RolloutFilter(text="word77 "),
    "text, nowhere": RolloutFilter(text="not written"),
}


def steps(count: int, tokens: int, seed: int = 0) -> Iterator[StepRollouts]:
    rng, length = np.random.default_rng(seed), PROMPT + tokens
    words = np.array([f"word{i} " for i in range(VOCABULARY)])
    for step in range(count):
        versions = np.repeat([-1, max(0, step - 1), step], [PROMPT, tokens // 2, tokens - tokens // 2])
        ids = (rng.zipf(1.3, (GROUPS * N, length)) % VOCABULARY).astype(np.int32)
        logprobs = np.where(versions >= 0, np.log(rng.random((GROUPS * N, length))), 0).astype(np.float32)
        rewards, groups, texts = rng.integers(0, 2, GROUPS * N).astype(float), [], []
        for g in range(GROUPS):
            rows = range(g * N, g * N + N)
            trajectories = (
                Trajectory(
                    uid="",
                    sample=i - g * N,
                    adapter=AdapterRef(name="a", version=step),
                    columns=TokenColumns.of(ids[i], logprobs[i], versions),
                    reward=rewards[i],
                    components={"right": rewards[i]},
                    correct=bool(rewards[i]),
                )
                for i in rows
            )
            groups.append(TrajectoryGroup(uid=f"{step}:{(step * GROUPS + g) % 8000}", trajectories=tuple(trajectories)))
            answers = tuple("".join(words[ids[i, PROMPT:]]) for i in rows)
            texts.append(GroupText(prompt="".join(words[ids[g * N, :PROMPT]]), answers=answers))
        own = np.where(versions >= 0, logprobs + rng.normal(0, 0.01, logprobs.shape), 0).astype(np.float32)
        advantages = np.where(versions >= 0, rewards[:, None] - rewards.mean(), 0).astype(np.float32)
        yield StepRollouts(
            adapter="a",
            step=step,
            groups=tuple(groups),
            texts=tuple(texts),
            advantages=advantages.ravel(),
            trainer_logprobs=own.ravel(),
        )


def measure(folder: RunFolder, rollouts: int, tokens: int, limit_bytes: int) -> dict[str, float]:
    """Figures by name."""
    count = max(1, rollouts // (GROUPS * N))
    writer = RolloutWriter(folder, limit_bytes, lambda: [f"word{i} " for i in range(VOCABULARY)])
    handed, waiting = 0.0, 4 * TOKEN_BYTES * GROUPS * N * (PROMPT + tokens)
    distinct = list(steps(min(count, DISTINCT), tokens))
    began = time.process_time()
    for number in range(count):
        step = replace(distinct[number % len(distinct)], step=number)
        while writer.waiting_bytes > waiting:
            time.sleep(0.01)
        before = time.perf_counter()
        writer.write(step)
        handed += time.perf_counter() - before
    writer.close()
    written = time.process_time() - began
    total = count * GROUPS * N
    nbytes = sum(path.stat().st_size for path in folder.rollouts.iterdir())
    found = {
        "rollouts": float(total),
        "left out": float(writer.left_out),
        "hand over, us a rollout": 1e6 * handed / total,
        "write, us a rollout": 1e6 * written / total,
        "MiB on disk": nbytes / 2**20,
        "files": float(len(list(folder.rollouts.iterdir()))),
    }
    index = RolloutIndex(folder)
    began = time.process_time()
    found["first page, ms"] = _ms(lambda: index.page(RolloutFilter()))
    found["of that processor time, ms"] = 1e3 * (time.process_time() - began)
    found["kept"] = float(index.overview().kept)
    for name, chosen in FILTERS.items():
        found[f"{name}, ms"] = max(_ms(lambda chosen=chosen: index.page(chosen)) for _ in range(3))
    newest = index.page(RolloutFilter(), limit=1).rows[0]
    place = GroupPlace(adapter="a", step=newest.step, group=newest.group)
    found["a group, ms"] = max(_ms(lambda: index.group(place)) for _ in range(3))
    return found


def _ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=float, default=1e6)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--limit-mib", type=int, default=1024)
    parser.add_argument("--folder", type=Path, help="kept; a temporary one if unset")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(args.folder or Path(scratch))
        for name, value in measure(folder, int(args.rollouts), args.tokens, args.limit_mib << 20).items():
            print(f"{name:32} {value:,.2f}")


if __name__ == "__main__":
    main()

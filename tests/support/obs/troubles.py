"""Records of a healthy run, and of runs with planted troubles, each with words of its warning."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from areal_lora.obs.metrics.records import CheckpointRecord, MembersRecord, PublishRecord, Record, StepRecord
from areal_lora.obs.warnings import GAP, KL
from tests.support.obs.records import step_record

BEFORE, WITHIN = 12, 5
Trouble = Callable[[int], dict[str, Any]]
"""Fields of `step_record` that differ from a healthy step, by the number of troubled steps so far (1, 2, ...)."""


def healthy(rng: random.Random, step: int, **changed: Any) -> StepRecord:
    values: dict[str, Any] = {
        "reward_mean": min(1.0, max(0.0, rng.gauss(0.3 + 0.02 * step, 0.05))),
        "reward_std": abs(rng.gauss(0.4, 0.05)) + 0.01,
        "groups_equal": rng.uniform(0.0, 0.7),
        "truncated": rng.uniform(0.0, 0.2),
        "grad_norm": 0.4 * 2 ** rng.gauss(0, 0.7),
        "mismatch_fresh": 10 ** rng.uniform(-7, -2.5),
        "mismatch_stale": abs(rng.gauss(0.05, 0.02)),
        "groups_consumed": 8 * step,
        "step_s": 2.0,
        "wait_batch_s": rng.uniform(0.0, 1.8),
        "dropped": {"stale": step // 6},
        "metrics": {
            "extra/skipped": 0.0,
            "extra/capped_fraction": rng.uniform(0.0, 0.4),
            "reward_cost/seconds": abs(rng.gauss(0.05, 0.02)),
            "machine/controller/n1/core_share": rng.uniform(0.0, 0.85),
            "machine/trainer/n1/core_share": 1.0,
        },
    }
    values["metrics"] |= changed.pop("metrics", {})
    return step_record(step=step, version=step, time_s=2.0 * step, staleness={0: 100}, **(values | changed))


def flat(n: int) -> dict[str, Any]:
    return {"groups_equal": 1.0, "grad_norm": 0.0}


def causes(**gaps: float) -> dict[str, float]:
    return {prefix + cause: gap for cause, gap in gaps.items() for prefix in (GAP, KL)}


STEPS: dict[str, tuple[Trouble, str]] = {
    "flat reward": (lambda n: {"reward_mean": 0.5, "reward_std": 0.0}, "every answer has the reward 0.5"),
    "all groups equal": (flat, "raise sampling.n_samples"),
    "tokens outside of the bounds of w": (
        lambda n: {"grad_norm": 0.0, "metrics": {"extra/capped_fraction": 0.98 + 0.01 * min(n, 2)}},
        "of the tokens are dropped, w is outside of its bounds",
    ),
    "truncated answers": (lambda n: {"truncated": 0.9}, "raise sampling.max_new_tokens"),
    "a reward that raises": (
        lambda n: {"retried": {"scorer": n}, "faults": {"scorer": "TypeError: no (reward.py:9)"}},
        "rollouts failed: scorer: 1 retried, 0 dropped, last: TypeError: no (reward.py:9)",
    ),
    "a slow reward": (lambda n: {"wait_batch_s": 1.5, "metrics": {"reward_cost/seconds": 3.0}}, "raise reward.workers"),
    "a busy controller": (
        lambda n: {"wait_batch_s": 1.5, "metrics": {"machine/controller/n1/core_share": 0.96}},
        "the controller uses 96% of its one core",
    ),
    "stale groups": (lambda n: {"dropped": {"stale": 2 + 8 * n}}, "raise max_staleness"),
    "mismatch": (lambda n: {"mismatch_fresh": 0.2}, "model.dtype=float32"),
    "a mismatch without fresh tokens": (
        lambda n: {"metrics": causes(staleness=0.3, numerics=0.2)},
        "0.2 nats a token between trainer and servers: kernels",
    ),
    "an adapter that servers compute otherwise": (
        lambda n: {"metrics": causes(numerics=0.01, adapter=0.19) if n == 1 else causes(numerics=0.2)},
        "0.19 nats a token between trainer and servers: servers compute the adapter otherwise",
    ),
    "answers without routes": (lambda n: {"metrics": {"train/not_replayed": 3.0}}, "3 tokens a step have no routes"),
    "a policy that moves too fast": (lambda n: {"mismatch_stale": 0.9}, "lower optimizer.lr"),
    "exploding gradients": (lambda n: {"grad_norm": 40.0 * 2**n}, "lower optimizer.lr"),
    "gradients that are not finite": (lambda n: {"metrics": {"extra/skipped": 1.0}}, "not finite: lower optimizer.lr"),
}
RECORDS: dict[str, tuple[Record, str]] = {
    "a dead server": (PublishRecord(version=9, total_ms=1.0, lost={"server-1": "gone"}), "server-1 is excluded: gone"),
    "a server that left": (
        MembersRecord(version=9, servers=1, lost={"server-2": "late"}),
        "server-2 is excluded: late",
    ),
    "a full disk": (CheckpointRecord(version=9, write_s=0.0, failed=True), "checkpoint v9 was not written"),
}


def run_of(rng: random.Random, trouble: Trouble | None = None, steps: int = BEFORE + WITHIN) -> Iterator[StepRecord]:
    for step in range(steps):
        yield healthy(rng, step, **(trouble(step - BEFORE + 1) if trouble and step >= BEFORE else {}))

"""Random packed batches as plain lists of sequences, and as tensors in any order: for oracles and properties."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from areal_lora.types import TrainBatch

PER_TOKEN = ("current", "prox", "rollout", "ref", "entropy", "value")


@dataclass
class Row:
    """One sequence with everything that a loss may see of it, token by token."""

    group: int
    sample: int
    reward: float
    mask: list[bool]
    given: bool = False
    baseline: float = 0.0
    current: list[float] = field(default_factory=list)
    prox: list[float] = field(default_factory=list)
    rollout: list[float] = field(default_factory=list)
    ref: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)


def draw_rows(seed: int, *, groups: int = 5, given: float = 0.0) -> list[Row]:
    """Sequences of 2 to 12 tokens with interleaved masks; some samples have two of them. A share is ``given``."""
    rng, draw = random.Random(seed), random.Random(-seed)
    rows: list[Row] = []
    sample = 0
    for group in rng.sample(range(90), groups):
        baseline = draw.choice([0.0, 1.0])
        for _ in range(rng.randint(1, 5)):
            sample += 1
            reward = rng.choice([0.0, 1.0, 1.0, rng.random()])
            imitated = rng.random() < given
            for _ in range(rng.choice([1, 1, 2])):
                mask = [False, True, *(rng.random() < 0.7 for _ in range(rng.randint(0, 10)))]
                row = Row(group=group, sample=sample, reward=reward, mask=mask, given=imitated)
                row.prox = [-3 * rng.random() for _ in mask]
                row.current = [p + rng.gauss(0, 0.25) for p in row.prox]
                row.rollout = [p + rng.gauss(0, 0.4) for p in row.prox]
                row.ref = [p + rng.gauss(0, 0.3) for p in row.prox]
                row.entropy = [rng.random() for _ in mask]
                row.value, row.baseline = [draw.gauss(0.5, 0.3) for _ in mask], baseline
                rows.append(row)
    return rows


def packed(rows: Sequence[Row], name: str) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in getattr(row, name)], dtype=torch.float64)


def bounds(rows: Sequence[Row]) -> torch.Tensor:
    return torch.tensor([0, *(len(row.mask) for row in rows)]).cumsum(0)


def batch_of(rows: Sequence[Row]) -> TrainBatch:
    """The rows in this order; log-probabilities float64, 0 off the mask where a real batch has 0."""
    mask = torch.tensor([on for row in rows for on in row.mask])
    return TrainBatch(
        token_ids=torch.arange(mask.numel(), dtype=torch.int32),
        cu_seqlens=bounds(rows),
        loss_mask=mask,
        rollout_logprobs=packed(rows, "rollout") * mask,
        versions=torch.where(mask, 4, -1),
        shared_starts=torch.zeros(len(rows), dtype=torch.int64),
        rewards=torch.tensor([row.reward for row in rows], dtype=torch.float64),
        group_ids=torch.tensor([row.group for row in rows]),
        sample_ids=torch.tensor([row.sample for row in rows]),
        given=torch.tensor([row.given for row in rows]),
        adapters=("gsm8k",) * len(rows),
        prox_logprobs=packed(rows, "prox"),
        ref_logprobs=packed(rows, "ref"),
        values=packed(rows, "value"),
        baselines=torch.tensor([row.baseline for row in rows], dtype=torch.float64),
    )

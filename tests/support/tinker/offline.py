"""What programs and tests share without the SDK: data of losses with a sampler, and the losses in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LOSSES: tuple[tuple[str, dict[str, float]], ...] = (
    ("ppo", {}),
    ("cispo", {}),
    ("dro", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("cispo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}),
    ("dro", {"beta": 0.2}),
    ("ppo", {"clip_low_threshold": 0.9}),
    ("cispo", {"clip_high_threshold": 0.75}),
)
"""Of eight steps, with their settings."""
LOSS_RATE = 2e-3


def sampler_scores(n: int) -> list[float]:
    """Log-probabilities of ``n`` targets that a sampler may have had, around those of the tiny model."""
    return [-0.25 - 1.5 * (i * 7 % 5) for i in range(n)]


def advantages(n: int) -> list[float]:
    return [(i * 3 % 5 - 1.5) / 2 for i in range(n)]


def expected_loss(name: str, settings: dict[str, float], rows: Sequence[Sequence[float]]) -> float:
    """The sum of a loss, from the log-probabilities of the targets, as the SDK's documentation writes it."""
    total = 0.0
    for row in rows:
        new, old = np.array(row, np.float64), np.array(sampler_scores(len(row)), np.float64)
        gain, ratio = np.array(advantages(len(row)), np.float64), np.exp(new - old)
        low, high = ((settings.get(f"clip_{side}_threshold")) for side in ("low", "high"))
        parts: Any
        match name:
            case "ppo":
                clipped = np.clip(ratio, 0.8 if low is None else low, 1.2 if high is None else high)
                parts = np.minimum(ratio * gain, clipped * gain)
            case "cispo":
                parts = np.clip(ratio, low or 0.0, 4.0 if high is None else high) * new * gain
            case _:
                parts = new * gain - settings.get("beta", 0.05) / 2 * (new - old) ** 2
        total -= float(parts.sum())
    return total

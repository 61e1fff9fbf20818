"""The learning rate of a training step. Its unit is the training step: one batch, one new version, any minibatches."""

from __future__ import annotations

import math

from areal_lora.config.models import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Rate of training step ``step`` (from 0) of ``total_steps``: linear warm-up, then the schedule.

    A pure function of the version that is trained: it needs no state in a checkpoint, minibatches do not
    change it, steps that are skipped do not delay it, and a run that is made longer follows the longer schedule.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    span = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / span, 1.0)
    match config.schedule:
        case "constant":
            factor = 1.0
        case "linear":
            factor = 1.0 - progress
        case "cosine":
            factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)

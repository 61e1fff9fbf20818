"""Rules about values that a run accepts and that are seldom meant."""

from __future__ import annotations

from collections.abc import Iterator

from areal_lora.config.facts import Facts
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import Finding, Severity

HIGHEST_LR, MOST_SEQUENCES = 0.1, 65_536
"""A hundred times the usual learning rate of LoRA with Adam; four times the largest published batches of RL."""


def seldom_meant(config: Config, facts: Facts) -> Iterator[Finding]:
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client:
            continue
        at, sampling, optimizer = f"adapters.{i}", adapter.sampling, adapter.optimizer
        if optimizer.lr > HIGHEST_LR:
            yield Finding(
                path=f"{at}.optimizer.lr",
                reason=f"{optimizer.lr:g} lets Adam change each weight by about this much in a step",
                fix="usual values are 1e-6 to 1e-3",
                severity=Severity.WARNING,
            )
        if (sequences := sampling.prompts_per_step * sampling.n_samples) > MOST_SEQUENCES:
            yield Finding(
                path=f"{at}.sampling.prompts_per_step",
                reason=f"a step samples {sequences:,} answers before it trains",
                fix=f"usual steps have at most {MOST_SEQUENCES:,}",
                severity=Severity.WARNING,
            )
        if adapter.minibatches <= sampling.prompts_per_step and sampling.prompts_per_step % adapter.minibatches:
            yield Finding(
                path=f"{at}.minibatches",
                reason=f"{adapter.minibatches} minibatches of {sampling.prompts_per_step} prompts are of unequal size",
                fix="choose a divisor of sampling.prompts_per_step",
                severity=Severity.WARNING,
            )

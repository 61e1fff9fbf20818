"""Adam over one adapter's fp32 parameters, with gradients reduced and clipped across the layout.

Megatron's distributed optimizer shards the state of whole models. An adapter is small, and
every adapter must step alone (contract C1). Each has a plain AdamW of its own, written out: its memory is flat, and
the import of torch's optimizers loads torch's compiler, 0.8 s of a processor for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.base import AdamValues
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import spans
from areal_lora.types import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientClass:
    """Elements [start, end) of an adapter's memory whose gradients are reduced over the same groups.

    ``groups`` are those to sum over, one after the other. ``counted``: this rank's copy enters the norm.
    """

    start: int
    end: int
    groups: list[dist.ProcessGroup]
    counted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A run of an adapter's weights that learn at ``ratio`` times the rate, their gradients and moments: flat fp32."""

    weights: Tensor
    grads: Tensor
    first: Tensor
    second: Tensor
    ratio: float

    def step(self, values: AdamValues, lr: float, number: int) -> None:
        """Step ``number``, from 1, of AdamW (Loshchilov and Hutter 2019, algorithm 2), as torch computes it."""
        rate = lr * self.ratio
        if values.weight_decay:
            self.weights.mul_(1 - rate * values.weight_decay)
        self.first.lerp_(self.grads, 1 - values.beta1)
        self.second.mul_(values.beta2).addcmul_(self.grads, self.grads, value=1 - values.beta2)
        scale = self.second.sqrt().div_((1 - values.beta2**number) ** 0.5).add_(values.eps)
        self.weights.addcdiv_(self.first, scale, value=-rate / (1 - values.beta1**number))


class AdapterOptimizer:
    """AdamW of one adapter on one rank; `AdapterMemory` holds its weights, gradients and moments.

    lora_B learns ``lora_plus_ratio`` times as fast as lora_A (LoRA+, Hayou et al. 2024, arXiv 2402.12354, section 4).
    The decay of a weight follows its own learning rate, as in AdamW. Clipping and the norm do not depend on the ratio.
    """

    def __init__(self, config: OptimizerConfig, memory: AdapterMemory, classes: Sequence[GradientClass]) -> None:
        self._values = AdamValues.of(config)
        self._classes = classes
        self._grads = memory.grads
        self.step_count = 0
        self._parts = [
            _Part(
                weights=memory.weights[span.start : span.end],
                grads=memory.grads[span.start : span.end],
                first=memory.moments["exp_avg"][span.start : span.end],
                second=memory.moments["exp_avg_sq"][span.start : span.end],
                ratio=config.lora_plus_ratio if span.is_b else 1.0,
            )
            for span in spans(memory.arena, apart=config.lora_plus_ratio != 1)
        ]

    def step(self, denominator: float, lr: float, adam: AdamValues | None = None) -> StepStats:
        """Divide, reduce, check, clip, step; gradients are zero afterwards. Collective.

        ``adam`` takes the place of the configured values.
        """
        values = adam or self._values
        norm = self._reduce(denominator)
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = 1.0 if values.max_grad_norm is None else min(1.0, values.max_grad_norm / (norm + 1e-6))
            if factor < 1.0:
                self._grads.mul_(factor)
            self.step_count += 1
            for part in self._parts:
                part.step(values, lr, self.step_count)
        # Kept and zeroed: the modules' gradients are views of it.
        self._grads.zero_()
        return StepStats(values={"grad_norm": norm, "lr": lr, "skipped": float(skipped)})

    def _reduce(self, denominator: float) -> float:
        """Leave the whole, divided gradient on every rank; return its norm over all unique elements."""
        squares = torch.zeros(1, dtype=torch.float64)
        self._grads.div_(denominator)
        for part in self._classes:
            flat = self._grads[part.start : part.end]
            for group in part.groups:
                dist.all_reduce(flat, group=group)
            if part.counted:
                squares += flat.double().square().sum().cpu()
        # NaN and infinity survive the sum: every rank takes the same decision.
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def set_clock(self, step: int) -> None:
        """Set Adam's step count to ``step``; the caller has restored the adapter's weights and moments."""
        self.step_count = step

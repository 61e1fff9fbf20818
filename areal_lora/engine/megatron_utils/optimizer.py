"""Adam over one adapter's fp32 parameters, with gradients reduced and clipped across the layout.

Megatron's distributed optimizer shards the state of whole models. An adapter is small, and
every adapter must step alone (contract C1). Each has a plain AdamW of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.megatron_utils.adapter_memory import AdapterMemory
from areal_lora.engine.megatron_utils.arena import Range
from areal_lora.types import ExpertLayout, StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientClass:
    """Elements [begin, end) of an adapter's memory whose gradients are reduced over the same groups.

    ``groups`` are those to sum over, one after the other. ``counted``: this rank's copy enters the norm.
    """

    begin: int
    end: int
    groups: list[dist.ProcessGroup]
    counted: bool


def classify(memory: AdapterMemory) -> list[GradientClass]:
    """The groups over which the gradients of each range of a rank's memory must be summed.

    Split tensors are whole after the sum over their replicas, replicated ones need their tensor-parallel
    ranks' parts as well (see `lora`). The gradient of an adapter of all experts covers this rank's experts only: its
    replicas include the expert-parallel ranks. Each element counts once in the norm.
    """
    layout, rank = memory.model.layout, memory.rank
    dense = [parallel_state.get_data_parallel_group(with_context_parallel=True)]
    experts = [parallel_state.get_expert_data_parallel_group()]
    first_dense, first_expert = layout.dp_rank(rank) == 0, layout.edp_rank(rank) == 0
    if memory.spec.expert_layout is ExpertLayout.SHARED:
        experts.append(parallel_state.get_expert_model_parallel_group())
        first_expert = first_expert and layout.ep_rank(rank) == 0
    tp, etp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    rows = (
        (Range.DENSE_SPLIT, dense, first_dense),
        (Range.DENSE_WHOLE, [tp, *dense], first_dense and layout.tp_rank(rank) == 0),
        (Range.EXPERT_SPLIT, experts, first_expert),
        (Range.EXPERT_WHOLE, [etp, *experts], first_expert and layout.etp_rank(rank) == 0),
    )
    classes = []
    for part, groups, counted in rows:
        begin, end = memory.arena.extent(part)
        if end > begin:
            needed = [group for group in groups if dist.get_world_size(group) > 1]
            classes.append(GradientClass(begin=begin, end=end, groups=needed, counted=counted))
    return classes


class AdapterOptimizer:
    """AdamW of one adapter on one rank; `AdapterMemory` holds its weights, gradients and moments."""

    def __init__(self, config: OptimizerConfig, memory: AdapterMemory) -> None:
        self._config = config
        self._classes = classify(memory)
        self._grads = memory.grads
        self._weights = nn.Parameter(memory.weights)
        self._weights.grad = self._grads
        self.step_count = 0
        self._adam = torch.optim.AdamW(
            [self._weights],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        # Without these Adam would allocate moments at the first step.
        self._adam.state[self._weights] = {"step": torch.tensor(0.0), **memory.moments}

    def step(self, denominator: float, lr: float) -> StepStats:
        """Divide, reduce, check, clip, step; gradients are zero afterwards. Collective."""
        norm = self._reduce(denominator)
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            if factor < 1.0:
                self._grads.mul_(factor)
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.step_count += 1
        # Kept and zeroed: the modules' gradients are views of it.
        self._grads.zero_()
        return StepStats(values={"grad_norm": norm, "lr": lr, "skipped": float(skipped)})

    def _reduce(self, denominator: float) -> float:
        """Leave the whole, divided gradient on every rank; return its norm over all unique elements."""
        squares = torch.zeros(1, dtype=torch.float64)
        self._grads.div_(denominator)
        for part in self._classes:
            flat = self._grads[part.begin : part.end]
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
        self._adam.state[self._weights]["step"].fill_(float(step))

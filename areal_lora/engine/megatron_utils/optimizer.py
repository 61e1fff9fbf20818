"""Adam over one adapter's fp32 parameters, with gradients reduced and clipped across the layout.

Megatron's distributed optimizer shards the state of whole models. An adapter is small, and
every adapter must step alone (contract C1), so each has a plain AdamW of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.megatron_utils.layout import Layout
from areal_lora.engine.megatron_utils.lora import AdapterSite
from areal_lora.types import StepStats


def lr_at(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step ``step`` (from 0): linear warm-up, then the schedule to ``min_lr_ratio``."""
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


@dataclass(frozen=True, slots=True)
class ParameterClass:
    """Parameters whose gradients are reduced alike. ``counted``: this rank's copy enters the norm."""

    parameters: list[nn.Parameter]
    groups: list[dist.ProcessGroup]
    counted: bool


def classify(sites: Sequence[AdapterSite], layout: Layout, rank: int) -> list[ParameterClass]:
    """Split an adapter's parameters by what their gradients must be summed over.

    Split tensors are whole after the data-parallel sum, replicated ones need their
    tensor-parallel ranks' parts as well (see `lora`). Each element counts once in the norm.
    """
    classes = []
    for expert in (False, True):
        if expert:
            tp_group = parallel_state.get_expert_tensor_parallel_group()
            dp_group = parallel_state.get_expert_data_parallel_group()
            tp_rank, dp_rank = layout.etp_rank(rank), layout.edp_rank(rank)
        else:
            tp_group = parallel_state.get_tensor_model_parallel_group()
            dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            tp_rank, dp_rank = layout.tp_rank(rank), layout.dp_rank(rank)
        for split in (False, True):
            parameters = [
                parameter
                for site in sites
                if (site.expert is not None) == expert
                for parameter, dim in ((site.module.lora_A, site.a_split), (site.module.lora_B, site.b_split))
                if (dim is not None) == split
            ]
            if parameters:
                groups = [dp_group] if split else [tp_group, dp_group]
                counted = dp_rank == 0 and (split or tp_rank == 0)
                classes.append(ParameterClass(parameters, groups, counted))
    return classes


class AdapterOptimizer:
    """Gradients, moments, clock and learning rate of one adapter on one rank."""

    def __init__(
        self, config: OptimizerConfig, total_steps: int, sites: Sequence[AdapterSite], layout: Layout, rank: int
    ) -> None:
        self._config = config
        self._total_steps = total_steps
        self._classes = classify(sites, layout, rank)
        self.parameters = [p for c in self._classes for p in c.parameters]
        self.step_count = 0
        self._adam = torch.optim.AdamW(
            self.parameters, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps,
            weight_decay=config.weight_decay, foreach=True,
        )

    def step(self, denominator: float) -> StepStats:
        """Divide, reduce, check, clip, step; gradients are zero afterwards. Collective."""
        norm = self._reduce(denominator)
        lr = lr_at(self._config, self.step_count, self._total_steps)
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
            if factor < 1.0:
                torch._foreach_mul_([p.grad for p in self.parameters], factor)
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            self.step_count += 1
        self._adam.zero_grad(set_to_none=True)
        return StepStats(values={"grad_norm": norm, "lr": lr, "skipped": float(skipped)})

    def _reduce(self, denominator: float) -> float:
        """Leave the whole, divided gradient on every rank; return its norm over all unique elements."""
        squares = torch.zeros(1, dtype=torch.float64)
        for group_of in self._classes:
            flat = torch.cat([_gradient(p).reshape(-1) for p in group_of.parameters])
            flat /= denominator
            for group in group_of.groups:
                if dist.get_world_size(group) > 1:
                    dist.all_reduce(flat, group=group)
            offset = 0
            for parameter in group_of.parameters:
                parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
                offset += parameter.numel()
            if group_of.counted:
                squares += flat.double().square().sum().cpu()
        # NaN and infinity survive the sum, so every rank sees the same verdict.
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, moments and step count of this rank as flat tensors (clones)."""
        state = {"step": torch.tensor([self.step_count], dtype=torch.int64)}
        for index, parameter in enumerate(self.parameters):
            moments = self._adam.state.get(parameter, {})
            state[f"{index}.weight"] = parameter.detach().clone()
            for name in ("exp_avg", "exp_avg_sq"):
                state[f"{index}.{name}"] = moments.get(name, torch.zeros_like(parameter)).clone()
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Inverse of `state_dict` for the same layout and rank."""
        self.step_count = int(state["step"])
        for index, parameter in enumerate(self.parameters):
            with torch.no_grad():
                parameter.copy_(state[f"{index}.weight"])
            self._adam.state[parameter] = {
                "step": torch.tensor(float(self.step_count)),
                **{name: state[f"{index}.{name}"].clone() for name in ("exp_avg", "exp_avg_sq")},
            }


def _gradient(parameter: nn.Parameter) -> Tensor:
    """An expert that saw no token has no gradient: that is zero, not absence."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

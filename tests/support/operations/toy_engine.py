"""A trainer engine whose adapters have one logit per token of the vocabulary: real gradients and a plain Adam, at once.

The log-probability of a token is that of a softmax over the logits, whatever comes before it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lora.checkpoint.state import PARTS, AdapterState
from areal_lora.config.models import OptimizerConfig
from areal_lora.data.collate import select
from areal_lora.engine.base import AdamValues, LossFn
from areal_lora.engine.common.adapter_optimizer import SLICE_BYTES
from areal_lora.obs.trace import Spans
from areal_lora.types import AdapterSpec, StepStats, TrainBatch

VOCABULARY = 32
NAME = "logits.weight"


@dataclass(slots=True)
class Resident:
    """``parts`` are weights and moments, [V] each."""

    spec: AdapterSpec
    optimizer: OptimizerConfig
    memory: Any = field(default_factory=lambda: SimpleNamespace(groups=1))
    parts: dict[str, Tensor] = field(default_factory=lambda: {part: torch.zeros(VOCABULARY) for part in PARTS})
    gradient: Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY))
    step_count: int = 0

    def trained(self) -> Resident:
        return self


def parts_of(batch: TrainBatch) -> list[tuple[str, TrainBatch]]:
    """The sequences of each adapter, which follow each other."""
    every = range(batch.n_sequences)
    return [(name, select(batch, list(rows))) for name, rows in groupby(every, key=batch.adapters.__getitem__)]


class ToyEngine:
    rank, world_size, routed = 0, 1, False
    device = torch.device("cpu")

    padding = 0
    """Zeros at the end of each part of a state."""

    def __init__(self) -> None:
        self.copies = threading.Event()
        """Unset: states need further copies for ever."""
        self.copies.set()
        self.residents: dict[str, Resident] = {}
        self.passes = 0
        self.spans = Spans()

    def add_adapter(self, spec: AdapterSpec, optimizer: OptimizerConfig, seed: int) -> None:
        self.residents[spec.name] = Resident(spec, optimizer)

    def remove_adapter(self, adapter: str) -> None:
        del self.residents[adapter]

    def logprobs_of_each(self, batch: TrainBatch) -> Tensor:
        return torch.cat([self._scores(part, self.residents[name].parts["weight"]) for name, part in parts_of(batch)])

    def forward_backward_of_each(
        self, batch: TrainBatch, losses: Mapping[str, LossFn], *, scores: Tensor
    ) -> dict[str, dict[str, float]]:
        self.passes += 1
        found, sums = list[Tensor](), dict[str, dict[str, float]]()
        for name, part in parts_of(batch):
            logits = self.residents[name].parts["weight"].clone().requires_grad_()
            found.append(self._scores(part, logits))
            loss = losses[name](part, found[-1], None).loss
            loss.backward()
            assert logits.grad is not None
            self.residents[name].gradient += logits.grad
            sums[name] = {"loss": float(loss.detach())}
        scores.copy_(torch.cat(found).detach())
        return sums

    def optim_step(self, adapter: str, denominator: float, lr: float, adam: AdamValues | None = None) -> StepStats:
        """AdamW (Loshchilov and Hutter, arXiv 1711.05101), bias-corrected."""
        it, values = self.residents[adapter], adam or AdamValues.of(self.residents[adapter].optimizer)
        gradient, it.gradient = it.gradient / denominator, torch.zeros(VOCABULARY)
        norm = float(gradient.double().norm())
        if not math.isfinite(norm):
            return StepStats(values={"grad_norm": norm, "lr": lr, "skipped": 1.0})
        if values.max_grad_norm is not None:
            gradient = gradient * min(1.0, values.max_grad_norm / (norm + 1e-6))
        it.step_count += 1
        weight, first, second = (it.parts[part] for part in PARTS)
        first.mul_(values.beta1).add_(gradient, alpha=1 - values.beta1)
        second.mul_(values.beta2).add_(gradient**2, alpha=1 - values.beta2)
        weight.mul_(1 - lr * values.weight_decay)
        root = (second / (1 - values.beta2**it.step_count)).sqrt() + values.eps
        weight.sub_(lr * first / (1 - values.beta1**it.step_count) / root)
        return StepStats(values={"grad_norm": norm, "lr": lr, "skipped": 0.0})

    def discard_gradients(self, adapter: str) -> None:
        self.residents[adapter].gradient.zero_()

    def resident(self, name: str) -> Resident:
        return self.residents[name]

    def base_digest(self) -> str:
        return "toy"

    def copy_state(self, adapter: str, *, moments: bool = True) -> tuple[AdapterState, Iterator[None]]:
        it = self.residents[adapter]
        parts = {part: np.empty(VOCABULARY + self.padding, "<f4") for part in it.parts if moments or part == PARTS[0]}

        def copying() -> Iterator[None]:
            for part in parts:
                parts[part][:VOCABULARY] = it.parts[part].numpy()
                for at in range(VOCABULARY, len(parts[part]), SLICE_BYTES // 4):
                    parts[part][at : at + SLICE_BYTES // 4] = 0
                    yield
                yield
            while not self.copies.wait(0.001):
                yield

        return AdapterState(step=it.step_count, shapes={NAME: parts["weight"].shape}, parts=parts), copying()

    def load_state(self, adapter: str, parts: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
        it = self.residents[adapter]
        it.parts = {part: torch.tensor(np.asarray(parts[part][NAME])[:VOCABULARY]) for part in PARTS}
        it.step_count = step

    def _scores(self, batch: TrainBatch, logits: Tensor) -> Tensor:
        first = torch.zeros(batch.n_tokens, dtype=torch.bool)
        first[batch.cu_seqlens[:-1]] = True
        return torch.where(first, 0.0, torch.log_softmax(logits, 0)[batch.token_ids])

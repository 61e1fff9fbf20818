"""The interface between the training loop and a trainer engine.

One process per rank, all ranks call the same verbs in the same order (SPMD)::

    engine.add_adapter(spec, optimizer, seed)
    logp = engine.logprobs(batch, adapter="math")              # [T], whole batch, on every rank
    stats = engine.forward_backward(minibatch, loss_fn)        # sums into the adapter's gradients
    step = engine.optim_step("math", denominator=n_tokens, lr=1e-4)  # divide, reduce, clip, Adam
    for done in engine.pack_adapter("math", "float32", flat): ...  # this rank's share of the publish

A `TrainBatch` is whole and equal on every rank; the engine picks its data-parallel part, cuts
it into micro-batches and pads as its layout needs. Callers never see padding (contract C10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from areal_lora.algorithms.merging import CastLoss
from areal_lora.checkpoint.state import AdapterState
from areal_lora.config.models import OptimizerConfig
from areal_lora.types import AdapterSpec, StepStats, TrainBatch
from areal_lora.weight_sync.layout import AdapterLayout

MicroBatch = TrainBatch
"""A few whole sequences of a `TrainBatch`, packed 1-D without padding, on the engine's device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Result of a loss function for one micro-batch: plain sums, no denominators.

    ``loss`` is a scalar with grad: the SUM over the micro-batch's tokens (the engine never
    divides by anything but ``optim_step``'s denominator). ``stats`` are sums as well; the
    engine adds them up over micro-batches and data-parallel ranks.
    """

    loss: torch.Tensor
    stats: Mapping[str, float | torch.Tensor] = field(default_factory=dict)


LossFn = Callable[[MicroBatch, torch.Tensor, torch.Tensor | None], LossSums]
"""``loss_fn(micro_batch, scores [t] fp32 with grad, entropy [t] fp32 or None) -> LossSums``.

``scores[i]`` describes token i of the micro-batch; entry 0 of every sequence is 0. It is the token's
log-probability, or, of an adapter with a value head, the value of the state before the token. Entropy
at entry i is that of the distribution token i was drawn from. With tensor parallelism
every tensor-parallel rank calls it on equal inputs and must return equal sums.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamValues:
    """What an optimizer step takes besides its rate. ``max_grad_norm`` None: no clipping."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float | None

    @classmethod
    def of(cls, config: OptimizerConfig) -> AdamValues:
        return cls(
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )


class TrainEngine(Protocol):
    """The verbs of a trainer rank. Each call is collective over all ranks unless its docstring states otherwise."""

    rank: int
    world_size: int
    routed: bool  # whether the model chooses experts for each token

    @property
    def device(self) -> torch.device: ...

    def add_adapter(self, spec: AdapterSpec, optimizer: OptimizerConfig, seed: int) -> None:
        """Make a trainable adapter resident beside the others: lora_A kaiming-uniform, lora_B zero, all fp32.

        Each has gradients, moments, clipping and clock of its own; what is done to one changes no byte of another.

        The initial values depend on ``seed`` and the tensor's Hugging Face name only, so they
        are equal for every layout. A value head is zero at first. ``optimizer`` configures Adam and clipping; the
        learning rate is an argument of each step. Raises ConfigError for a target module that matches nothing or a
        name that is resident already.
        """
        ...

    def freeze_copy(self, adapter: str, name: str) -> None:
        """Hold a copy of the weights of ``adapter`` as the frozen adapter ``name`` (not collective).

        It has neither gradients nor moments, and no later step changes it; a second call replaces its weights. Its
        state is its weights.
        """
        ...

    def remove_adapter(self, adapter: str) -> None:
        """Forget a resident adapter and free its memory (not collective)."""
        ...

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> torch.Tensor:
        """log p(token t | tokens before it), [T] fp32, no grad, for the whole batch on every rank.

        Entry 0 of each sequence is 0. ``adapter=None`` scores the frozen base (KL reference, C11). Raises
        AdapterError for an adapter with a value head.
        """
        ...

    def values(self, batch: TrainBatch, *, adapter: str) -> torch.Tensor:
        """Value of the state before token t, by the value head of ``adapter``: as `logprobs`, [T] fp32.

        Entry 0 of each sequence is 0. Raises AdapterError for an adapter without a value head.
        """
        ...

    def forward_backward(
        self,
        batch: TrainBatch,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        need_entropy: bool = False,
        scores: torch.Tensor | None = None,
    ) -> dict[str, float]:
        """Add the gradients of the summed loss to those of the adapter that the batch names.

        Gradients stay local and undivided until `optim_step`. Returns the loss functions'
        sums over all micro-batches and data-parallel ranks (``loss`` and every stat), each
        token counted once, equal on every rank. ``scores`` [T] fp32 on the host is filled with what the
        loss functions saw of each token of the whole batch, on every rank. Raises AdapterError for a batch that names
        several adapters or one that is not resident.
        """
        ...

    def optim_step(self, adapter: str, denominator: float, lr: float, adam: AdamValues | None = None) -> StepStats:
        """Divide the gradients by ``denominator``, reduce, clip by the adapter's norm, Adam step at ``lr``.

        ``adam`` takes the place of the configured values in this step alone.

        Returns ``grad_norm`` (before clipping), ``lr`` and ``skipped`` (1.0 when a gradient was
        not finite on some rank: weights and moments are then untouched). Gradients are zero
        afterwards in every case.
        """
        ...

    def discard_gradients(self, adapter: str) -> None:
        """Forget the gradients since the last step, as if no batch had been passed (not collective)."""
        ...

    def step_count(self, adapter: str) -> int:
        """The optimizer steps that the adapter has taken, skipped ones aside (not collective)."""
        ...

    def adapter_spec(self, adapter: str) -> AdapterSpec:
        """The specification that the adapter was added with (not collective)."""
        ...

    def adapter_sources(self) -> frozenset[int]:
        """Ranks that own wire tensors of any adapter that could be added (not collective, equal on all ranks)."""
        ...

    def adapter_layout(self, adapter: str, dtype: str = "float32") -> AdapterLayout:
        """Sender and offset of every wire tensor, and which names share one (not collective, equal on all ranks)."""
        ...

    def pack_adapter(self, adapter: str, dtype: str, flat: np.ndarray) -> Iterator[int]:
        """Fill ``flat`` (uint8, host) with this rank's shard of ``adapter_layout(adapter, dtype)``; see `Pack`.

        Collective over the tensor-parallel groups of the ranks that send: every rank must run the
        iterator to its end before the weights change. A rank without a shard gives an empty ``flat``.
        """
        ...

    def merged_layout(self, adapter: str, dtype: str) -> AdapterLayout:
        """The layout of the weights that the adapter changes (not collective, equal on all ranks)."""
        ...

    def pack_merged(self, adapter: str, loss: CastLoss, flat: np.ndarray) -> Iterator[int]:
        """Fill ``flat`` with this rank's shard of ``merged_layout`` in ``loss.dtype``, as the adapter is now.

        Each weight is base + alpha / rank * lora_B @ lora_A, computed in fp32 out of place and cast last; ``loss``
        counts what the cast loses. Collective like `pack_adapter`, but only until the call returns: the iterator
        reads no tensor of the model that trains. Raises UnknownTensorError for a base folder that does not fit.
        """
        ...

    def export_adapter(self, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The wire tensors this rank owns: whole, contiguous fp32 copies, in `adapter_layout` order.

        The iterator makes the copies as it runs, a few MiB at a time. Collective like `pack_adapter`: every rank
        must start at once and run the iterator to its end before the weights change.
        """
        ...

    def load_adapter(self, adapter: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set the adapter's weights from whole wire tensors, equal on every rank (not collective).

        Alias names may be present when they equal their wire tensor. Raises
        UnknownTensorError for unknown or missing names, AdapterError for wrong shapes or unequal
        aliases. Optimizer moments are kept.
        """
        ...

    def base_digest(self) -> str:
        """Digest of the frozen base, for manifests and checkpoints (not collective)."""
        ...

    def export_state(self, adapter: str) -> AdapterState:
        """Host copies of the weights and moments that this rank owns, and the step count. Collective like a publish.

        The states of all ranks together are the whole state and do not depend on the layout.
        """
        ...

    def load_state(self, adapter: str, parts: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
        """Inverse of `export_state` in any layout: whole wire tensors by part, equal on every rank (not collective).

        Raises like `load_adapter`, before any value has changed.
        """
        ...

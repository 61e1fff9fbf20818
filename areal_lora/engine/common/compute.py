"""What an engine's model is to the verbs of a trainer rank (`adapter_engine`)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch.distributed as dist

from areal_lora.data.collate import MicroPlan
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.adapter_optimizer import GradientClass
from areal_lora.engine.common.arena import Range
from areal_lora.engine.common.micro_batches import BatchJudge, Result
from areal_lora.engine.layers.active import ActiveAdapters
from areal_lora.engine.layers.attention import PackedMicroBatch
from areal_lora.engine.layers.served_weights import ServedSite


class Compute(Protocol):
    """The frozen base on this rank with the adapters attached to it. Every call but `detach` is collective."""

    active: ActiveAdapters
    groups: Mapping[Range, dist.ProcessGroup]
    """The tensor-parallel groups of the split ranges."""

    def attach(self, memory: AdapterMemory) -> Sequence[GradientClass]:
        """Add the adapter in ``memory`` to the model's layers; its gradients accumulate in ``memory``.

        Returns which ranks share them. Raises UnknownTensorError for a layer that the model lacks on this rank.
        """

    def detach(self, name: str) -> None:
        """Forget an attached adapter (not collective)."""

    def served_sites(self, merged: AdapterMemory | None) -> Iterator[ServedSite]:
        """The linear layers that servers quantise, with the part of an attached adapter in each."""

    def run(
        self, batches: Iterator[PackedMicroBatch], plans: Sequence[MicroPlan], judge: BatchJudge, *, train: bool
    ) -> list[Result]:
        """Run every micro-batch; the results on the last pipeline stage, elsewhere nothing.

        ``train``: the gradients of what ``judge`` returns are accumulated.
        """

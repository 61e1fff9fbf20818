"""The optimizer of an adapter on one rank, and copies of its state for checkpoints.

Every adapter steps alone (contract C1), by a plain AdamW of its own, written out: its memory is flat, and
the import of torch's optimizers loads torch's compiler, 0.8 s of a processor for each rank. Ranks with replicas of the
same elements share the work and the moments (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5)::

    gradients of all replicas --reduce-scatter--> own part --Adam with own moments--> own weights --all-gather--> all

Gathered, the moments are arranged like the weights, so the same plans move them to checkpoints and back.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.checkpoint.state import MOMENTS, PARTS, WEIGHT, AdapterState
from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.base import AdamValues
from areal_lora.engine.common.adapter_memory import AdapterMemory
from areal_lora.engine.common.arena import Range, Span, spans
from areal_lora.types import StepStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientClass:
    """Elements [start, end) of an adapter's memory of which the same ranks have replicas.

    The gradients are summed over ``groups``, one after the other. A rank steps a part that no other rank steps.
    """

    start: int
    end: int
    groups: list[dist.ProcessGroup]

    def nested(self) -> list[tuple[int, int]]:
        """The elements [start, end), then those that this rank keeps after the sum over each of the groups."""
        found = [(self.start, self.end)]
        for group in self.groups:
            start, end = found[-1]
            each = (end - start) // dist.get_world_size(group)
            start += each * dist.get_rank(group)
            found.append((start, start + each))
        return found


@dataclass(frozen=True, slots=True)
class _Level:
    """A rank has elements [start, end) ``own``, and after a gather over ``group`` ``outer``; without one a copy."""

    group: dist.ProcessGroup | None
    outer: tuple[int, int]
    own: tuple[int, int]

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)


NORM_CHUNK = 2**22
"""Elements whose squares are in fp64 at a time: 64 MiB for a moment, whatever the size of the adapter."""


class AdapterOptimizer:
    """AdamW of one adapter on one rank; `AdapterMemory` holds its weights and gradients.

    ``moments`` are flat fp32, of the elements that this rank steps. lora_B learns ``lora_plus_ratio`` times as fast as
    lora_A (LoRA+, Hayou et al. 2024, arXiv 2402.12354, section 4). The decay of a weight follows its own learning rate,
    as in AdamW. Clipping and the norm do not depend on the ratio.
    """

    def __init__(self, config: OptimizerConfig, memory: AdapterMemory, classes: Sequence[GradientClass]) -> None:
        self._values = AdamValues.of(config)
        self._weights, self._grads = memory.weights, memory.grads
        self._classes = [(part.groups, part.nested()) for part in classes]
        self._own = [bounds[-1] for _, bounds in self._classes]
        size = sum(end - start for start, end in self._own)
        self.moments = {name: torch.zeros(size, device=memory.weights.device) for name in MOMENTS}
        self.step_count = 0
        self._runs = list(self._split(spans(memory.arena, apart=config.lora_plus_ratio != 1), config.lora_plus_ratio))
        """Weights, gradients and moments of a run of own elements, and at how many times the rate they learn."""

    def _split(self, parts: Sequence[Span], ratio: float) -> Iterator[tuple[list[Tensor], float]]:
        at = 0
        for first, last in self._own:
            for part in parts:
                start, end = max(first, part.start), min(last, part.end)
                if start < end:
                    moments = (self.moments[name][at : at + end - start] for name in MOMENTS)
                    yield [self._weights[start:end], self._grads[start:end], *moments], ratio if part.is_b else 1.0
                    at += end - start

    def step(self, denominator: float, lr: float, adam: AdamValues | None = None) -> StepStats:
        """Divide, reduce, check, clip, step; gradients are zero afterwards. Collective.

        ``adam`` takes the place of the configured values.
        """
        values = adam or self._values
        norm = self._reduce(denominator)
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = 1.0 if values.max_grad_norm is None else min(1.0, values.max_grad_norm / (norm + 1e-6))
            self.step_count += 1
            for (weights, grads, first, second), ratio in self._runs:
                if factor < 1.0:
                    grads.mul_(factor)
                # AdamW (Loshchilov and Hutter 2019, algorithm 2), as torch computes it.
                rate = lr * ratio
                if values.weight_decay:
                    weights.mul_(1 - rate * values.weight_decay)
                first.lerp_(grads, 1 - values.beta1)
                second.mul_(values.beta2).addcmul_(grads, grads, value=1 - values.beta2)
                scale = second.sqrt().div_((1 - values.beta2**self.step_count) ** 0.5).add_(values.eps)
                weights.addcdiv_(first, scale, value=-rate / (1 - values.beta1**self.step_count))
            self._gather(self._weights)
        # Kept and zeroed: the modules' gradients are views of it.
        self._grads.zero_()
        return StepStats(values={"grad_norm": norm, "lr": lr, "skipped": float(skipped)})

    def whole_moment(self, name: str) -> tuple[Tensor, Iterator[None]]:
        """A moment of all elements of this rank's memory, flat fp32 [arena.size], and what fills it, a slice each time.

        Collective; all ranks get as many slices. It is no copy where this rank steps all elements.
        """
        moment, alone = self.moments[name], len(self.moments[name]) == len(self._weights)
        parts = dict(zip(self._own, moment.split([end - start for start, end in self._own]), strict=True))
        whole = moment if alone else torch.empty_like(self._weights)
        cuts = []
        for level in self._levels() if not alone else ():
            each, width = level.own[1] - level.own[0], max(1, SLICE_BYTES // 4 // level.ranks)
            cuts += [(level, slice(at, min(at + width, each))) for at in range(0, each, width)]
        most = torch.tensor(len(cuts))
        dist.all_reduce(most, dist.ReduceOp.MAX)  # pipeline stages have memory of several sizes

        def filling() -> Iterator[None]:
            for level, columns in cuts:
                source = parts.get(level.own, whole[slice(*level.own)])[columns]
                rows = whole[slice(*level.outer)].view(level.ranks, -1)[:, columns]
                if level.group is None:
                    rows[0] = source
                else:
                    room = torch.empty(rows.shape, device=rows.device)
                    dist.all_gather_single(room.view(-1), source, group=level.group)
                    rows.copy_(room)
                yield
            yield from repeat(None, int(most) - len(cuts))

        return whole, filling()

    def load_moment(self, name: str, whole: Tensor) -> None:
        """Set a moment; the inverse of `whole_moment`, but not collective."""
        own = self.moments[name].split([end - start for start, end in self._own])
        for (start, end), mine in zip(self._own, own, strict=True):
            mine.copy_(whole[start:end])

    def _reduce(self, denominator: float) -> float:
        """Leave the whole, divided gradient in the own elements; return its norm over the elements of all ranks."""
        total = torch.zeros(1, dtype=torch.float64, device=self._grads.device)
        self._grads.div_(denominator)
        for groups, bounds in self._classes:
            for group, (outer, own) in zip(groups, pairwise(bounds), strict=True):
                dist.reduce_scatter_single(self._grads[slice(*own)], self._grads[slice(*outer)], group=group)
            for chunk in self._grads[slice(*bounds[-1])].split(NORM_CHUNK):
                total += chunk.double().square_().sum()
        squares = total.cpu()
        # NaN and infinity survive the sum: every rank takes the same decision.
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def _gather(self, flat: Tensor) -> None:
        """Fill ``flat`` [arena.size], of which each rank has its own elements."""
        for level in self._levels():
            if level.group is not None:
                dist.all_gather_single(flat[slice(*level.outer)], flat[slice(*level.own)], group=level.group)

    def _levels(self) -> Iterator[_Level]:
        for groups, bounds in self._classes:
            for group, (outer, own) in zip(reversed(groups), reversed(list(pairwise(bounds))), strict=True):
                yield _Level(group, outer, own)
            if not groups:
                yield _Level(None, bounds[-1], bounds[-1])


SLICE_BYTES = 4 << 20
"""Of a state that is copied while others compute, on the rank with most of it."""


def copy_state(
    memory: AdapterMemory,
    optimizer: AdapterOptimizer | None,
    groups: Mapping[Range, dist.ProcessGroup],
    *,
    moments: bool = True,
) -> tuple[AdapterState, Iterator[None]]:
    """See `AdapterEngine.copy_state`; without ``optimizer`` the weights alone."""
    packer = memory.packer("float32")
    shard, most = packer.shard, max(each.nbytes for each in memory.layout("float32").shards)
    size = shard.nbytes // 4 if shard else 0
    parts = {part: np.empty(size, np.float32) for part in (PARTS if optimizer and moments else (WEIGHT,))}

    def copying() -> Iterator[None]:
        for part, values in parts.items():  # one moment is whole at a time
            source = memory.weights
            if optimizer and part != WEIGHT:
                source, filling = optimizer.whole_moment(part)
                yield from filling
            sections = packer.sections(source, groups)
            for done in range(SLICE_BYTES, most + SLICE_BYTES, SLICE_BYTES):
                for start, _, section in sections:
                    torch.from_numpy(values[start // 4 :][: len(section)]).copy_(section)
                    if start + section.nbytes >= min(done, values.nbytes):
                        break
                yield

    shapes = {t.name: t.shape for t in (shard.tensors if shard else ())}
    return AdapterState(step=optimizer.step_count if optimizer else 0, shapes=shapes, parts=parts), copying()

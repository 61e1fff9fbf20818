"""An adapter's memory on one rank: fill shards of the wire, export, load, step.

The plans are made once (`transfer_plan`); a publish runs them without Python work per tensor::

    tensor-parallel neighbours -> their split ranges, where tp or etp > 1 --+
    this rank's memory -----------------------------------------------------+--> section 0 | section 1 ... -> the shard

Every adapter steps alone (contract C1), by a plain AdamW of its own, written out: its memory is flat, and
the import of torch's optimizers loads torch's compiler, 0.8 s of a processor for each rank. Ranks with replicas of the
same elements share the work and the moments (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5)::

    gradients of all replicas --reduce-scatter--> own part --Adam with own moments--> own weights --all-gather--> all

Gathered, the moments are arranged like the weights, so the same plans move them to checkpoints and back.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.checkpoint.state import MOMENTS
from areal_lora.config.models import OptimizerConfig
from areal_lora.engine.base import DTYPES, AdamValues
from areal_lora.engine.common.arena import Arena, Bank, Range, ShardedModel, Span, arrange, spans
from areal_lora.engine.common.transfer_plan import PackPlan, load_plan, pack_plan, wire_layout
from areal_lora.engine.layers.active import site_key
from areal_lora.engine.layers.output import ValueHead
from areal_lora.errors import AdapterError, UnknownTensorError
from areal_lora.families.sites import LORA_A, LORA_B
from areal_lora.platforms.collectives import all_gather_single, reduce_scatter_single
from areal_lora.types import AdapterSpec, StepStats
from areal_lora.weight_sync.kernels import TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout, ShardLayout, WireTensor
from areal_lora.weight_sync.strided import StridedCopies

LAUNCHED = 16
"""Sections that a device packs at once."""
SLICE_BYTES = 4 << 20
"""Of a state that is copied while others compute, on the rank with most of it."""


class AdapterMemory:
    """The numbers of one adapter on one rank: ``weights`` and ``grads`` are flat fp32 [arena.size].

    A frozen adapter has no gradients (size 0). The moments are the optimizer's. Layers compute with ``cast``, the
    weights in ``dtype`` as of the last `refresh`; in fp32 it is ``weights`` itself.
    """

    def __init__(
        self,
        model: ShardedModel,
        spec: AdapterSpec,
        rank: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        frozen: bool = False,
    ) -> None:
        self.model, self.spec, self.rank, self.frozen = model, spec, rank, frozen
        self.arena: Arena = arrange(model, spec, rank)
        self.weights = torch.zeros(self.arena.size, device=device)
        self.cast = self.weights if dtype is torch.float32 else torch.zeros_like(self.weights, dtype=dtype)
        self.grads = torch.zeros(0 if frozen else self.arena.size, device=device)
        self._layouts: dict[str, AdapterLayout] = {}
        self._packers: dict[str, Packer] = {}
        self._loading: tuple[list[str], TensorBlocks] | None = None

    def refresh(self) -> None:
        """Cast the weights for the layers: before each pass, as a step or a load may have changed them."""
        if self.cast is not self.weights:
            self.cast.copy_(self.weights)

    def _parameter(self, flat: Tensor, at: int, shape: Sequence[int]) -> nn.Parameter:
        """A view of ``flat``; its gradient accumulates in the same elements of ``grads``."""
        count = math.prod(shape)
        # Of a frozen one, too: torch chooses another matrix product, of other rounding, for what wants no gradient.
        parameter = nn.Parameter(flat[at : at + count].view(*shape))
        if not self.frozen:
            parameter.grad_dtype = None  # what a backward pass computes in bf16 is added in fp32, without a cast before
            parameter.grad = self.grads[at : at + count].view(*shape)
        return parameter

    def value_head(self) -> ValueHead | None:
        """The value head on this rank, which computes in fp32; None if it has none."""
        at, size = self.arena.head, self.model.shape.hidden
        if at is None:
            return None
        return ValueHead(self._parameter(self.weights, at, (size,)), self._parameter(self.weights, at + size, (1,)))

    def parameters(self, bank: Bank, index: int | None) -> tuple[nn.Parameter, nn.Parameter]:
        """lora_A and lora_B of one of a bank's experts, or of all (None): a stack, or the one that they share."""
        if index is None:
            a_shape, b_shape = (
                shape[1:] if bank.shared == side else shape
                for side, shape in ((LORA_A, bank.a_shape), (LORA_B, bank.b_shape))
            )
            return self._parameter(self.cast, bank.a, a_shape), self._parameter(self.cast, bank.b, b_shape)
        a, b = bank.place(index)
        return self._parameter(self.cast, a, bank.a_shape[1:]), self._parameter(self.cast, b, bank.b_shape[1:])

    def scale_and_sites(self, bank: Bank) -> tuple[float, tuple[int, ...]]:
        """What multiplies the products of a bank, and the numbers of its sites for dropout."""
        names = [self.model.pieces(key)[0].name for key in bank.keys]
        return self.spec.scale_of(names[0]), tuple(map(site_key, names))

    def layout(self, dtype: str) -> AdapterLayout:
        """The wire layout, equal on every rank (not collective)."""
        if dtype not in self._layouts:
            self._layouts[dtype] = wire_layout(self.model, self.spec, dtype)
        return self._layouts[dtype]

    def shard(self, dtype: str) -> ShardLayout | None:
        """Layout of the shard that this rank sends; None for a rank that is not a source."""
        return next((s for s in self.layout(dtype).shards if s.source == self.rank), None)

    def room(self) -> np.ndarray:
        """Flat fp32 memory for this rank's shard; its pages are made when `export` fills them."""
        shard = self.shard("float32")
        return np.empty(shard.nbytes // 4 if shard else 0, dtype=np.float32)

    def export(self, source: Tensor, groups: Mapping[Range, dist.ProcessGroup], values: np.ndarray) -> Iterator[None]:
        """Fill ``values`` (`room`) with this rank's shard of ``source`` [arena.size], a slice for each yield.

        All ranks yield equally often. Collective like `Packer.fill`.
        """
        sections = self.packer("float32").sections(source, self.shard("float32"), groups)
        most = max(shard.nbytes for shard in self.layout("float32").shards)
        for done in range(SLICE_BYTES, most + SLICE_BYTES, SLICE_BYTES):
            for start, _, section in sections:
                values[start // 4 :][: len(section)] = section.numpy()
                if start + section.nbytes >= min(done, values.nbytes):
                    break
            yield

    def tensors(self, source: Tensor, groups: Mapping[Range, dist.ProcessGroup]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `export`, copied section by section. Collective like `Packer.fill`."""
        return self.packer("float32").tensors(source, self.shard("float32"), groups)

    def shared_tensors(self) -> dict[str, Tensor]:
        """Copies of the wire tensors that experts have in common: whole on every rank that has experts."""
        found = {}
        for bank in self.arena.banks:
            if bank.shared:
                first = self.model.pieces(bank.keys[0])[0]
                side = (first.lora_a, bank.a, bank.a_shape), (first.lora_b, bank.b, bank.b_shape)
                name, at, (_, *shape) = side[bank.shared == LORA_B]
                found[name] = self.weights[at:][: math.prod(shape)].view(shape).to("cpu", copy=True)
        return found

    def packer(self, dtype: str) -> Packer:
        if dtype not in self._packers:
            self._packers[dtype] = Packer(self, self.layout(dtype), strided=self.weights.device.type != "cpu")
        return self._packers[dtype]

    def held_names(self) -> list[str]:
        """The wire tensors of which this rank holds a part."""
        return self._load_plan()[0]

    def _load_plan(self) -> tuple[list[str], TensorBlocks]:
        if self._loading is None:
            self._loading = load_plan(self.model, self.spec, self.rank)
        return self._loading

    def load(self, target: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts out of whole tensors to ``target``, arranged like the weights (not collective).

        ``tensors`` must contain `held_names`.
        """
        names, blocks = self._load_plan()
        if not names:
            return
        whole = [tensors[name].detach().to("cpu", torch.float32).contiguous() for name in names]
        starts = np.repeat(np.array([t.data_ptr() for t in whole], dtype=np.int64), np.diff(blocks.first))
        host = target if target.device.type == "cpu" else torch.zeros(self.arena.size)
        blocks.moved(src_by=starts).copy(0, host.data_ptr())
        if host is not target:
            target.copy_(host)


class Packer:
    """One rank's plan, bound to its memory; built at the first publish of a wire dtype.

    Compiled loops copy memory of the host, ``strided`` views that of an accelerator.
    """

    def __init__(self, memory: AdapterMemory, layout: AdapterLayout, *, strided: bool) -> None:
        model, spec, rank = memory.model, memory.spec, memory.rank
        self._plan: PackPlan = pack_plan(model, spec, rank, layout)
        where, self._rank = model.layout, rank
        owners = {Range.DENSE_SPLIT: rank - where.tp_rank(rank), Range.EXPERT_SPLIT: rank - where.etp_rank(rank)}
        self._gathers = [
            (part, owner, *memory.arena.extent(part), model.split_over(part))
            for part, owner in owners.items()
            if part in pack_plan(model, spec, owner, layout).others
        ]
        """By split range that an owner has from this group: the owner, the elements, the ranks of the group."""
        self._received = torch.empty(self._plan.space - self._plan.own, device=memory.weights.device)
        self._dtype = DTYPES[layout.dtype]
        self._strided = StridedCopies(self._plan.blocks, (0, self._plan.own * 4), (0,)) if strided else None
        self._bound: tuple[int, TensorBlocks] | None = None

    def _copy(self, weights: Tensor, flat: Tensor, tensors: tuple[int, int], skipped: int = 0) -> None:
        """Copy tensors [a, b) of the shard to ``flat`` (uint8), which lacks its first ``skipped`` bytes."""
        if self._strided is not None:
            sources, target = (weights, self._received), flat.view(self._dtype)
            self._strided.copy(sources, (target,), tensors, skipped=(0, skipped))
            return
        at, own = weights.data_ptr(), self._plan.own
        if self._bound is None or self._bound[0] != at:
            blocks = self._plan.blocks
            outside = blocks.blocks["src"] >= own * 4
            self._bound = at, blocks.moved(src_by=np.where(outside, self._received.data_ptr() - own * 4, at))
        self._bound[1].copy(0, flat.data_ptr() - skipped, tensors=tensors)

    def fill(self, weights: Tensor, flat: Tensor, groups: Mapping[Range, dist.ProcessGroup]) -> Iterator[int]:
        """See `AdapterEngine.pack_adapter`. ``weights`` may be any memory with the arrangement of the weights."""
        for start, end in self._ready(weights, groups):
            self._copy(weights, flat, (start, end))
            yield end

    def tensors(
        self, weights: Tensor, shard: ShardLayout | None, groups: Mapping[Range, dist.ProcessGroup]
    ) -> Iterator[tuple[str, Tensor]]:
        """The fp32 tensors of the shard, in the memory of `sections`."""
        for start, held, section in self.sections(weights, shard, groups):
            for t in held:
                yield t.name, section[(t.offset - start) // 4 :][: math.prod(t.shape)].view(t.shape)

    def sections(
        self, weights: Tensor, shard: ShardLayout | None, groups: Mapping[Range, dist.ProcessGroup]
    ) -> Iterator[tuple[int, tuple[WireTensor, ...], Tensor]]:
        """(start in the shard, tensors, their fp32 numbers in host memory of their own). Otherwise like `fill`."""
        for first, last in self._ready(weights, groups):
            assert shard is not None
            start = shard.tensors[first].offset
            end = shard.tensors[last].offset if last < len(shard.tensors) else shard.nbytes
            section = torch.empty((end - start) // 4, device=weights.device)
            self._copy(weights, section.view(torch.uint8), (first, last), start)
            yield start, shard.tensors[first:last], section.cpu()

    def _ready(self, weights: Tensor, groups: Mapping[Range, dist.ProcessGroup]) -> Iterator[tuple[int, int]]:
        """Gather the split ranges; yield the (first, last) tensors of each section."""
        for part, owner, start, end, ranks in self._gathers:
            if owner != self._rank:
                ops = [dist.P2POp(dist.isend, weights[start:end], owner, groups[part])]
            else:
                at = self._plan.others[part] - self._plan.own
                rooms = self._received[at:][: (ranks - 1) * (end - start)].view(ranks - 1, end - start)
                ops = [dist.P2POp(dist.irecv, room, owner + k, groups[part]) for k, room in enumerate(rooms, 1)]
            for work in dist.batch_isend_irecv(ops) if ops else ():
                work.wait()
        ends = self._plan.ends
        if self._strided is not None:  # a section is some launches: few of them are faster than an early first bucket
            ends = (*ends[LAUNCHED - 1 : -1 : LAUNCHED], *ends[-1:])
        yield from pairwise((0, *ends))


def checked(layout: AdapterLayout, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The wire tensors among ``tensors``.

    Raises:
        UnknownTensorError: a name that is neither in the layout nor an alias, or one missing.
        AdapterError: a wrong shape, or an alias that differs from its wire tensor.
    """
    shapes = {t.name: t.shape for shard in layout.shards for t in shard.tensors}
    aliases = layout.aliases
    missing = sorted(shapes.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - shapes.keys() - aliases.keys())
    if missing or unknown:
        kind, names = ("missing", missing) if missing else ("unknown", unknown)
        what = f"{len(names)} {kind}, first {names[0]}"
        raise UnknownTensorError(f"adapter tensors do not fit this model: {what}")
    for name, tensor in tensors.items():
        shape = shapes[aliases.get(name, name)]
        if tuple(tensor.shape) != tuple(shape):
            raise AdapterError(f"adapter tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")
        if name in aliases and not torch.equal(tensor, tensors[aliases[name]]):
            raise AdapterError(f"adapter tensor {name} differs from {aliases[name]}; Megatron keeps one for both")
    return {name: tensors[name] for name in shapes}


def initial_tensor(tensor: WireTensor, seed: int) -> Tensor:
    """lora_A kaiming-uniform (a = sqrt 5, PEFT's choice), lora_B zero; a function of seed and name only."""
    values = torch.zeros(tensor.shape)
    if tensor.name.endswith("lora_A.weight"):
        digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        bound = math.sqrt(1.0 / tensor.shape[1])
        values.uniform_(-bound, bound, generator=generator)
    return values


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

    def whole_moment(self, name: str) -> Tensor:
        """A moment of all elements of this rank's memory, flat fp32 [arena.size]. Collective.

        It is no copy where this rank steps all of them.
        """
        if len(self.moments[name]) == len(self._weights):
            return self.moments[name]
        whole = torch.zeros_like(self._weights)
        for there, mine in self._own_parts(whole, self.moments[name]):
            there.copy_(mine)
        self._gather(whole)
        return whole

    def load_moment(self, name: str, whole: Tensor) -> None:
        """Set a moment; the inverse of `whole_moment`, but not collective."""
        for there, mine in self._own_parts(whole, self.moments[name]):
            mine.copy_(there)

    def _own_parts(self, whole: Tensor, moment: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        sizes = [end - start for start, end in self._own]
        for (start, end), mine in zip(self._own, moment.split(sizes), strict=True):
            yield whole[start:end], mine

    def _reduce(self, denominator: float) -> float:
        """Leave the whole, divided gradient in the own elements; return its norm over the elements of all ranks."""
        total = torch.zeros(1, dtype=torch.float64, device=self._grads.device)
        self._grads.div_(denominator)
        for groups, bounds in self._classes:
            for group, (outer, own) in zip(groups, pairwise(bounds), strict=True):
                reduce_scatter_single(self._grads[slice(*own)], self._grads[slice(*outer)], group=group)
            for chunk in self._grads[slice(*bounds[-1])].split(NORM_CHUNK):
                total += chunk.double().square_().sum()
        squares = total.cpu()
        # NaN and infinity survive the sum: every rank takes the same decision.
        dist.all_reduce(squares)
        return float(squares.sqrt())

    def _gather(self, flat: Tensor) -> None:
        """Fill ``flat`` [arena.size], of which each rank has its own elements."""
        for groups, bounds in self._classes:
            for group, (outer, own) in zip(reversed(groups), reversed(list(pairwise(bounds))), strict=True):
                all_gather_single(flat[slice(*outer)], flat[slice(*own)], group=group)

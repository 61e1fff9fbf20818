"""An adapter's memory on one rank: fill shards of the wire, export, load, step.

The plans are made once (`transfer_plan`); a publish runs them without Python work per tensor::

    tensor-parallel neighbours -> their split ranges, where tp or etp > 1 --+
    this rank's memory -----------------------------------------------------+--> section 0 | section 1 ... -> the shard
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from areal_lora.engine.base import DTYPES
from areal_lora.engine.common.arena import Arena, Bank, Range, ShardedModel, arrange, is_routed
from areal_lora.engine.common.transfer_plan import PackPlan, load_plan, pack_plan, wire_layout
from areal_lora.engine.layers.active import site_key
from areal_lora.engine.layers.expert_mlp import ExpertLora
from areal_lora.engine.layers.output import ValueHead
from areal_lora.errors import AdapterError, UnknownTensorError
from areal_lora.families.sites import LORA_A, LORA_B
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.kernels import TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout, WireTensor
from areal_lora.weight_sync.strided import StridedCopies

LAUNCHED = 16
"""Sections that a device packs at once."""


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
        self._layouts: dict[tuple[str, bool], AdapterLayout] = {}
        self._packers: dict[tuple[str, bool], Packer] = {}

    @cached_property
    def groups(self) -> int:
        """Of its rows in a grouped product, on any rank: one, or with routed experts one of each that a rank has."""
        routed = any(is_routed(key.scope) for key in self.model.sites(self.spec))
        return self.model.layout.experts_per_rank if routed else 1

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

    def experts(self, bank: Bank) -> ExpertLora:
        """A bank of routed experts, for `expert_mlp`."""
        scale, sites = self.scale_and_sites(bank)
        numbers = torch.tensor(sites, device=self.weights.device)
        return ExpertLora(*self.parameters(bank, None if bank.experts else 0), scale, numbers)

    def layout(self, dtype: str, *, spread: bool = False) -> AdapterLayout:
        """The wire layout (see `wire_layout`), equal on every rank (not collective)."""
        if (dtype, spread) not in self._layouts:
            self._layouts[dtype, spread] = wire_layout(self.model, self.spec, dtype, spread=spread)
        return self._layouts[dtype, spread]

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

    def packer(self, dtype: str, *, spread: bool = False) -> "Packer":
        if (dtype, spread) not in self._packers:
            layout = self.layout(dtype, spread=spread)
            self._packers[dtype, spread] = Packer(self, layout, strided=self.weights.device.type != "cpu")
        return self._packers[dtype, spread]

    @cached_property
    def held(self) -> tuple[list[str], TensorBlocks]:
        """The wire tensors of which this rank holds a part, and how `load` copies them."""
        return load_plan(self.model, self.spec, self.rank)

    def load(self, target: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts out of whole tensors to ``target``, arranged like the weights (not collective).

        ``tensors`` must contain those `held`.
        """
        names, blocks = self.held
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

    ``shard`` is what the rank sends; None for a rank that is not a source. Compiled loops copy memory of the host,
    ``strided`` views that of an accelerator.
    """

    def __init__(self, memory: AdapterMemory, layout: AdapterLayout, *, strided: bool) -> None:
        model, spec, rank = memory.model, memory.spec, memory.rank
        self.shard = next((s for s in layout.shards if s.source == rank), None)
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

    def tensors(self, weights: Tensor, groups: Mapping[Range, dist.ProcessGroup]) -> Iterator[tuple[str, Tensor]]:
        """The fp32 tensors of the shard, in host memory of their section. Collective like `fill`."""
        for start, held, section in self.sections(weights, groups):
            host = section.cpu()
            for t in held:
                yield t.name, host[(t.offset - start) // 4 :][: math.prod(t.shape)].view(t.shape)

    def sections(
        self, weights: Tensor, groups: Mapping[Range, dist.ProcessGroup]
    ) -> Iterator[tuple[int, tuple[WireTensor, ...], Tensor]]:
        """(start in the shard, tensors, their fp32 numbers in a copy on the device). Otherwise like `fill`."""
        for first, last in self._ready(weights, groups):
            shard = self.shard
            assert shard is not None
            start = shard.tensors[first].offset
            end = shard.tensors[last].offset if last < len(shard.tensors) else shard.nbytes
            section = torch.empty((end - start) // 4, device=weights.device)
            self._copy(weights, section.view(torch.uint8), (first, last), start)
            yield start, shard.tensors[first:last], section

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

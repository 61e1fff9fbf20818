"""Plans that move an adapter between a rank's memory (`arena`) and its shard of the wire layout. Pure data.

Packing reads one address space and writes the shard: tensor by tensor, layer by layer, in wire
order. The space is the rank's own memory, then, per range that is split, the parts of the other
ranks of its tensor-parallel group::

    own memory | dense split of tp rank 1 | ... | expert split of etp rank 1 | ...

Merged weights of an adapter: the layout of a version that travels as weights, and a rank's share of it.

    base folder --read--> W [out, in], as the model holds it --+
    this rank's memory --> lora_A, lora_B (fp32, copied first) --+--> W + alpha / rank * lora_B @ lora_A --> the shard

The base comes from the folder that every rank has loaded it from. So nothing here touches the model that trains, the
sum is the same for every parallel layout and engine, and each version is computed from the base, never from the version
before. Replicas share the weights (`slots.merging_ranks`), site by site, by their bytes. A weight is sent by the rank
that has the module's lora_B in this layout, or its lora_A where experts share one lora_B: one that holds the expert.
What experts share is in the memory of every such rank.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from areal_lora.algorithms.merging import CastLoss, merged
from areal_lora.engine.common.arena import Arena, Bank, Range, ShardedModel, arrange, held_rows
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.families.sites import Piece, SiteKey, wire_names
from areal_lora.types import AdapterSpec
from areal_lora.weight_sync.kernels import ITEM_BYTES, Block, TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout, Payload, Shape, ShardLayout, make_layout
from areal_lora.weight_sync.messages import LORA_A, LORA_B, WEIGHT

ITEM = ITEM_BYTES["float32"]
SECTION_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Fill an owner's shard.

    ``blocks`` read the address space of ``space`` elements of which the first ``own`` are the rank's memory. At
    element ``others[part]`` are the ranges ``part`` of the other ranks of its group, one after the other. Section i is
    tensors ``[ends[i - 1], ends[i])`` of the shard.
    """

    blocks: TensorBlocks
    ends: tuple[int, ...]
    others: dict[Range, int]
    own: int
    space: int


def wire_layout(model: ShardedModel, spec: AdapterSpec, dtype: str, *, spread: bool = False) -> AdapterLayout:
    """Senders, tensors and aliases: the same on every rank without communication.

    ``spread``: those of the ranks that merge; else the lowest that holds a tensor sends it.
    """
    owned: dict[int, list[tuple[str, Shape]]] = {}
    ranks, load = model.merging_ranks() if spread else [], Counter[int]()
    aliases: dict[str, str] = {}
    for key in model.sites(spec):
        pieces = model.pieces(key)
        shapes, shared = wire_names(pieces)
        rank = spec.rank_of(pieces[0].name)
        aliases |= shared
        owner = model.layout.owner(key.layer, key.expert)
        if spread:
            owner = min(model.holders(key, ranks), key=load.__getitem__)
            load[owner] += sum((1 + len(p.aliases)) * p.in_features * p.out_features for p in pieces)
        owned.setdefault(owner, []).extend(
            (name, tuple(rank if n < 0 else n for n in shape)) for name, shape in shapes.items()
        )
    if head := model.head(spec):
        owned.setdefault(model.layout.first_rank_of_last_stage(), []).extend(head.items())
    return make_layout(spec, dtype, owned, aliases)


def pack_plan(model: ShardedModel, spec: AdapterSpec, rank: int, layout: AdapterLayout) -> PackPlan:
    """Plan how ``rank`` fills its shard of ``layout``; an empty plan for a rank without a shard."""
    arena = arrange(model, spec, rank)
    offsets = {t.name: t.offset for shard in layout.shards if shard.source == rank for t in shard.tensors}
    mine = [site for site in _sites(arena.banks) if _own(model.pieces(site[1])[0]) in offsets]
    others: dict[Range, int] = {}
    space = arena.size
    for split in sorted({bank.split for bank, _, _ in mine}):
        start, end = arena.extent(split)
        others[split] = space
        space += (model.split_over(split) - 1) * (end - start)
    item = ITEM_BYTES[layout.dtype]
    tensors: list[list[Block]] = []
    ends: list[int] = []

    def add(name: str, copies: Sequence[_Copy], split: Range) -> None:
        start, end = arena.extent(split)
        places = (others[split] + (c.part - 1) * (end - start) + c.at - start if c.part else c.at for c in copies)
        tensors.append([c.block(at, offsets[name], item) for c, at in zip(copies, places, strict=True)])

    elements = 0
    for bank, key, index in mine:
        for name, copies, owned in _tensors(model, bank, index, key):
            if owned:
                add(name, copies, bank.split)
        elements += math.prod(bank.a_shape[1:]) + math.prod(bank.b_shape[1:])
        if elements * ITEM >= SECTION_BYTES:
            ends.append(len(tensors))
            elements = 0
    if rank == model.layout.first_rank_of_last_stage():
        for name, run in _head(model, spec, arena):
            add(name, [run], Range.DENSE_SPLIT)
            elements += run.cols
    if elements:
        ends.append(len(tensors))
    blocks = TensorBlocks.of(tensors, "float32", layout.dtype)
    nbytes = sum(s.nbytes for s in layout.shards if s.source == rank)
    blocks.check(src_bytes=space * ITEM, dst_bytes=nbytes)
    return PackPlan(blocks=blocks, ends=tuple(ends), others=others, own=arena.size, space=space)


def load_plan(model: ShardedModel, spec: AdapterSpec, rank: int) -> tuple[list[str], TensorBlocks]:
    """How ``rank`` fills its memory from whole fp32 tensors: tensor i of the blocks is that with name i.

    The inverse of packing, restricted to the rank's part.
    """
    arena = arrange(model, spec, rank)
    names: list[str] = []
    tensors: list[list[Block]] = []
    for bank, key, index in _sites(arena.banks):
        mine = model.group_rank(bank.scope, rank)
        for name, copies, owned in _tensors(model, bank, index, key):
            if not owned and index:
                continue  # what experts share is loaded with the first of them
            names.append(name)
            tensors.append([c.block(c.at, 0, ITEM) for c in copies if c.part in (None, mine)])
    for name, run in _head(model, spec, arena):
        names.append(name)
        tensors.append([run.block(run.at, 0, ITEM)])
    packed = TensorBlocks.of(tensors, "float32", "float32")
    packed.check(src_bytes=arena.size * ITEM, dst_bytes=1 << 62)
    return names, packed.reversed()


def _head(model: ShardedModel, spec: AdapterSpec, arena: Arena) -> "Iterator[tuple[str, _Copy]]":
    """The tensors of the value head in a rank's memory."""
    if (at := arena.head) is None:
        return
    for name, (size,) in model.head(spec).items():
        yield name, _run(None, at, 0, size)
        at += size


def _own(piece: Piece) -> str:
    """A tensor that the site has for itself, whatever its experts share."""
    return piece.lora_a if piece.b_of else piece.lora_b


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """Elements of the memory of rank ``part`` of a tensor-parallel group (None: of any) and their place in a tensor."""

    part: int | None
    at: int
    pitch: int
    to: int
    to_pitch: int
    rows: int
    cols: int

    def block(self, src: int, dst: int, item: int) -> Block:
        """From element ``src`` to the tensor at byte ``dst``, whose elements have ``item`` bytes."""
        return Block(
            src=src * ITEM,
            src_pitch=self.pitch * ITEM,
            dst=dst + self.to * item,
            dst_pitch=self.to_pitch * item,
            rows=self.rows,
            cols=self.cols,
        )


def _run(part: int | None, at: int, to: int, count: int) -> _Copy:
    return _Copy(part=part, at=at, pitch=count, to=to, to_pitch=count, rows=1, cols=count)


def _sites(banks: Sequence[Bank]) -> Iterator[tuple[Bank, SiteKey, int]]:
    """Every site of a rank in wire order, with its place in its stack."""
    for bank in banks:
        for index, key in enumerate(bank.keys):
            yield bank, key, index


def _tensors(model: ShardedModel, bank: Bank, index: int, key: SiteKey) -> Iterator[tuple[str, list[_Copy], bool]]:
    """Of a site, in wire order: name of a tensor, the memory that it consists of, whether it is the site's own."""
    pieces = model.pieces(key)
    lora_a, *lora_b = _copies(model, bank, index, pieces)
    yield pieces[0].lora_a, lora_a, not pieces[0].a_of
    for piece, copies in zip(pieces, lora_b, strict=True):
        yield piece.lora_b, copies, not piece.b_of


def _copies(model: ShardedModel, bank: Bank, index: int, pieces: Sequence[Piece]) -> Iterator[list[_Copy]]:
    """For lora_A of a site and lora_B of each piece: the memory that it consists of."""
    _, rank, n_in = bank.a_shape
    _, n_out, _ = bank.b_shape
    a, b = bank.place(index)
    size = model.group_size(bank.scope)
    if not bank.column_parallel:
        whole = n_in * size
        yield [_Copy(part=k, at=a, pitch=n_in, to=k * n_in, to_pitch=whole, rows=rank, cols=n_in) for k in range(size)]
        for piece in pieces:  # one, of all rows
            yield [_run(None, b, 0, piece.out_features * rank)]
        return
    yield [_run(None, a, 0, rank * n_in)]
    held = held_rows(bank.linear, n_out * size, size)
    for piece in pieces:
        copies, filled = [], 0
        for first, last in piece.rows:
            for k in range(size):
                local = 0
                for start, stop in held(k):
                    low, high = max(first, start), min(last, stop)
                    if low < high:
                        at = b + (local + low - start) * rank
                        copies.append(_run(k, at, (filled + low - first) * rank, (high - low) * rank))
                    local += stop - start
            filled += last - first
        yield copies


MEASURED_ROWS = 64
"""Rows of a weight that `CastLoss` looks at: a publish of 60 GB must not wait for the statistics of each element."""


def merged_layout(adapter: AdapterLayout, dtype: str) -> AdapterLayout:
    """The layout of the weights that an adapter with the layout ``adapter`` changes, in ``dtype``."""
    shapes = {t.name: t.shape for shard in adapter.shards for t in shard.tensors}
    owned: dict[int, list[tuple[str, Shape]]] = {
        shard.source: [(module + WEIGHT, (shapes[b][0], shapes[a][1])) for module, a, b in _sources(adapter, shard)]
        for shard in adapter.shards
    }
    return make_layout(adapter.structure, dtype, owned, {}, Payload.MERGED)


def _sources(adapter: AdapterLayout, shard: ShardLayout) -> Iterator[tuple[str, str, str]]:
    """Modules whose weights are in a shard, in the order of the tensors with which they travel; their lora_A and B."""
    aliases = adapter.aliases
    sharing: dict[str, list[str]] = {}  # modules without a lora_B of their own, by the tensor with which they travel
    for name, wire in aliases.items():
        if name.endswith(LORA_B):
            module = name.removesuffix(LORA_B)
            lora_a = module + LORA_A
            sharing.setdefault(wire if lora_a in aliases else lora_a, []).append(module)
    for tensor in shard.tensors:
        own = [tensor.name.removesuffix(LORA_B)] if tensor.name.endswith(LORA_B) else []
        for module in (*own, *sharing.get(tensor.name, ())):
            a, b = (aliases.get(name, name) for name in (module + LORA_A, module + LORA_B))
            yield module, a, b


class MergedShard:
    """One rank's share of the merged weights, computed on ``device``. ``held`` is the type of the model's base."""

    def __init__(
        self,
        base: ModelFolder,
        adapter: AdapterLayout,
        rank: int,
        held: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        mine = next((shard for shard in adapter.shards if shard.source == rank), None)
        self._base, self._held, self._device, self._scale_of = base, held, device, adapter.structure.scale_of
        self._sources = list(_sources(adapter, mine)) if mine else []

    def fill(self, tensors: Mapping[str, Tensor], flat: Tensor, loss: CastLoss) -> Iterator[int]:
        """Fill ``flat`` (uint8, host, a shard of `merged_layout` in ``loss.dtype``) weight by weight; see `Pack`.

        ``tensors`` are this rank's wire tensors in fp32, and what its experts share. ``loss`` counts what the cast
        loses. Raises UnknownTensorError if the base folder does not fit.
        """
        adapter = {module + LORA_A: tensors[a] for module, a, _ in self._sources}
        adapter |= {module + LORA_B: tensors[b] for module, _, b in self._sources}
        names = [module + WEIGHT for module, _, _ in self._sources]
        weights = ((name, self._base.whole(name).to(self._device, self._held)) for name in names)
        end = 0
        for done, (_, weight) in enumerate(merged(weights, adapter, self._scale_of, dtype=loss.dtype, loss=loss), 1):
            start, end = end, end + weight.numel() * weight.element_size()
            flat[start:end] = weight.contiguous().view(-1).view(torch.uint8)
            yield done

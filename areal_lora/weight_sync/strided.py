"""Copies and fingerprints of tensors on an accelerator: plans of blocks as strided views, without a loop over tensors.

Blocks of equal form at equal distances are one `ViewBatch`, and batches of equal form again: the matrices of one shape
of all experts of all layers. A batch is one launch, which converts and scales as it copies. So launches grow with the
forms in a bucket, not with names, and a plan has a few numbers for each; an index for every row of a lora_B of rank 16
would take half as much memory as the rows. Batches are made once per layout and bucket. Finite results equal those of
`kernels` bit for bit; tensors on the CPU give them, too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_lora.weight_sync.kernels import F32, ITEM_BYTES, KINDS, N_KEYS, Marks, TensorBlocks, mix_chunks
from areal_lora.weight_sync.layout import TensorTable

MEASURED_BYTES = 16 << 20  # fingerprinted at once: products take four times as much memory, and masks as much
_UNIT_BYTES = 2  # fingerprints read units of 16 bits: those of 16-bit types start at any of them
_CHUNK = 2 * N_KEYS
_EXPONENTS = {"float32": 0x7F80, "bfloat16": 0x7F80, "float16": 0x7C00}  # of float32 in its upper unit


class ViewBatch(NamedTuple):
    """Blocks at equal distances, in elements: ``src`` in memory ``source``, ``dst`` in memory ``target``.

    ``dst_step`` is the distance from one serving slot to the next. The last two dimensions are a block's.
    """

    source: int
    target: int
    src: int
    dst: int
    dst_step: int
    scale: float
    sizes: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]


def merged_batches(found: Sequence[ViewBatch]) -> list[ViewBatch]:
    """Merge batches of equal form in arithmetic progression, then those of the result, as long as any merge."""
    while True:
        forms: dict[tuple[object, ...], list[ViewBatch]] = {}
        for batch in found:
            forms.setdefault((*batch[:2], *batch[4:]), []).append(batch)
        merged = [batch for same in forms.values() for batch in _progressions(same)]
        if len(merged) == len(found):
            return merged
        found = merged


def _progressions(same: Sequence[ViewBatch]) -> list[ViewBatch]:
    src, dst = (np.array([getattr(batch, side) for batch in same]) for side in ("src", "dst"))
    steps = np.stack([np.diff(src), np.diff(dst)], axis=1)
    ends = np.append(np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1, len(steps))  # of runs of equal steps
    merged, i = [], 0
    while i < len(same):
        first, n = same[i], 1
        if i < len(steps) and steps[i, 0] >= 0 and steps[i, 1] > 0:  # views have no negative strides
            n += int(ends[np.searchsorted(ends, i, side="right")]) - i
            first = first._replace(
                sizes=(n, *first.sizes),
                src_strides=(int(steps[i, 0]), *first.src_strides),
                dst_strides=(int(steps[i, 1]), *first.dst_strides),
            )
        merged.append(first)
        i += n
    return merged


class StridedCopies:
    """`TensorBlocks` between memories at ``sources`` and ``targets``: ascending, in the plan's bytes."""

    def __init__(self, plan: TensorBlocks, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._plan, self._sources, self._targets = plan, np.array(sources), np.array(targets)
        self._batches: dict[tuple[int, int], list[ViewBatch]] = {}

    def copy(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        tensors: tuple[int, int],
        *,
        slot: int = 0,
        skipped: tuple[int, int] = (0, 0),
    ) -> None:
        """Copy the blocks of tensors [a, b) on the current stream; ``slot`` as in `kernels.copy_blocks`.

        The memories are flat, in the plan's types. Of each source and target the first ``skipped`` bytes are absent.
        """
        absent_src, absent_dst = (
            n // ITEM_BYTES[d] for n, d in zip(skipped, (self._plan.src_dtype, self._plan.dst_dtype), strict=True)
        )
        if tensors not in self._batches:
            self._batches[tensors] = self._made(*tensors)
        for b in self._batches[tensors]:
            src = _view(sources[b.source], b.sizes, b.src_strides, b.src - absent_src)
            dst = _view(targets[b.target], b.sizes, b.dst_strides, b.dst - absent_dst + slot * b.dst_step)
            if b.scale == 1:
                dst.copy_(src)
            else:  # the product is rounded once, from float32
                torch.mul(src if src.dtype is dst.dtype else src.float(), b.scale, out=dst)

    def _made(self, first: int, last: int) -> list[ViewBatch]:
        plan = self._plan
        blocks = plan.blocks[plan.first[first] : plan.first[last]]
        src_item, dst_item = ITEM_BYTES[plan.src_dtype], ITEM_BYTES[plan.dst_dtype]
        source = np.searchsorted(self._sources, blocks["src"], side="right") - 1
        target = np.searchsorted(self._targets, blocks["dst"], side="right") - 1
        columns = (
            source,
            target,
            (blocks["src"] - self._sources[source]) // src_item,
            (blocks["dst"] - self._targets[target]) // dst_item,
            blocks["dst_step"] // dst_item,
            blocks["scale"],
            blocks["rows"],
            blocks["cols"],
            blocks["src_pitch"] // src_item,
            blocks["dst_pitch"] // dst_item,
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return merged_batches([ViewBatch._make((*head, (n, m), (p, 1), (q, 1))) for *head, n, m, p, q in rows])


class ChunkSums:
    """Fingerprints of a shard's tensors on a device: its sums of chunks, mixed on the host.

    A chunk is ``N_KEYS`` words; 8 bytes of each, and 2 that show what is not finite, go to
    the host. Sums of int64 products are those modulo 2^64 of `kernels.fingerprints`.
    """

    def __init__(self, table: TensorTable) -> None:
        units = table.sizes * ITEM_BYTES[table.dtype] // _UNIT_BYTES
        self._starts, self._whole, self._rest = table.offsets // _UNIT_BYTES, *np.divmod(units, _CHUNK)
        self._first = np.cumsum([0, *(self._whole + (self._rest > 0))])
        self._batches: dict[tuple[int, int], list[ViewBatch]] = {}
        self._keys: tuple[np.ndarray, Tensor] | None = None

    def measure(self, marks: Marks, flat: Tensor, first: int, last: int) -> None:
        """Fill in tensors [first, last) of ``marks``; ``flat`` (uint8) starts with the first of them.

        Waits for the current stream.
        """
        if self._keys is None or self._keys[0] is not marks.keys:
            keys = marks.keys.view(np.int64)
            pairs = np.stack([keys, keys << 16], axis=1).reshape(-1)
            self._keys = marks.keys, torch.from_numpy(pairs).to(flat.device)
        if (first, last) not in self._batches:
            parts = marks.parts(first, last, MEASURED_BYTES)
            self._batches[first, last] = [batch for part in parts for batch in self._made(first, *part)]
        units, n = flat.view(torch.int16), int(self._first[last] - self._first[first])
        sums = torch.empty(n, dtype=torch.int64, device=flat.device)
        exponents = torch.empty(n, dtype=torch.int16, device=flat.device)
        upper, exponent = int(KINDS[marks.dtype] == F32), _EXPONENTS[marks.dtype]
        for b in self._batches[first, last]:
            part = _view(units, b.sizes, b.src_strides, b.src)
            products = part.to(torch.int64).bitwise_and_(0xFFFF).mul_(self._keys[1][: b.sizes[-1]])
            place = b.sizes[:-1], b.dst_strides[:-1], b.dst
            torch.sum(products, -1, out=_view(sums, *place))
            torch.amax(part[..., upper :: upper + 1] & exponent, -1, out=_view(exponents, *place))
        chunks, infinite = sums.cpu().numpy().view(np.uint64), exponents.cpu().numpy() == exponent
        mix_chunks(chunks, infinite, self._first, marks.sizes, first, last, marks.sums, marks.bad)

    def _made(self, origin: int, first: int, last: int) -> list[ViewBatch]:
        """Chunks of tensors [first, last), counted from those of tensor ``origin``."""
        starts, places = self._starts - self._starts[origin], self._first - self._first[origin]
        rows = zip(*(a[first:last].tolist() for a in (starts, places, self._whole, self._rest)), strict=False)
        made = []
        for src, dst, whole, rest in rows:
            if whole:
                made.append(ViewBatch(0, 0, src, dst, 0, 1.0, (whole, _CHUNK), (_CHUNK, 1), (1, 0)))
            if rest:
                made.append(ViewBatch(0, 0, src + whole * _CHUNK, dst + whole, 0, 1.0, (1, rest), (rest, 1), (1, 0)))
        return merged_batches(made)


def _view(memory: Tensor, sizes: Sequence[int], strides: Sequence[int], at: int) -> Tensor:
    return memory.as_strided(sizes, strides, memory.storage_offset() + at)

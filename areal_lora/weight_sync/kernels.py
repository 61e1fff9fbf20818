"""Compiled loops of a publish: strided copies with conversion and scaling, planned as data, and tensor fingerprints.

A plan is one array of blocks, made once per layout and checked against the memories that it touches: trainer
parameters, wire buffers, serving slots. `TensorBlocks.copy` runs it; the reversed plan is the inverse. The loops run
without the GIL and without OpenMP, in the thread that calls them: a server receives beside the model that generates in
the same process, and no tensor costs Python work. No other file uses addresses. `strided` runs the plans on a device.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

F32, BF16, F16 = 0, 1, 2  # element kinds


def compiled(signature: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile for calls without the GIL; for other processes, too, where numba may write below its file or home."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signature, nogil=True, cache=True, **options)(function)
        except RuntimeError:  # both are read-only, as in a container of another user
            return numba.njit(signature, nogil=True, **options)(function)

    return decorate


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """Make a pointer for ``carray`` from an address."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@compiled(inline="always")
def _to_half(bits: Any, kind: int) -> Any:
    """Round the bits of a float32 to nearest even; NaN stays NaN (it keeps a mantissa bit)."""
    size = np.uint32(bits & np.uint32(0x7FFFFFFF))
    if kind == BF16:  # one conversion of what is selected is twice as fast as two
        rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        quiet = np.uint32(bits | np.uint32(0x400000))
        return np.uint16((quiet if size > np.uint32(0x7F800000) else rounded) >> np.uint32(16))
    if size > np.uint32(0x7F800000):
        found = np.uint32(0x7E00)
    elif size >= np.uint32(0x47800000):  # 2**16 and more
        found = np.uint32(0x7C00)
    elif size < np.uint32(0x38800000):  # below 2**-14: the sum with 0.5 has steps of 2**-24
        found = np.float32(size.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    else:
        rebased = size - np.uint32(0x38000000) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))
        found = rebased >> np.uint32(13)
    return np.uint16(((bits >> np.uint32(16)) & np.uint32(0x8000)) | found)


@compiled(inline="always")
def _from_half(half: Any, kind: int) -> Any:
    bits = np.uint32(half)
    if kind == BF16:
        return np.uint32(bits << np.uint32(16)).view(np.float32)
    size = np.uint32((bits & np.uint32(0x7FFF)) << np.uint32(13))
    if size >= np.uint32(0x0F800000):
        size = np.uint32(size + np.uint32(0x70000000))
    elif size >= np.uint32(0x00800000):
        size = np.uint32(size + np.uint32(0x38000000))
    else:  # a multiple of 2**-24
        above = np.uint32(size + np.uint32(0x38800000)).view(np.float32)
        size = np.float32(above - np.float32(2.0**-14)).view(np.uint32)
    return np.uint32(size | ((bits & np.uint32(0x8000)) << np.uint32(16))).view(np.float32)


# The functions below take scalars: an array argument costs as much as copying a small tensor.


@compiled()
def _row_bits(src: int, dst: int, nbytes: int) -> None:
    a, b = carray(pointer(src), nbytes // 2, np.uint16), carray(pointer(dst), nbytes // 2, np.uint16)
    for j in range(nbytes // 2):
        b[j] = a[j]


@compiled()
def _row_f32_f32(src: int, dst: int, n: int, scale: Any) -> None:
    a, b = carray(pointer(src), n, np.float32), carray(pointer(dst), n, np.float32)
    for j in range(n):
        b[j] = a[j] * scale


@compiled()
def _row_f32_half(src: int, dst: int, n: int, scale: Any, kind: int) -> None:
    a, b = carray(pointer(src), n, np.float32), carray(pointer(dst), n, np.uint16)
    if scale == np.float32(1.0):  # twice as fast
        bits = carray(pointer(src), n, np.uint32)
        for j in range(n):
            b[j] = _to_half(bits[j], kind)
    else:
        for j in range(n):
            b[j] = _to_half(np.float32(a[j] * scale).view(np.uint32), kind)


@compiled()
def _row_half_f32(src: int, dst: int, n: int, scale: Any, kind: int) -> None:
    a, b = carray(pointer(src), n, np.uint16), carray(pointer(dst), n, np.float32)
    for j in range(n):
        b[j] = _from_half(a[j], kind) * scale


@compiled()
def _row_half_half(src: int, dst: int, n: int, scale: Any, src_kind: int, dst_kind: int) -> None:
    a, b = carray(pointer(src), n, np.uint16), carray(pointer(dst), n, np.uint16)
    for j in range(n):
        b[j] = _to_half(np.float32(_from_half(a[j], src_kind) * scale).view(np.uint32), dst_kind)


@compiled()
def copy_blocks(
    src_base: int, src_kind: int, dst_base: int, dst_kind: int, slot: int, blocks: Any, first: int, last: int
) -> None:
    """Blocks ``first:last`` (`BLOCK`): ``rows`` rows of ``cols`` elements each, ``scale`` times the source.

    Row r of a block is read at ``src_base + src + r * src_pitch`` and written at
    ``dst_base + dst + slot * dst_step + r * dst_pitch`` (bytes). Equal kinds with
    scale 1 are copied bit for bit; 16-bit types are rounded to nearest even.
    """
    src_item, dst_item = 4 if src_kind == F32 else 2, 4 if dst_kind == F32 else 2
    for i in range(first, last):
        b = blocks[i]
        n, m = b.cols, b.rows
        if m > 1 and b.src_pitch == n * src_item and b.dst_pitch == n * dst_item:
            n, m = n * m, 1
        for r in range(m):
            src, dst = src_base + b.src + r * b.src_pitch, dst_base + b.dst + slot * b.dst_step + r * b.dst_pitch
            if src_kind == dst_kind and b.scale == np.float32(1.0):
                _row_bits(src, dst, n * src_item)
            elif src_kind == F32 and dst_kind == F32:
                _row_f32_f32(src, dst, n, b.scale)
            elif src_kind == F32:
                _row_f32_half(src, dst, n, b.scale, dst_kind)
            elif dst_kind == F32:
                _row_half_f32(src, dst, n, b.scale, src_kind)
            else:
                _row_half_half(src, dst, n, b.scale, src_kind, dst_kind)


@compiled(inline="always")
def _mix(h: Any, acc: Any) -> Any:
    return (h * np.uint64(0x9E3779B97F4A7C15)) ^ acc ^ (acc >> np.uint64(32))


@compiled()
def mix_chunks(chunks: Any, infinite: Any, chunk: Any, sizes: Any, first: int, last: int, sums: Any, bad: Any) -> None:
    """As `fingerprints` of tensors ``first:last``, from ``chunks`` uint64 [n], their sums over blocks of words.

    Tensor i has those from ``chunk[i]`` to ``chunk[i + 1]``, counted from ``chunk[first]``; ``infinite`` bool [n].
    """
    for i in range(first, last):
        h, found = np.uint64(sizes[i]), False
        for c in range(chunk[i] - chunk[first], chunk[i + 1] - chunk[first]):
            h = _mix(h, chunks[c])
            found |= infinite[c]
        sums[i], bad[i] = h, np.uint8(found)


@compiled()
def _fingerprint(at: int, size: int, kind: int, keys: int, width: int) -> Any:
    """(fingerprint, 1 where an exponent is all ones) of ``size`` elements at address ``at``.

    Two of 16 bits make a word; the odd last one stands alone.
    """
    multipliers = carray(pointer(keys), width, np.uint64)
    # An exponent of ones, and no other, carries into the sign bit, which the mask has cleared.
    mask = np.uint32(0x7F800000 if kind == F32 else 0x7F807F80 if kind == BF16 else 0x7C007C00)
    lowest = np.uint32(mask & ~np.uint32(mask << np.uint32(1)))
    whole = size if kind == F32 else size // 2
    words_end = size if kind == F32 else (size + 1) // 2
    h, carries, done = np.uint64(size), np.uint32(0), 0
    while done < words_end:
        n = min(width, whole - done)
        words = carray(pointer(at + done * 4), n, np.uint32)
        acc = np.uint64(0)
        for j in range(n):
            x = words[j]
            acc += np.uint64(x) * multipliers[j]
            carries |= np.uint32((x & mask) + lowest)
        done += width
        if done > whole and whole < words_end:
            last = np.uint32(carray(pointer(at + whole * 4), 1, np.uint16)[0])
            acc += np.uint64(last) * multipliers[n]
            carries |= np.uint32((last & mask) + lowest)
        h = _mix(h, acc)
    return h, (carries & np.uint32(0x80008000)) != np.uint32(0)


@compiled()
def fingerprints(
    base: int, kind: int, offsets: Any, sizes: Any, keys: int, width: int, first: int, last: int, sums: Any, bad: Any
) -> None:
    """Fingerprint and finiteness of tensors ``first:last``, each ``sizes[i]`` elements at ``base + offsets[i]``.

    ``sums`` uint64 [n]: over blocks of ``width`` 32-bit words ``h = mix(h, sum_j x_j * key_j mod 2^64)``,
    beginning with ``h = sizes[i]``. x_j is the bit pattern of a word, which holds two of 16 bits; ``keys`` is
    the address of ``width`` multipliers. The sum is a multilinear hash (Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014). ``bad`` uint8 [n]: 1 where an exponent is all ones.
    """
    for i in range(first, last):
        sums[i], infinite = _fingerprint(base + offsets[i], sizes[i], kind, keys, width)
        bad[i] = np.uint8(infinite)


def multipliers(use: str, n: int, key: bytes = b"") -> np.ndarray:
    """Multipliers for one ``use``, odd uint64 [n]: the same on every machine; public without a ``key``."""
    stream = hashlib.shake_256(key + f"areal_lora {use} keys".encode()).digest(8 * n)
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64) | np.uint64(1)


KINDS = {"float32": F32, "bfloat16": BF16, "float16": F16}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
N_KEYS = 1024  # multipliers of fingerprints: as many as stay in the first-level cache beside the data
_PART_BYTES = 1 << 20  # measured, then copied from the second-level cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Fingerprints and faults of a shard's tensors, filled in as the tensors are copied.

    ``keys`` are the `multipliers`, uint64 [N_KEYS]; ``offsets`` (bytes) and ``sizes`` (elements) int64 [n];
    ``sums`` uint64 [n]; ``bad`` uint8 [n] is 1 where a tensor holds NaN or infinity.
    """

    dtype: str
    keys: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    sums: np.ndarray
    bad: np.ndarray

    def measure(self, base: int, first: int, last: int) -> None:
        """Fill in tensors [first, last) of a shard that starts at address ``base``."""
        kind, keys, width = KINDS[self.dtype], self.keys.ctypes.data, len(self.keys)
        fingerprints(base, kind, self.offsets, self.sizes, keys, width, first, last, self.sums, self.bad)

    def parts(self, first: int, last: int, nbytes: int = _PART_BYTES) -> Iterator[tuple[int, int]]:
        """Cut tensors [first, last) into runs of about ``nbytes``."""
        while first < last:
            end = int(np.searchsorted(self.offsets, self.offsets[first] + nbytes))
            end = min(max(end, first + 1), last)
            yield first, end
            first = end


class Block(NamedTuple):
    """``rows`` rows of ``cols`` elements. ``src`` and ``dst`` are bytes from the start of their memory,
    pitches the bytes between rows; ``dst_step`` the bytes from one serving slot to the next."""

    src: int
    src_pitch: int
    dst: int
    dst_pitch: int
    rows: int
    cols: int
    dst_step: int = 0
    scale: float = 1.0


BLOCK = np.dtype([(name, np.float32 if name == "scale" else np.int64) for name in Block._fields], align=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBlocks:
    """Blocks grouped by tensor: those of tensor i are ``first[i]:first[i + 1]``.

    ``src_dtype`` and ``dst_dtype`` are among `KINDS`; ``first`` is int64 [tensors + 1], a row of ``blocks`` a `Block`.
    """

    src_dtype: str
    dst_dtype: str
    first: np.ndarray
    blocks: np.ndarray

    @classmethod
    def of(cls, tensors: Sequence[Sequence[Block]], src_dtype: str, dst_dtype: str) -> "TensorBlocks":
        """One inner sequence per tensor, in shard order; it may be empty."""
        flat = np.array([block for blocks in tensors for block in blocks], dtype=BLOCK)
        first = np.cumsum([0, *(len(blocks) for blocks in tensors)]).astype(np.int64)
        return cls(src_dtype=src_dtype, dst_dtype=dst_dtype, first=first, blocks=flat)

    def check(self, *, src_bytes: int, dst_bytes: np.ndarray | int, slots: int = 1) -> None:
        """Raise ValueError if a block leaves its memory. ``dst_bytes`` is one size, or one per block."""
        rows, cols = self.blocks["rows"], self.blocks["cols"]
        for what, side, dtype, step, limit in (
            ("source", "src", self.src_dtype, 0, src_bytes),
            ("destination", "dst", self.dst_dtype, self.blocks["dst_step"], dst_bytes),
        ):
            start, pitch = self.blocks[side], self.blocks[f"{side}_pitch"]
            end = start + (slots - 1) * step + (rows - 1) * pitch + cols * ITEM_BYTES[dtype]
            wrong = np.flatnonzero((start < 0) | (end > limit) | (rows < 1) | (cols < 1) | (pitch < 0))
            if len(wrong):
                raise ValueError(f"block {wrong[0]} leaves its {what} ({start[wrong[0]]}..{end[wrong[0]]})")

    def moved(self, src_by: np.ndarray | int = 0, dst_by: np.ndarray | int = 0) -> "TensorBlocks":
        """Shift all starts, for example from offsets to addresses."""
        blocks = self.blocks.copy()
        blocks["src"] += src_by
        blocks["dst"] += dst_by
        return replace(self, blocks=blocks)

    def reversed(self) -> "TensorBlocks":
        """Exchange source and destination. Raises ValueError for a plan with scales or slots."""
        if self.blocks["dst_step"].any() or (self.blocks["scale"] != 1).any():
            raise ValueError("a plan that scales or fills slots has no inverse")
        blocks = self.blocks.copy()
        for mine, other in (("src", "dst"), ("src_pitch", "dst_pitch")):
            blocks[mine], blocks[other] = self.blocks[other], self.blocks[mine]
        return replace(self, src_dtype=self.dst_dtype, dst_dtype=self.src_dtype, blocks=blocks)

    def copy(
        self,
        src_base: int,
        dst_base: int,
        *,
        slot: int = 0,
        tensors: tuple[int, int] | None = None,
        marks: Marks | None = None,
    ) -> None:
        """Copy the blocks of tensors ``[a, b)`` (all by default) between two memories given by address.

        ``marks``, if given, measure the source in the same pass. The caller keeps both memories alive.
        Releases the GIL; uses the calling thread only.
        """
        kinds = KINDS[self.src_dtype], KINDS[self.dst_dtype]
        a, b = tensors if tensors is not None else (0, len(self.first) - 1)
        for start, end in [(a, b)] if marks is None else marks.parts(a, b):
            if marks is not None:
                marks.measure(src_base, start, end)
            first, last = int(self.first[start]), int(self.first[end])
            copy_blocks(src_base, kinds[0], dst_base, kinds[1], slot, self.blocks, first, last)

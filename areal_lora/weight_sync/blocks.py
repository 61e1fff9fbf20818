"""Plans of strided copies between the memories of an adapter: trainer parameters, wire buffers, serving slots.

A plan is data (int64 arrays), made once per layout and checked against the memories that it touches.
``TensorBlocks.copy`` runs it in compiled code. The reversed plan is the inverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from areal_lora.weight_sync.kernels import BF16, F32, copy_blocks, fingerprints, fixed_keys

KINDS = {"float32": F32, "bfloat16": BF16}
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_KEYS = fixed_keys("fingerprint", 1024)  # as many as stay in the first-level cache beside the data
_PART_BYTES = 1 << 20  # measured, then copied from the second-level cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Fingerprints and faults of a shard's tensors, filled in as the tensors are copied.

    ``offsets`` (bytes) and ``sizes`` (elements) int64 [n]; ``sums`` uint64 [n]; ``bad`` uint8 [n] is 1
    where a tensor holds NaN or infinity.
    """

    dtype: str
    offsets: np.ndarray
    sizes: np.ndarray
    sums: np.ndarray
    bad: np.ndarray

    def measure(self, base: int, first: int, last: int) -> None:
        """Fill in tensors [first, last) of a shard that starts at address ``base``."""
        fingerprints(
            base,
            KINDS[self.dtype],
            self.offsets,
            self.sizes,
            _KEYS.ctypes.data,
            len(_KEYS),
            first,
            last,
            self.sums,
            self.bad,
        )

    def parts(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut tensors [first, last) into runs of about ``_PART_BYTES``."""
        while first < last:
            end = int(np.searchsorted(self.offsets, self.offsets[first] + _PART_BYTES))
            end = min(max(end, first + 1), last)
            yield first, end
            first = end


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBlocks:
    """Blocks grouped by tensor: those of tensor i are ``first[i]:first[i + 1]``.

    ``src_dtype`` and ``dst_dtype`` are "float32" or "bfloat16". All arrays are int64 [blocks]
    except ``first`` int64 [tensors + 1] and ``scale`` float32 [blocks].
    """

    src_dtype: str
    dst_dtype: str
    first: np.ndarray
    src: np.ndarray
    src_pitch: np.ndarray
    dst: np.ndarray
    dst_pitch: np.ndarray
    dst_step: np.ndarray
    rows: np.ndarray
    cols: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, tensors: Sequence[Sequence[Block]], src_dtype: str, dst_dtype: str) -> TensorBlocks:
        """One inner sequence per tensor, in shard order; it may be empty."""
        flat = [block for blocks in tensors for block in blocks]
        columns = {
            f.name: np.array([getattr(b, f.name) for b in flat], dtype=np.float32 if f.name == "scale" else np.int64)
            for f in fields(Block)
        }
        first = np.cumsum([0, *(len(blocks) for blocks in tensors)]).astype(np.int64)
        return cls(src_dtype=src_dtype, dst_dtype=dst_dtype, first=first, **columns)

    @property
    def n_tensors(self) -> int:
        return len(self.first) - 1

    def check(self, *, src_bytes: int, dst_bytes: np.ndarray | int, slots: int = 1) -> None:
        """Raise ValueError if a block leaves its memory. ``dst_bytes`` is one size, or one per block."""
        for what, start, pitch, step, item, limit in (
            ("source", self.src, self.src_pitch, 0, ITEM_BYTES[self.src_dtype], src_bytes),
            ("destination", self.dst, self.dst_pitch, self.dst_step, ITEM_BYTES[self.dst_dtype], dst_bytes),
        ):
            end = start + (slots - 1) * step + (self.rows - 1) * pitch + self.cols * item
            wrong = np.flatnonzero((start < 0) | (end > limit) | (self.rows < 1) | (self.cols < 1) | (pitch < 0))
            if len(wrong):
                raise ValueError(f"block {wrong[0]} leaves its {what} ({start[wrong[0]]}..{end[wrong[0]]})")

    def moved(self, src_by: np.ndarray | int = 0, dst_by: np.ndarray | int = 0) -> TensorBlocks:
        """Shift all starts, for example from offsets to addresses."""
        return self._with(src=self.src + src_by, dst=self.dst + dst_by)

    def reversed(self) -> TensorBlocks:
        """Exchange source and destination. Raises ValueError for a plan with scales or slots."""
        if self.dst_step.any() or (self.scale != 1).any():
            raise ValueError("a plan that scales or fills slots has no inverse")
        return self._with(
            src_dtype=self.dst_dtype,
            dst_dtype=self.src_dtype,
            src=self.dst,
            src_pitch=self.dst_pitch,
            dst=self.src,
            dst_pitch=self.src_pitch,
        )

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
        a, b = tensors if tensors is not None else (0, self.n_tensors)
        for start, end in [(a, b)] if marks is None else marks.parts(a, b):
            if marks is not None:
                marks.measure(src_base, start, end)
            copy_blocks(
                src_base,
                KINDS[self.src_dtype],
                dst_base,
                KINDS[self.dst_dtype],
                slot,
                self.src,
                self.src_pitch,
                self.dst,
                self.dst_pitch,
                self.dst_step,
                self.rows,
                self.cols,
                self.scale,
                int(self.first[start]),
                int(self.first[end]),
            )

    def _with(self, **changes: object) -> TensorBlocks:
        values = {f.name: getattr(self, f.name) for f in fields(self)} | changes
        return TensorBlocks(**values)

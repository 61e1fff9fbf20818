"""Compiled loops of a publish: strided copies with conversion and scaling, and tensor fingerprints.

They run without the GIL and without OpenMP, in the thread that calls them, so a server can
receive beside the model that generates in the same process, and a publish of 37,000 tensors
costs no Python work per tensor.

Only this file works with memory addresses. Callers pass addresses of live arrays;
``blocks`` has checked every copy against the memory it reads and writes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

F32, BF16 = 0, 1  # element kinds

_SHORT_ROW = 4096  # elements; below this a loop is faster than a call of memcpy


@intrinsic
def copy_bytes(context: Any, dst: Any, src: Any, nbytes: Any) -> Any:
    """Call memcpy."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, source, count = args
        pointer = cgutils.voidptr_t
        cgutils.raw_memcpy(builder, builder.inttoptr(to, pointer), builder.inttoptr(source, pointer), count, 1)

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """Make a pointer for ``carray`` from an address."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def as_float(context: Any, bits: Any) -> Any:
    """View uint32 as float32."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def as_bits(context: Any, value: Any) -> Any:
    """View float32 as uint32."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@numba.njit(nogil=True, cache=True, inline="always")
def _to_bf16(bits: Any) -> Any:
    """Round to nearest even; NaN stays NaN (it keeps a mantissa bit)."""
    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
        return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@numba.njit(nogil=True, cache=True)
def _row_f32_f32(src: int, dst: int, n: int, scale: Any) -> None:
    a, b = carray(pointer(src), n, np.float32), carray(pointer(dst), n, np.float32)
    if scale == np.float32(1.0):
        for j in range(n):
            b[j] = a[j]
    else:
        for j in range(n):
            b[j] = a[j] * scale


@numba.njit(nogil=True, cache=True)
def _row_f32_bf16(src: int, dst: int, n: int, scale: Any) -> None:
    a, b = carray(pointer(src), n, np.float32), carray(pointer(dst), n, np.uint16)
    if scale == np.float32(1.0):
        for j in range(n):
            b[j] = _to_bf16(as_bits(a[j]))
    else:
        for j in range(n):
            b[j] = _to_bf16(as_bits(a[j] * scale))


@numba.njit(nogil=True, cache=True)
def _row_bf16_f32(src: int, dst: int, n: int, scale: Any) -> None:
    a, b = carray(pointer(src), n, np.uint16), carray(pointer(dst), n, np.float32)
    if scale == np.float32(1.0):
        for j in range(n):
            b[j] = as_float(np.uint32(a[j]) << np.uint32(16))
    else:
        for j in range(n):
            b[j] = as_float(np.uint32(a[j]) << np.uint32(16)) * scale


@numba.njit(nogil=True, cache=True)
def _row_bf16_bf16(src: int, dst: int, n: int, scale: Any) -> None:
    a, b = carray(pointer(src), n, np.uint16), carray(pointer(dst), n, np.uint16)
    if scale == np.float32(1.0):
        for j in range(n):
            b[j] = a[j]
    else:
        for j in range(n):
            b[j] = _to_bf16(as_bits(as_float(np.uint32(a[j]) << np.uint32(16)) * scale))


# The functions below take scalars: an array argument costs as much as copying a small tensor.


@numba.njit(nogil=True, cache=True)
def _copy_block(
    src: int, src_kind: int, src_pitch: int, dst: int, dst_kind: int, dst_pitch: int, rows: int, cols: int, scale: Any
) -> None:
    n, m = cols, rows
    if m > 1 and src_pitch == n * (4 if src_kind == F32 else 2) and dst_pitch == n * (4 if dst_kind == F32 else 2):
        n, m = n * m, 1
    for r in range(m):
        x, y = src + r * src_pitch, dst + r * dst_pitch
        if src_kind == F32 and dst_kind == F32:
            if scale == np.float32(1.0) and n >= _SHORT_ROW:
                copy_bytes(y, x, n * 4)
            else:
                _row_f32_f32(x, y, n, scale)
        elif src_kind == F32:
            _row_f32_bf16(x, y, n, scale)
        elif dst_kind == F32:
            _row_bf16_f32(x, y, n, scale)
        elif scale == np.float32(1.0) and n >= _SHORT_ROW:
            copy_bytes(y, x, n * 2)
        else:
            _row_bf16_bf16(x, y, n, scale)


@numba.njit(nogil=True, cache=True)
def copy_blocks(
    src_base: int,
    src_kind: int,
    dst_base: int,
    dst_kind: int,
    slot: int,
    src: Any,
    src_pitch: Any,
    dst: Any,
    dst_pitch: Any,
    dst_step: Any,
    rows: Any,
    cols: Any,
    scale: Any,
    first: int,
    last: int,
) -> None:
    """Blocks ``first:last``: ``rows`` rows of ``cols`` elements each, ``scale`` times the source.

    Row r of block i is read at ``src_base + src[i] + r * src_pitch[i]`` and written at
    ``dst_base + dst[i] + slot * dst_step[i] + r * dst_pitch[i]`` (bytes). Equal kinds with
    scale 1 are copied bit for bit; bfloat16 is rounded to nearest even.
    """
    for i in range(first, last):
        _copy_block(
            src_base + src[i],
            src_kind,
            src_pitch[i],
            dst_base + dst[i] + slot * dst_step[i],
            dst_kind,
            dst_pitch[i],
            rows[i],
            cols[i],
            scale[i],
        )


@numba.njit(nogil=True, cache=True)
def _mix(h: Any, acc: Any) -> Any:
    return (h * np.uint64(0x9E3779B97F4A7C15)) ^ acc ^ (acc >> np.uint64(32))


@numba.njit(nogil=True, cache=True)
def _fingerprint_f32(at: int, size: int, keys: int, width: int) -> Any:
    """(fingerprint, 1 where an exponent is all ones) of ``size`` float32 at address ``at``."""
    multipliers = carray(pointer(keys), width, np.uint64)
    h, infinite, done = np.uint64(size), np.uint32(0), 0
    while done < size:
        n = min(width, size - done)
        words = carray(pointer(at + done * 4), n, np.uint32)
        acc = np.uint64(0)
        for j in range(n):
            x = words[j]
            acc += np.uint64(x) * multipliers[j]
            infinite |= np.uint32((x & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
        h = _mix(h, acc)
        done += n
    return h, infinite


@numba.njit(nogil=True, cache=True)
def _fingerprint_bf16(at: int, size: int, keys: int, width: int) -> Any:
    """As ``_fingerprint_f32``; two bfloat16 to a word, the odd last one stands alone."""
    multipliers = carray(pointer(keys), width, np.uint64)
    h, infinite, done = np.uint64(size), np.uint32(0), 0
    while done < size:
        n = min(2 * width, size - done)
        pairs = n // 2
        words = carray(pointer(at + done * 2), pairs, np.uint32)
        acc = np.uint64(0)
        for j in range(pairs):
            x = words[j]
            acc += np.uint64(x) * multipliers[j]
            infinite |= np.uint32((x & np.uint32(0x7F80)) == np.uint32(0x7F80))
            infinite |= np.uint32((x & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
        if n % 2:
            last = np.uint32(carray(pointer(at + (done + n - 1) * 2), 1, np.uint16)[0])
            acc += np.uint64(last) * multipliers[pairs]
            infinite |= np.uint32((last & np.uint32(0x7F80)) == np.uint32(0x7F80))
        h = _mix(h, acc)
        done += n
    return h, infinite


@numba.njit(nogil=True, cache=True)
def fingerprints(
    base: int, kind: int, offsets: Any, sizes: Any, keys: int, width: int, first: int, last: int, sums: Any, bad: Any
) -> None:
    """Fingerprint and finiteness of tensors ``first:last``, each ``sizes[i]`` elements at ``base + offsets[i]``.

    ``sums`` uint64 [n]: over blocks of ``width`` 32-bit words ``h = mix(h, sum_j x_j * key_j mod 2^64)``,
    beginning with ``h = sizes[i]``. x_j is the bit pattern of a word, which holds two bfloat16; ``keys`` is
    the address of ``width`` multipliers. The sum is a multilinear hash (Lemire and Kaser, "Strongly universal
    string hashing is fast", 2014). ``bad`` uint8 [n]: 1 where an exponent is all ones.
    """
    for i in range(first, last):
        if kind == F32:
            sums[i], infinite = _fingerprint_f32(base + offsets[i], sizes[i], keys, width)
        else:
            sums[i], infinite = _fingerprint_bf16(base + offsets[i], sizes[i], keys, width)
        bad[i] = np.uint8(infinite)


@numba.njit(nogil=True, cache=True)
def weighted_sum(values: Any, weights: Any) -> Any:
    """sum_i low_i * weights[i, 0] + high_i * weights[i, 1] mod 2^64 of uint64 [n]; low and high have 32 bits.

    Halves, because a sum of keys may be even: times 2 it would lose the highest bit of a whole value.
    """
    total = np.uint64(0)
    for i in range(len(values)):
        x = values[i]
        total += (x & np.uint64(0xFFFFFFFF)) * weights[i, 0] + (x >> np.uint64(32)) * weights[i, 1]
    return total


def fixed_keys(use: str, n: int) -> np.ndarray:
    """Public multipliers for one ``use``, odd uint64 [n]: the same in every run and on every machine."""
    stream = hashlib.shake_256(f"areal_lora {use} keys".encode()).digest(8 * n)
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64) | np.uint64(1)

"""Operations on memory addresses for the compiled loops (``kernels``): what numba has no name for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
_WORDS = LINE_BYTES // 4
_LINE_OF_BITS, _LINE_OF_FLOATS = (ir.VectorType(word, _WORDS) for word in (ir.IntType(32), ir.FloatType()))


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


def _load_line(builder: Any, address: Any, kind: Any) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=2)


def _stream_line(builder: Any, address: Any, line: Any) -> None:
    store = builder.store(line, builder.inttoptr(address, line.type.as_pointer()), align=LINE_BYTES)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


@intrinsic
def stream_line(context: Any, dst: Any, src: Any) -> Any:
    """Copy a line of ``LINE_BYTES`` past the caches; ``dst`` is a multiple of that. Ends with ``complete_stream``."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        _stream_line(builder, args[0], _load_line(builder, args[1], _LINE_OF_BITS))

    return types.void(types.int64, types.int64), generate


@intrinsic
def stream_scaled_line(context: Any, dst: Any, src: Any, scale: Any) -> Any:
    """Like ``stream_line``, each float32 times ``scale``."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        dst, src, scale = args
        empty = ir.Constant(_LINE_OF_FLOATS, ir.Undefined)
        first = builder.insert_element(empty, scale, ir.Constant(ir.IntType(32), 0))
        scales = builder.shuffle_vector(first, empty, ir.Constant(_LINE_OF_BITS, [0] * _WORDS))
        _stream_line(builder, dst, builder.fmul(_load_line(builder, src, _LINE_OF_FLOATS), scales))

    return types.void(types.int64, types.int64, types.float32), generate


@intrinsic
def complete_stream(context: Any) -> Any:
    """Make streamed lines visible to other threads before any later write of this thread."""

    def generate(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")

    return types.void(), generate

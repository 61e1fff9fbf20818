"""The compiled copies and fingerprints against plain loops and torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from areal_lora.engine.vllm_ext import cpu_lora
from areal_lora.weight_sync import kernels
from areal_lora.weight_sync.kernels import BF16, F16, F32, N_KEYS, Block, Marks, TensorBlocks, fingerprints, multipliers

TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory(values: torch.Tensor, dtype: str) -> np.ndarray:
    """uint8 copy of float32 values in ``dtype``."""
    return values.to(TORCH[dtype]).contiguous().view(torch.uint8).numpy().copy()


def as_torch(raw: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(raw).view(TORCH[dtype])


def marks_of(source: np.ndarray, dtype: str) -> Marks:
    """Marks of one tensor that is the whole of ``source``."""
    n = source.nbytes // ITEM[dtype]
    offsets, sizes = np.zeros(1, dtype=np.int64), np.array([n])
    return Marks(
        dtype=dtype,
        keys=multipliers("fingerprint", N_KEYS),
        offsets=offsets,
        sizes=sizes,
        sums=np.zeros(1, np.uint64),
        bad=np.zeros(1, np.uint8),
    )


@settings(max_examples=300, deadline=None)
@given(
    kinds=st.tuples(st.sampled_from(sorted(ITEM)), st.sampled_from(sorted(ITEM))),
    rows=st.integers(1, 5),
    cols=st.one_of(st.integers(1, 150), st.integers(240, 1200)),
    marked=st.booleans(),
    gaps=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    scale=st.sampled_from([1.0, 2.0, 0.3]),
    slot=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_a_block_equals_a_torch_copy(kinds, rows, cols, marked, gaps, scale, slot, seed):
    src_dtype, dst_dtype = kinds
    values = torch.randn(rows * (cols + gaps[0]) + 7, generator=torch.Generator().manual_seed(seed))
    source = memory(values, src_dtype)
    size = rows * (cols + gaps[1]) + 5
    target = memory(torch.full((3 * size,), 9.0), dst_dtype)
    before = as_torch(target.copy(), dst_dtype)
    a, b = ITEM[src_dtype], ITEM[dst_dtype]
    plan = TensorBlocks.of(
        [
            [
                Block(
                    src=7 * a,
                    src_pitch=(cols + gaps[0]) * a,
                    dst=5 * b,
                    dst_pitch=(cols + gaps[1]) * b,
                    rows=rows,
                    cols=cols,
                    dst_step=size * b,
                    scale=scale,
                )
            ]
        ],
        src_dtype,
        dst_dtype,
    )
    plan.check(src_bytes=source.nbytes, dst_bytes=target.nbytes, slots=3)
    marks = marks_of(source, src_dtype) if marked else None
    plan.copy(source.ctypes.data, target.ctypes.data, slot=slot, marks=marks)
    part = as_torch(source, src_dtype)[7:].view(rows, cols + gaps[0])[:, :cols].float()
    want = before.clone()
    want[slot * size + 5 :][: rows * (cols + gaps[1])].view(rows, -1)[:, :cols] = (
        part if scale == 1.0 else part * np.float32(scale)
    ).to(TORCH[dst_dtype])
    assert torch.equal(as_torch(target, dst_dtype), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_that_of_torch_at_every_edge(dtype):
    """Every value of 16 bits, the middle to the next one, their neighbours in float32, and what is not finite."""
    halves = np.arange(1 << 16, dtype=np.uint16)
    values = as_torch(halves.view(np.uint8), dtype).float()
    whole = Block(src=0, src_pitch=0, dst=0, dst_pitch=0, rows=1, cols=len(halves))
    read = np.zeros(len(halves), dtype=np.float32)
    TensorBlocks.of([[whole]], dtype, "float32").copy(halves.ctypes.data, read.ctypes.data)
    torch.testing.assert_close(torch.from_numpy(read), values, rtol=0, atol=0, equal_nan=True)
    finite = values[values.isfinite()].double()
    middles = ((finite[1:] + finite[:-1]) / 2).float().numpy().view(np.uint32)
    bits = np.concatenate(
        [middles, middles - 1, middles + 1, read.view(np.uint32), [1, 0x477FF000, 0x477FEFFF, 0x7F800001]]
    )
    bits = bits.astype(np.uint32)
    out = np.zeros(len(bits), dtype=np.uint16)
    TensorBlocks.of([[whole._replace(cols=len(bits))]], "float32", dtype).copy(bits.ctypes.data, out.ctypes.data)
    want = torch.from_numpy(bits.view(np.float32)).to(TORCH[dtype])
    torch.testing.assert_close(as_torch(out.view(np.uint8), dtype), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", sorted(ITEM))
@pytest.mark.parametrize("begin", range(0, 64, 4))
def test_a_copy_with_marks_is_bit_for_bit_from_and_to_every_place_in_a_line(dtype, begin):
    """Also NaN that signal, which a multiplication by 1 would change."""
    bits = np.full(4096, 0x7FA1_FF81, dtype=np.uint32).view(np.uint8)
    target = np.zeros(bits.nbytes + 128, dtype=np.uint8)
    at = -target.ctypes.data % 64 + begin
    size = bits.nbytes - 8
    whole = Block(src=8, src_pitch=0, dst=at, dst_pitch=0, rows=1, cols=size // ITEM[dtype])
    TensorBlocks.of([[whole]], dtype, dtype).copy(bits.ctypes.data, target.ctypes.data, marks=marks_of(bits, dtype))
    assert (target[at : at + size] == bits[8:]).all()
    assert not target[:at].any()
    assert not target[at + size :].any()


def test_tensors_are_copied_by_range_and_the_rest_stays():
    source = np.arange(12, dtype=np.float32)
    target = np.zeros(12, dtype=np.float32)

    def place(i: int) -> Block:
        return Block(src=16 * i, src_pitch=0, dst=32 - 16 * i, dst_pitch=0, rows=1, cols=4)

    plan = TensorBlocks.of([[place(0)], [], [place(1), place(2)]], "float32", "float32")
    plan.copy(source.ctypes.data, target.ctypes.data, tensors=(1, 3))
    np.testing.assert_array_equal(target, [8, 9, 10, 11, 4, 5, 6, 7, 0, 0, 0, 0])
    back = np.zeros(12, dtype=np.float32)
    plan.copy(source.ctypes.data, target.ctypes.data)
    plan.reversed().copy(target.ctypes.data, back.ctypes.data)
    np.testing.assert_array_equal(back, source)
    with pytest.raises(ValueError, match="destination"):
        plan.moved(dst_by=4).check(src_bytes=48, dst_bytes=48)
    plan.check(src_bytes=48, dst_bytes=48)
    with pytest.raises(ValueError, match="source"):
        plan.check(src_bytes=47, dst_bytes=48)
    scaled = TensorBlocks.of(
        [[Block(src=0, src_pitch=0, dst=0, dst_pitch=0, rows=1, cols=1, scale=2.0)]], "float32", "float32"
    )
    with pytest.raises(ValueError, match="inverse"):
        scaled.reversed()


def slow_fingerprint(raw: bytes, item: int, keys: list[int]) -> int:
    h = len(raw) // item
    bits = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
    for at in range(0, len(bits), len(keys)):
        part = bits[at : at + len(keys)]
        acc = sum(x * k for x, k in zip(part, keys, strict=False)) % 2**64
        h = ((h * 0x9E3779B97F4A7C15) % 2**64) ^ acc ^ (acc >> 32)
    return h


@pytest.mark.parametrize(("kind", "word"), [(F32, np.uint32), (BF16, np.uint16), (F16, np.uint16)])
def test_fingerprints_equal_the_formula(kind, word):
    rng = np.random.default_rng(5)
    sizes = np.array([1, 7, 4096, 8193, 10_000], dtype=np.int64)
    item = np.dtype(word).itemsize
    bits = rng.integers(0, 1 << 14, int(sizes.sum()), dtype=word)
    offsets = (np.cumsum(sizes) - sizes) * item
    keys = multipliers("fingerprint", 1024)
    sums, bad = np.zeros(5, dtype=np.uint64), np.zeros(5, dtype=np.uint8)
    fingerprints(bits.ctypes.data, kind, offsets, sizes, keys.ctypes.data, len(keys), 0, 5, sums, bad)
    parts = np.split(bits, np.cumsum(sizes)[:-1])
    assert sums.tolist() == [slow_fingerprint(p.tobytes(), item, keys.tolist()) for p in parts]
    assert not bad.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 70_000.0])
@pytest.mark.parametrize("at", [0, 1, 2050])
def test_what_is_not_finite_in_16_bits_shows(dtype, poison, at):
    """In both halves of a word and in the odd last one; 70,000 overflows in float16 alone."""
    values = torch.full((2051,), 65504.0 if dtype == "float16" else 3e38)
    values[at] = poison
    source = memory(values, dtype)
    marks = marks_of(source, dtype)
    marks.measure(source.ctypes.data, 0, 1)
    assert bool(marks.bad[0]) == (dtype == "float16" or poison != 70_000.0)
    values[at] = 1.0
    source = memory(values, dtype)
    marks.measure(source.ctypes.data, 0, 1)
    assert not marks.bad[0], "the largest number is one"


def test_every_single_flip_and_every_exchange_shows():
    rng = np.random.default_rng(6)
    values = rng.standard_normal(300).astype(np.float32)
    keys = multipliers("fingerprint", 1024)

    def mark(x):
        sums, bad = np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.uint8)
        of = np.zeros(1, np.int64), np.array([len(x)])
        fingerprints(x.ctypes.data, F32, *of, keys.ctypes.data, len(keys), 0, 1, sums, bad)
        return int(sums[0]), bool(bad[0])

    right, _ = mark(values)
    for i in range(0, 300, 7):
        for bit in range(32):
            other = values.copy()
            other.view(np.uint32)[i] ^= np.uint32(1 << bit)
            assert mark(other)[0] != right
    for i in range(299):
        other = values.copy()
        other[[i, i + 1]] = other[[i + 1, i]]
        assert mark(other)[0] != right
    for poison in (np.nan, np.inf, -np.inf):
        other = values.copy()
        other[299] = poison
        assert mark(other)[1]


def test_the_keys_never_change_and_depend_on_a_key():
    """Digests are compared between processes."""
    keys = multipliers("fingerprint", 1024)
    assert keys.shape == (1024,)
    assert (keys & np.uint64(1)).all()
    assert int(np.bitwise_xor.reduce(keys)) == 15913957524448410850
    keyed = multipliers("fingerprint", 1024, b"secret")
    assert not (keyed == keys).any()
    assert (keyed & np.uint64(1)).all()


@pytest.mark.parametrize("module", [kernels, cpu_lora])
def test_compiled_loops_need_no_folder_that_can_be_written(module: ModuleType, tmp_path: Path) -> None:
    """As in a container of another user. Files are in the places of the folders, which stops root, too."""
    assert module.__file__ is not None
    shutil.copy(module.__file__, tmp_path / "loops.py")
    (tmp_path / "__pycache__").touch()
    code = "import loops, numpy as np; a, b = np.arange(4), np.zeros(4, int)"
    code += "; loops._row_bits(a.ctypes.data, b.ctypes.data, 32); print(b.sum())" * (module is kernels)
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "__pycache__"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-B", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("6\n" if module is kernels else "")

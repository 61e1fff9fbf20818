from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from areal_lora.errors import ManifestError
from areal_lora.weight_sync.buckets import PackBuffer, StagingBuffer, as_float32, read_shard, verify_shard, wire_nbytes
from areal_lora.weight_sync.manifest import Refusal

from .helpers import values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_packed_is_what_is_read(dtype):
    tensors = values(1)
    buffer = PackBuffer(0, dtype)
    shard = buffer.pack(list(tensors.items()))
    flat = buffer.flat.numpy()
    verify_shard(flat, shard)
    read = {meta.name: as_float32(view) for meta, view in read_shard(flat, shard)}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        want = tensor.to(getattr(torch, dtype)).float().numpy()
        np.testing.assert_array_equal(read[name].view(np.uint32), want.view(np.uint32))


def test_bfloat16_widens_exactly_for_every_bit_pattern():
    bits = np.arange(1 << 16, dtype=np.uint16)
    want = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(as_float32(bits).view(np.uint32), want.view(np.uint32))


def test_the_buffer_is_reused_and_keeps_nothing_of_the_caller():
    tensors = values(1)
    buffer = PackBuffer(0, "float32")
    first = buffer.pack(list(tensors.items()))
    where = buffer.flat.data_ptr()
    for t in tensors.values():
        t.zero_()
    verify_shard(buffer.flat.numpy(), first)
    second = buffer.pack(list(tensors.items()))
    assert buffer.flat.data_ptr() == where
    assert second.digest != first.digest
    assert not buffer.flat.any()


def test_parameters_that_require_grad_and_strided_tensors_are_packed_by_value():
    parameter = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    buffer = PackBuffer(0, "float32")
    shard = buffer.pack([("p", parameter), ("t", parameter.t())])
    read = {m.name: v.copy() for m, v in read_shard(buffer.flat.numpy(), shard)}
    np.testing.assert_array_equal(read["p"], parameter.detach().numpy())
    np.testing.assert_array_equal(read["t"], parameter.detach().numpy().T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_flipped_bit_of_a_tensor_is_seen(dtype):
    buffer = PackBuffer(0, dtype)
    shard = buffer.pack([("x", torch.ones(3, 5)), ("y", torch.ones(2, 2))])
    flat = buffer.flat.numpy()
    for byte in range(shard.tensors[0].nbytes):
        flat[byte] ^= 1 << (byte % 8)
        with pytest.raises(ManifestError) as e:
            verify_shard(flat, shard)
        assert e.value.reason == Refusal.HASH
        flat[byte] ^= 1 << (byte % 8)
    verify_shard(flat, shard)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_named(dtype, value):
    tensors = values(2)
    name = list(tensors)[17]
    tensors[name][-1, -1] = value
    buffer = PackBuffer(0, dtype)
    shard = buffer.pack(list(tensors.items()))
    with pytest.raises(ManifestError, match=name) as e:
        verify_shard(buffer.flat.numpy(), shard)
    assert e.value.reason == Refusal.NON_FINITE


def test_an_empty_shard_is_fine():
    buffer = PackBuffer(3, "float32")
    shard = buffer.pack([])
    verify_shard(buffer.flat.numpy(), shard)
    assert (shard.nbytes, shard.tensors) == (0, ())


def test_staging_grows_once():
    staging = StagingBuffer()
    big = staging.sized(10_000)
    assert staging.sized(5_000).base is big.base
    assert staging.sized(10_000).ctypes.data == big.ctypes.data
    assert staging.sized(20_000).size == 20_000


def test_37k_tiny_tensors_take_no_seconds():
    tensors = [(f"model.layers.{i}.lora_A.weight", torch.full((16, 24), float(i))) for i in range(37_248)]
    buffer = PackBuffer(0, "bfloat16")
    buffer.pack(tensors)
    began = time.process_time()
    shard = buffer.pack(tensors)
    packed_s = time.process_time() - began
    began = time.process_time()
    verify_shard(buffer.flat.numpy(), shard)
    verified_s = time.process_time() - began
    print(f"pack {packed_s * 1e3:.0f} ms, verify {verified_s * 1e3:.0f} ms")
    assert packed_s < 3.0
    assert verified_s < 2.0


def test_wire_bytes():
    assert wire_nbytes([(2, 3), (4, 5)], "bfloat16") == 52

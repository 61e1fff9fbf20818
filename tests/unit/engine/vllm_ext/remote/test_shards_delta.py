"""Frames of a shard's difference to an earlier one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from areal_lora.engine.vllm_ext.remote.shards import FRAME_BYTES, HEAD, PART_BYTES, ShardBases, frame, part_of
from areal_lora.weight_sync.manifest import SEAL_BYTES


def test_any_bytes_arrive_as_they_are() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    for nbytes in (1, 2, 3, 16, 1001, *rng.integers(1, PART_BYTES, 5), PART_BYTES):
        for item_bytes in (2, 4):
            part, base = rng.integers(0, 256, (2, nbytes), dtype=np.uint8)
            for before in (base, None):
                sent = frame(part, before, item_bytes)
                size, length = HEAD.unpack(sent[: HEAD.size])
                assert (size, length) == (nbytes, len(sent) - HEAD.size)
                assert length <= FRAME_BYTES
                assert part_of(sent[HEAD.size :], nbytes, before, item_bytes).tobytes() == part.tobytes()


@pytest.mark.parametrize(("dtype", "item_bytes", "least"), [("float32", 4, 1.3), ("bfloat16", 2, 1.9)])
def test_a_small_step_of_all_values_is_sent_in_fewer_bytes(dtype: str, item_bytes: int, least: float) -> None:
    """Relative steps of 1 %, as of Adam; bfloat16 is the upper half of float32."""
    rng = np.random.default_rng(5)
    before = rng.standard_normal(200_000, dtype=np.float32)
    after = before * (1 + rng.standard_normal(200_000, dtype=np.float32) * np.float32(0.01))
    base, part = (x.view(np.uint16).reshape(-1, 2)[:, 2 - item_bytes // 2 :].tobytes() for x in (before, after))
    sent = frame(np.frombuffer(part, np.uint8), np.frombuffer(base, np.uint8), item_bytes)
    assert len(part) / len(sent) > least, dtype


def test_a_damaged_body_gives_zeros_which_no_fingerprint_fits() -> None:
    part = np.arange(4000, dtype=np.uint32).view(np.uint8)
    body = bytearray(frame(part, None, 4)[HEAD.size :])
    body[len(body) // 2] ^= 1
    assert part_of(bytes(body), len(part), None, 4).tobytes() != part.tobytes()
    assert not part_of(b"no frame", len(part), part, 4).any()


def test_bases_are_the_last_ones_of_the_last_adapters() -> None:
    bases = ShardBases(adapters=2, versions=2)
    shards = [np.full(100, n, dtype=np.uint8) for n in range(3)]
    seals = [shard[-SEAL_BYTES:].tobytes().hex() for shard in shards]
    for shard in shards:
        bases.keep("math", 0, shard)
    assert [bases.find("math", 0, 100, seal) is not None for seal in seals] == [False, True, True]
    assert bases.newest("math", 0, 100) is shards[2]
    assert bases.newest("math", 0, 99) is bases.newest("math", 1, 100) is bases.find("math", 0, 99, seals[2]) is None
    bases.keep("code", 0, shards[0])
    bases.keep("math", 1, shards[0])
    bases.keep("chat", 0, shards[0])
    assert [bases.newest(name, 0, 100) is not None for name in ("math", "code", "chat")] == [True, False, True]

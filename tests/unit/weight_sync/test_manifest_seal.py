from __future__ import annotations

import hashlib

import numpy as np

from areal_lora.weight_sync.manifest import adapter_digest, masked, shard_keys, shard_sum
from tests.support.weight_sync.helpers import KEYS, packed, share, values


def test_the_adapter_digest_ignores_sharding_order_and_sharing():
    full = values(3)
    owned, aliases = share(full)

    def digest(tensors, of=()):
        shard, _ = packed(list(tensors), of)
        return adapter_digest(shard.layout, [shard.sum])

    shared = digest(owned, aliases)
    assert shared == digest(full.items())
    assert shared == digest(list(full.items())[::-1])
    one = dict(full)
    name = next(iter(one))
    one[name] = one[name] + 1e-6
    assert shared != digest(one.items())
    renamed = {n.replace("layers.0", "layers.7"): t for n, t in full.items()}
    assert shared != digest(renamed.items())


def test_the_sum_of_a_shard_follows_the_places_of_all_names():
    owned, aliases = share(values(3))
    shard, _ = packed(owned, aliases)
    layout, tensors = shard.layout, shard.layout.shards[0].tensors
    names = sorted([*(t.name for t in tensors), *aliases])
    stream = hashlib.shake_256(b"areal_lora place keys").digest(16 * len(names))
    keys = [int.from_bytes(stream[i : i + 8], "little") | 1 for i in range(0, len(stream), 8)]
    total = 0
    for tensor, fingerprint in zip(tensors, map(int, shard.sums), strict=True):
        for i in (i for i, name in enumerate(names) if aliases.get(name, name) == tensor.name):
            total += fingerprint % 2**32 * keys[2 * i] + (fingerprint >> 32) * keys[2 * i + 1]
    assert shard.sum == total % 2**64
    swapped = shard.sums.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert shard_sum(layout, 0, swapped) != shard.sum
    for i in range(len(swapped)):
        for bit in (0, 31, 32, 63):
            flipped = shard.sums.copy()
            flipped[i] ^= np.uint64(1 << bit)
            assert shard_sum(layout, 0, flipped) != shard.sum, (tensors[i].name, bit)


def test_no_fingerprint_is_in_clear_and_no_stream_covers_two_versions():
    owned, aliases = share(values(3))
    (first, _), (second, _) = (packed(owned, aliases, version=version) for version in (1, 2))
    n = 8 * len(first.sums)
    assert (first.sums == second.sums).all()
    sent = [shard._trailer[:n].view(np.uint64).copy() for shard in (first, second)]
    assert not (sent[0] == first.sums).any()
    assert not (sent[0] == sent[1]).any()
    back = masked(sent[0], first._trailer[n:].tobytes(), KEYS.mask)
    assert (back == first.sums).all()


def test_keys_follow_from_the_secret():
    one, other = shard_keys("one"), shard_keys("other")
    assert not (one.multipliers == other.multipliers).any()
    assert len({one.seal, one.mask, other.seal, other.mask}) == 4

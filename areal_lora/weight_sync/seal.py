"""Integrity of a publish: sums of fingerprints, the trailer with its seal, the digest of an adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

from areal_lora.types import AdapterRef
from areal_lora.weight_sync.kernels import weighted_sum
from areal_lora.weight_sync.layout import AdapterLayout, ShardLayout

SEAL_BYTES = 16
LINE_BYTES = 64  # cache line; fingerprints are aligned to it


def shard_sum(layout: AdapterLayout, shard: int, sums: np.ndarray) -> int:
    """Combine all fingerprints (uint64 [tensors]) of a shard, given by its index, into 64 bits.

    Multilinear like the fingerprints themselves; a cryptographic hash of 300 kB would take longer
    than comparing them.
    """
    return int(weighted_sum(sums, layout.weights[shard]))


def seal(ref: AdapterRef, layout_digest: str, shard_sum: int) -> bytes:
    """Tie the fingerprints of a shard to their version and layout; ``SEAL_BYTES`` long."""
    head = f"{ref}\0{layout_digest}\0".encode()
    return hashlib.blake2b(head + shard_sum.to_bytes(8, "little"), digest_size=SEAL_BYTES).digest()


def trailer_bytes(shard: ShardLayout) -> int:
    """Length of the last broadcast of a shard: a fingerprint of 8 bytes per tensor, and the seal."""
    return 8 * len(shard.tensors) + SEAL_BYTES


def trailer_part(shard: ShardLayout) -> tuple[int, int]:
    """(start, end) of the trailer in the memory of a packed shard, after the tensors."""
    start = -(-shard.nbytes // LINE_BYTES) * LINE_BYTES
    return start, start + trailer_bytes(shard)


def adapter_digest(layout: AdapterLayout, shard_sums: Iterable[int]) -> str:
    """Digest of an adapter's names and values, independent of how the trainer was sharded (contract C4).

    ``shard_sums`` of all shards. Equal adapters in equal wire dtypes agree.
    """
    total = sum(shard_sums) % 2**64
    return hashlib.blake2b(layout.names_digest.encode() + total.to_bytes(8, "little"), digest_size=16).hexdigest()

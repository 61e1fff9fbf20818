"""What each rank of a test receives in a real exchange."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_lora.distributed.store import INLINE_BYTES, Exchange


def part(number: int) -> np.ndarray:
    """Int32 [2, n]; that of number 1 is empty."""
    return np.random.default_rng(number).integers(-(2**31), 2**31, (2, 50_000 * abs(number - 1)), dtype=np.int32)


def received(cases: Sequence[Sequence[int]]) -> list[bytes]:
    """For each of ``cases`` this rank's part (rank 0: nothing), then messages of three sizes."""
    exchange, found = Exchange(timeout_s=150.0), []
    for of_ranks in cases:
        room = np.zeros_like(part(of_ranks[exchange.rank])) if exchange.rank else np.zeros((2, 0), np.int32)
        exchange.scatter(part, of_ranks, room)
        found.append(room.tobytes())
    for size in (0, INLINE_BYTES, 3 * INLINE_BYTES + 1):
        data = np.random.default_rng(size).bytes(size)
        found.append(exchange.broadcast_bytes(None if exchange.rank else data))
        mine = exchange.all_gather_bytes(bytes([exchange.rank]) * size * exchange.rank)
        found.append(b"|".join(mine))
    return found

"""How large the buckets of a shard are. Pure; senders, receivers and the memory estimate agree on it."""

from __future__ import annotations

from itertools import accumulate, pairwise

RAMP = 2  # doublings from the first bucket to a full one


def bucket_ends(nbytes: int, bucket_bytes: int) -> list[int]:
    """Ideal ends of buckets if tensors could be cut anywhere: a ramp up, equal buckets, a ramp down, ``nbytes``."""
    ramp = [max(bucket_bytes >> k, 1) for k in range(RAMP, 0, -1)]
    while ramp and 2 * sum(ramp) > nbytes:
        ramp.pop()  # too little for the whole ramp
    down = ramp[::-1]
    inner = nbytes - 2 * sum(ramp)
    if ramp and inner <= ramp[-1]:  # a short bucket between long ones would cost a round for nothing
        inner += ramp.pop()
    n = -(-inner // bucket_bytes)
    sizes = [*ramp, *(inner * (k + 1) // n - inner * k // n for k in range(n)), *down]
    return [total for total in accumulate(sizes) if total]


def largest_bucket(nbytes: int, bucket_bytes: int) -> int:
    """Bytes of the largest bucket of a shard; 0 for an empty one."""
    ends = [0, *bucket_ends(nbytes, bucket_bytes)]
    return max((b - a for a, b in pairwise(ends)), default=0)

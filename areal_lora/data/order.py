"""Prompt order without a cursor: a keyed permutation of ``(seed, epoch, index)``.

Position ``p`` of the endless prompt stream belongs to epoch ``p // n`` and to the sample
``permute(p % n)``, where every epoch has its own permutation. Nothing is stored: any process
that knows seed and position knows the prompt, so a resumed run needs only a number.

The permutation is a balanced Feistel network over the smallest even-bit domain that holds
``n``, with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002):
values outside ``range(n)`` are encrypted again until they fall inside. The domain is less
than 4 n, so that takes fewer than four rounds of encryption on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The order in which ``n_samples`` samples are visited, epoch after epoch."""

    seed: int
    n_samples: int

    def __post_init__(self) -> None:
        if self.n_samples < 1:
            raise ValueError(f"a prompt order needs at least one sample, got {self.n_samples}")

    def locate(self, position: int) -> tuple[int, int]:
        """``(epoch, sample index)`` of the ``position``-th prompt of the stream (from 0)."""
        epoch, offset = divmod(position, self.n_samples)
        return epoch, permute(offset, self.n_samples, seed=self.seed, epoch=epoch)


def permute(index: int, n: int, *, seed: int, epoch: int) -> int:
    """Image of ``index`` under the permutation of ``range(n)`` keyed by ``(seed, epoch)``."""
    if not 0 <= index < n:
        raise ValueError(f"index {index} is outside range({n})")
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    key = f"{seed}:{epoch}".encode()
    value = _encrypt(index, half_bits, key)
    while value >= n:
        value = _encrypt(value, half_bits, key)
    return value


def _encrypt(value: int, half_bits: int, key: bytes) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_number in range(_ROUNDS):
        message = b"%s:%d:%d" % (key, round_number, right)
        digest = int.from_bytes(blake2b(message, digest_size=8).digest(), "little")
        left, right = right, left ^ (digest & mask)
    return (left << half_bits) | right

"""Dropout on the input of lora_A, from a counter: no generator, no state, the same in every layout.

Whether feature j of a token's input at a site is kept is a function of the adapter's seed, its optimizer step, the
token's text so far, the site and j. So masks do not depend on micro-batches, packing, ranks or recomputation. A start
that several sequences share has one mask in all of them, as it is computed once.

The function multiplies a key of (step, text, site) with an odd number for j and mixes the product as splitmix64 does
(Steele et al. 2014, "Fast splittable pseudorandom number generators", section 4).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LANE_BITS, _LANES = 22, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """The masks of one adapter at one optimizer step; ``seed`` is `step_seed`. ``rate`` in (0, 1) is dropped."""

    rate: float
    seed: int

    @property
    def factor(self) -> float:
        """What multiplies the inputs that are kept, so that their mean stays."""
        return 1.0 / (1.0 - self.rate)

    def keep(self, keys: Tensor, sites: int | Tensor, features: int, first: int = 0) -> Tensor:
        """[t, features] bool of features ``first`` on, for tokens with ``keys`` [t] at one site or [t] sites."""
        rows = _mix(keys ^ _signed(self.seed) ^ sites)
        columns = _mix(torch.arange(first, first + features, device=keys.device) + _signed(_GOLDEN)) | 1
        product = rows[:, None] * columns[None, :]
        product ^= (product >> 32) & 0xFFFFFFFF
        product *= _signed(_FIRST)
        return product >= int((self.rate - 0.5) * 2**64)


def step_seed(seed: int, step: int) -> int:
    """Seed of the masks of an adapter with ``seed`` before its optimizer step number ``step``; 63 bits."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=8).digest(), "little") >> 1


def site_key(name: str) -> int:
    """Number of the site whose lora_A has this module name; 63 bits."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def text_keys(tokens: np.ndarray, starts: Sequence[int] | np.ndarray = (0,)) -> np.ndarray:
    """int64 [n] for the tokens [n] of sequences that start at ``starts``: of each the text up to it."""
    start = np.asarray(starts, dtype=np.int64)
    lengths = np.diff(start, append=len(tokens))
    places = np.arange(len(tokens)) - start.repeat(lengths)
    values = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    values += places.astype(np.uint64) * np.uint64(_SECOND)
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    sums = np.cumsum(values, dtype=np.uint64)
    sums -= np.insert(sums, 0, 0)[start].repeat(lengths)  # those of the sequences before
    return sums.view(np.int64)


def to_lanes(keys: Tensor) -> Tensor:
    """[t, 3] fp32 that hold ``keys`` [t] exactly: what moves hidden states can move them."""
    return torch.stack([((keys >> (_LANE_BITS * i)) & (2**_LANE_BITS - 1)).float() for i in range(_LANES)], dim=1)


def from_lanes(lanes: Tensor) -> Tensor:
    """Inverse of `to_lanes`."""
    parts = lanes.long()
    return parts[:, 0] | (parts[:, 1] << _LANE_BITS) | (parts[:, 2] << 2 * _LANE_BITS)


def kept(x: Tensor, keep: Tensor | None) -> Tensor:
    """``x`` [t, n] with zeros where ``keep`` is not set."""
    return x if keep is None else x.masked_fill(~keep, 0.0)


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = x ^ ((x >> shift) & (2 ** (64 - shift) - 1))
        x = x * _signed(factor)
    return x ^ ((x >> 31) & (2**33 - 1))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value

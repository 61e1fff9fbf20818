"""The adapters that a model's layers compute with, whose tokens are which, and dropout.

A layer that adapters extend is wrapped once and holds its part of each resident adapter by name. One `ActiveAdapters`,
which all layers share, names those in use, and which rows of a micro-batch are each one's: a run of the packed row, and
of an expert's rows. None is in use outside of `ActiveAdapters.using`: a forward pass that names no adapter is one of
the frozen base (contract C11).

Dropout on the input of lora_A comes from a counter: no generator, no state, the same in every layout. Whether feature
j of a token's input at a site is kept is a function of the adapter's seed, its optimizer step, the token's text so
far, the site and j. So masks do not depend on micro-batches, packing, ranks or recomputation. A start that several
sequences share has one mask in all of them, as it is computed once.

The function multiplies a key of (step, text, site) with an odd number for j and mixes the product as splitmix64 does
(Steele et al. 2014, "Fast splittable pseudorandom number generators", section 4).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """The tokens of a micro-batch, t with padding, sorted by adapter: those of adapter i end before ``ends[i]``.

    ``keys`` [t] int64 are those of dropout (`text_keys`), 0 for padding, which is the last adapter's. ``owners`` [t]
    int64 are the adapters' numbers i, None where there is one adapter.
    """

    keys: Tensor
    ends: tuple[int, ...]
    owners: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveAdapter:
    """An adapter in use, with the rows of a micro-batch from ``start`` on, which have ``keys``.

    ``dropout`` are the masks of its inputs, None while nothing is trained.
    """

    name: str
    dropout: Dropout | None
    start: int
    keys: Tensor | None

    def keep(self, site: int, features: int, first: int = 0) -> Tensor | None:
        """[rows, features] of a dense site's input, see `Dropout.keep`; None where nothing is dropped."""
        if self.dropout is None:
            return None
        assert self.keys is not None
        return self.dropout.keep(self.keys, site, features, first)

    @property
    def factor(self) -> float:
        """What multiplies the adapter's product because of dropout."""
        return 1.0 if self.dropout is None else self.dropout.factor


class ActiveAdapters:
    """The adapters in use, and their tokens in the micro-batch that a layer computes; none is the frozen base."""

    each: tuple[ActiveAdapter, ...]
    tokens: PackedTokens | None

    def __init__(self, used: Mapping[str, Dropout | None] | None = None) -> None:
        self._used = used or {}
        self.follow(None)

    @property
    def drops(self) -> bool:
        """Whether inputs of any of them are dropped."""
        return any(adapter.dropout is not None for adapter in self.each)

    @contextmanager
    def using(self, adapters: Mapping[str, Dropout | None]) -> Iterator[None]:
        """Compute with ``adapters`` and their masks until the context ends, backward passes and recomputation included.

        They are in the order of their rows. An empty name is the frozen base.
        """
        before = self._used, self.tokens, self.each
        self._used = adapters
        self.follow(None)
        try:
            yield
        finally:
            self._used, self.tokens, self.each = before

    def follow(self, tokens: PackedTokens | None) -> None:
        """Compute ``tokens`` next; without them one adapter has all rows."""
        self.tokens = tokens
        keys = (None,) * len(self._used) if tokens is None else self.split(tokens.keys)
        starts = (0, *(tokens.ends if tokens else ()))
        rows = zip(self._used.items(), starts, keys, strict=False)
        self.each = tuple(ActiveAdapter(name=n, dropout=d, start=at, keys=k) for (n, d), at, k in rows)

    def split(self, rows: Tensor, first: int = 0) -> Sequence[Tensor]:
        """The rows of each adapter in use, of ``rows`` [m, ...] from row ``first`` of the micro-batch on."""
        if len(self._used) < 2:
            return (rows,)
        assert self.tokens is not None
        ends = [min(max(end - first, 0), len(rows)) for end in self.tokens.ends]
        parts: Sequence[Tensor] = rows.split([end - start for start, end in pairwise((0, *ends))])
        return parts

"""The adapters that a model's layers compute with, whose tokens are which, and dropout.

A layer that adapters extend is wrapped once and holds its part of each resident adapter by name. One `ActiveAdapters`,
which all layers share, names those in use, and which rows of a micro-batch are each one's: a run of the packed row, and
of an expert's rows. None is in use outside of `ActiveAdapters.using`: a forward pass that names no adapter is one of
the frozen base (contract C11). What adapters differ in (scale, mask) is a number of each row on the device.

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
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.platforms.device import upload

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
        return _mask(keys ^ self.seed ^ sites, self.limit, features, first)

    @property
    def limit(self) -> int:
        """What is kept is as large or larger; 64 bits, signed."""
        return int((self.rate - 0.5) * 2**64)


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


def _mask(keys: Tensor, limit: int | Tensor, features: int, first: int) -> Tensor:
    columns = _mix(torch.arange(first, first + features, device=keys.device) + _signed(_GOLDEN)) | 1
    product = _mix(keys)[:, None] * columns[None, :]
    product ^= (product >> 32) & 0xFFFFFFFF
    product *= _signed(_FIRST)
    return product >= limit


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        x = x ^ ((x >> shift) & (2 ** (64 - shift) - 1))
        x = x * _signed(factor)
    return x ^ ((x >> 31) & (2**33 - 1))


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """The tokens of a micro-batch, t with padding, sorted by adapter; or the rows of experts, of each by adapter.

    ``keys`` [t] int64 are those of dropout (`text_keys`), 0 for padding, which is the last adapter's. Where N > 1
    adapters are in use, ``owners`` [t] int64 are their numbers, and the tokens of adapter i end before ``ends[i]``,
    [N] int32; those of expert e and adapter i before ``ends[e * N + i]``. All are on the device.

    ``routes`` [t, L, K] int16 are the experts that the server chose in the L layers with experts of this rank's stage,
    or any for padding, -1 where the router chooses; None: everywhere.
    """

    keys: Tensor
    ends: Tensor | None = None
    owners: Tensor | None = None
    routes: Tensor | None = None

    def part(self, first: int, n: int) -> "PackedTokens":
        """``n`` of the tokens, from ``first`` on."""
        keys = self.keys[first : first + n]
        if self.ends is None or self.owners is None:
            return PackedTokens(keys=keys)
        owners = self.owners[first : first + n]
        return PackedTokens(keys=keys, ends=(self.ends - first).clamp_(0, n), owners=owners)


Choices = Literal["compare", "record"]


class ActiveAdapters:
    """The adapters in use, and their tokens in the micro-batch that a layer computes; none is the frozen base."""

    each: Mapping[str, Dropout | None]
    """By name in the order of their rows, the masks of their inputs; None while nothing is trained."""

    def __init__(self, used: Mapping[str, Dropout | None] | None = None) -> None:
        self.tokens: PackedTokens | None = None
        """Those that are computed next; without them one adapter has all rows."""
        self.flips: Tensor | None = None
        self.chooses: Choices | None = None
        """Whether routers choose where tokens have routes, and why."""
        self._use(used or {})

    def _use(self, adapters: Mapping[str, Dropout | None]) -> None:
        self.each, self._tables = adapters, dict[tuple[torch.dtype, tuple[float, ...]], Tensor]()
        self._rows = dict[tuple[torch.dtype, tuple[float, ...]], tuple[Tensor, Tensor]]()

    @property
    def drops(self) -> bool:
        return any(self.each.values())

    @contextmanager
    def using(self, adapters: Mapping[str, Dropout | None]) -> Iterator[None]:
        """Compute with ``adapters`` and their masks until the context ends, backward passes and recomputation included.

        They are in the order of their rows. An empty name is the frozen base.
        """
        before = self.each, self._tables, self._rows, self.tokens
        self._use(adapters)
        self.tokens = self.flips = None
        try:
            yield
        finally:
            self.each, self._tables, self._rows, self.tokens = before

    def routes(self, layer: int) -> Tensor | None:
        """[t, K] of the tokens at a layer, counted among those with experts; None: its router chooses."""
        return None if self.tokens is None or self.tokens.routes is None else self.tokens.routes[:, layer]

    @contextmanager
    def choosing(self, why: Choices) -> Iterator[None]:
        """Routers choose, and the routes of the tokens are compared with that, or become it (not with gradients)."""
        self.chooses = why
        try:
            yield
        finally:
            self.chooses = None

    def chosen(self, own: Tensor, routes: Tensor) -> bool:
        """Whether routers choose. To record, ``routes`` [t, K] become the router's ``own`` [t, K].

        To compare, this adds to ``flips``, on the device: pairs (token, layer) whose routes name other experts,
        and all pairs with routes, since `using` started.
        """
        if self.chooses == "record":
            routes.copy_(own)
        if self.chooses != "compare":
            return self.chooses is not None
        known = routes[:, 0] >= 0
        same = (own[:, :, None] == routes[:, None]).any(2).all(1)
        counts = torch.stack([(known & ~same).sum(), known.sum()])
        self.flips = counts if self.flips is None else self.flips + counts
        return True

    def flipped_share(self) -> float | None:
        """Of the ``flips`` of all ranks; None without any pair. Collective."""
        counts = torch.zeros(2, dtype=torch.int64) if self.flips is None else self.flips.cpu()
        dist.all_reduce(counts)
        different, every = counts.tolist()
        return different / every if every else None

    def scale(self, scales: Sequence[float], rows: PackedTokens | None) -> float | Tensor:
        """What multiplies the product of each of ``rows``, of adapters with ``scales`` at a site: [m, 1] fp32.

        One number where one adapter is in use.
        """
        masks = self.each.values()
        values = [scale * (mask.factor if mask else 1.0) for scale, mask in zip(scales, masks, strict=True)]
        return values[0] if len(values) == 1 else self._by_row(values, torch.float32, rows)[:, None]

    def keep(self, rows: PackedTokens | None, sites: int | Tensor, features: int, first: int = 0) -> Tensor | None:
        """[m, features] of a site's inputs, see `Dropout.keep`; None where nothing is dropped."""
        if not self.drops:
            return None
        assert rows is not None
        masks = [dropout or Dropout(rate=0.0, seed=0) for dropout in self.each.values()]
        if len(masks) == 1:
            return masks[0].keep(rows.keys, sites, features, first)
        seeds = self._by_row([mask.seed for mask in masks], torch.int64, rows)
        limits = self._by_row([mask.limit for mask in masks], torch.int64, rows)
        return _mask(rows.keys ^ seeds ^ sites, limits[:, None], features, first)

    def _by_row(self, values: Sequence[float], dtype: torch.dtype, rows: PackedTokens | None) -> Tensor:
        """[m] of the adapters' ``values``, copied to the device once; those of the micro-batch's tokens are kept."""
        assert rows is not None
        assert rows.owners is not None
        key = dtype, tuple(values)
        if (known := self._rows.get(key)) and known[0] is rows.owners:
            return known[1]
        if key not in self._tables:
            self._tables[key] = upload(torch.tensor(values, dtype=dtype, device="cpu"), rows.owners.device)
        found = self._tables[key].index_select(0, rows.owners)
        if rows is self.tokens:
            self._rows[key] = rows.owners, found
        return found

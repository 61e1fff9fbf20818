"""All routed experts of a layer with LoRA inside, as one autograd function of grouped matrix products.

It needs nothing but torch and runs on every device. Shapes: T rows sorted by expert, n experts, hidden h, width f::

    g = x W1' + s (d(x) A1') B1'       [T, 2f]   d: dropout, the identity where nothing is trained
    u = silu(g[:, :f]) g[:, f:] p      [T, f]    p: the router's weight of each row
    y = u W2' + s (d(u) A2') B2'       [T, h]

A layer that adapters extend is wrapped once and holds its part of each resident adapter by name. One `ActiveAdapter`,
which all layers share, names the one in use. None is in use outside of `ActiveAdapter.using`: a forward pass that names
no adapter is one of the frozen base (contract C11).

Dropout on the input of lora_A comes from a counter: no generator, no state, the same in every layout. Whether feature
j of a token's input at a site is kept is a function of the adapter's seed, its optimizer step, the token's text so
far, the site and j. So masks do not depend on micro-batches, packing, ranks or recomputation. A start that several
sequences share has one mask in all of them, as it is computed once.

The function multiplies a key of (step, text, site) with an odd number for j and mixes the product as splitmix64 does
(Steele et al. 2014, "Fast splittable pseudorandom number generators", section 4).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

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


ALIGN_BYTES = 16  # torch's grouped matrix product wants rows that start at multiples of this


@dataclass(frozen=True, slots=True)
class Groups:
    """The rows of each expert, sorted by expert: expert e has those before ``ends[e]``, [n] int32 on their device.

    Weights are [n, ...], or [...] for all experts. Each product is one launch whatever n is, and none reads ``ends`` on
    the host.
    """

    ends: Tensor

    def times(self, x: Tensor, weight: Tensor) -> Tensor:
        """[T, out] = x [T, in] times the transposed weight [n, out, in] of each row's expert."""
        if weight.dim() == 2:
            return x @ weight.t()
        if not len(x):
            return x.new_empty(0, weight.shape[1])
        out = functional.grouped_mm(_aligned(x), _aligned(weight, 2).transpose(1, 2), offs=self.ends)
        return out[:, : weight.shape[1]]

    def outer(self, y: Tensor, x: Tensor, like: Tensor) -> Tensor:
        """The gradient of a weight ``like`` [n, out, in]: y [T, out] transposed times x [T, in], per expert."""
        if like.dim() == 2:
            return y.t() @ x
        if not len(x):
            return torch.zeros_like(like)
        grad = functional.grouped_mm(_aligned(y).t(), _aligned(x), offs=self.ends)
        return grad[:, : like.shape[1], : like.shape[2]]


def _aligned(x: Tensor, dims: int = 1) -> Tensor:
    """``x``, its last ``dims`` dimensions filled up with zeros to `ALIGN_BYTES` where a rank or a width is odd."""
    unit = ALIGN_BYTES // x.element_size()
    missing = [-size % unit for size in x.shape[: -dims - 1 : -1]]
    return functional.pad(x, [n for size in missing for n in (0, size)]) if any(missing) else x


class ExpertMlp(torch.autograd.Function):  # type: ignore[misc]
    """The module's formulas. Base weights are constants; an adapter that is off has None for A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        probs: Tensor,
        a1: Tensor | None,
        b1: Tensor | None,
        a2: Tensor | None,
        b2: Tensor | None,
        w1: Tensor,
        w2: Tensor,
        groups: Groups,
        scales: tuple[float, float],
        keeps: tuple[Tensor | None, Tensor | None],
    ) -> Tensor:
        g = groups.times(x, w1)
        h1 = _add_adapter(groups, g, x, a1, b1, scales[0], keeps[0])
        gate, up = g.chunk(2, dim=-1)
        act = functional.silu(gate).mul_(up)
        u = act * probs[:, None]
        y = groups.times(u, w2)
        h2 = _add_adapter(groups, y, u, a2, b2, scales[1], keeps[1])
        ctx.save_for_backward(x, probs, a1, b1, a2, b2, w1, w2, g, act, h1, h2, *keeps)
        ctx.groups, ctx.scales = groups, scales
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, probs, a1, b1, a2, b2, w1, w2, g, act, h1, h2, *keeps = ctx.saved_tensors
        groups: Groups = ctx.groups
        dy = dy.contiguous()
        du = groups.times(dy, w2.transpose(1, 2))
        da2, db2 = _adapter_grads(groups, dy, du, lambda: act * probs[:, None], h2, a2, b2, ctx.scales[1], keeps[1])
        d_probs = (du * act).sum(-1)
        du.mul_(probs[:, None])
        gate, up = g.chunk(2, dim=-1)
        dg = torch.empty_like(g)
        d_gate, d_up = dg.chunk(2, dim=-1)
        torch.mul(du, functional.silu(gate), out=d_up)
        d_gate.copy_(torch.ops.aten.silu_backward(du.mul_(up), gate))
        dx = groups.times(dg, w1.transpose(1, 2))
        da1, db1 = _adapter_grads(groups, dg, dx, lambda: x, h1, a1, b1, ctx.scales[0], keeps[0])
        return dx, d_probs, da1, db1, da2, db2, None, None, None, None, None


def _add_adapter(
    groups: Groups, out: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None, scale: float, keep: Tensor | None
) -> Tensor | None:
    """Add ``scale * B A x`` to ``out``, of x what ``keep`` [T, in] keeps; returns ``A x`` [T, r]."""
    if a is None or b is None:
        return None
    hidden = groups.times(kept(x, keep), a)
    out.add_(groups.times(hidden, b), alpha=scale)
    return hidden


def _adapter_grads(
    groups: Groups,
    dy: Tensor,
    dx: Tensor,
    x: Callable[[], Tensor],
    hidden: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    scale: float,
    keep: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of A and B from that of the output; adds the adapter's part to the input's gradient ``dx``."""
    if a is None or b is None:
        return None, None
    assert hidden is not None
    dh = groups.times(dy, b.transpose(-1, -2)).mul_(scale)
    back = groups.times(dh, a.transpose(-1, -2))
    dx.add_(back if keep is None else back.masked_fill_(~keep, 0.0))
    return groups.outer(dh, kept(x(), keep), a), groups.outer(dy, hidden * scale, b)


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """One adapter's part: stacks ``a`` [n, r, in] and ``b`` [n, out, r], or one [r, in], [out, r] of all experts.

    They have the type of the layer's inputs.

    ``sites`` int64, on their device, are the numbers of the experts' sites (`site_key`), one each or one of all.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    sites: Tensor | None = None

    def keep(
        self, dropout: Dropout | None, keys: Tensor | None, groups: Groups, features: int, first: int = 0
    ) -> Tensor | None:
        """[T, features] of the rows with ``keys`` [T], see `Dropout.keep`; None where nothing is dropped."""
        if dropout is None or self.a is None:
            return None
        assert keys is not None
        assert self.sites is not None
        sites = self.sites
        if len(sites) > 1:
            sites = sites.repeat_interleave(groups.ends.diff(prepend=groups.ends.new_zeros(1)), output_size=len(keys))
        return dropout.keep(keys, sites, features, first)


class ActiveAdapter:
    """The name of the adapter in use; None is the frozen base.

    ``dropout`` are the masks of its inputs, None while nothing is trained; ``keys`` [t] then those of the tokens that a
    layer computes (`dropout.text_keys`).
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.dropout: Dropout | None = None
        self.keys: Tensor | None = None

    @contextmanager
    def using(self, name: str | None, dropout: Dropout | None = None) -> Iterator[None]:
        """Compute with ``name`` until the context ends, backward passes and recomputation included."""
        before = self.name, self.dropout, self.keys
        self.name, self.dropout, self.keys = name, dropout, None
        try:
            yield
        finally:
            self.name, self.dropout, self.keys = before

    def keep(self, site: int, features: int, first: int = 0) -> Tensor | None:
        """[t, features] of a dense site's input, see `Dropout.keep`; None where nothing is dropped."""
        if self.dropout is None:
            return None
        assert self.keys is not None
        return self.dropout.keep(self.keys, site, features, first)

    @property
    def factor(self) -> float:
        """What multiplies the adapter's product because of dropout."""
        return 1.0 if self.dropout is None else self.dropout.factor


def expert_mlp(
    x: Tensor,
    probs: Tensor,
    loras: tuple[ExpertLora, ExpertLora],
    weights: tuple[Tensor, Tensor],
    ends: Tensor,
    active: ActiveAdapter,
    keys: Tensor | None,
    first_column: int = 0,
) -> Tensor:
    """`ExpertMlp` of rows ``x`` [T, h], with the parts ``loras`` of the active adapter; ``ends`` [n] as in `Groups`.

    ``keys`` [T] are the rows' where inputs are dropped; this rank has columns from ``first_column`` on.
    """
    groups, (fc1, fc2), (w1, w2) = Groups(ends), loras, weights
    scales = fc1.scale * active.factor, fc2.scale * active.factor
    keeps = (
        fc1.keep(active.dropout, keys, groups, x.shape[1]),
        fc2.keep(active.dropout, keys, groups, w2.shape[2], first_column),
    )
    rows: Tensor = ExpertMlp.apply(x, probs.to(x.dtype), fc1.a, fc1.b, fc2.a, fc2.b, w1, w2, groups, scales, keeps)
    return rows

"""Split the mismatch of the policies that sampled and that are trained into parts by cause, which add up to the whole.

A part is what the mismatch falls by once its cause is removed, after those before it. With d the difference of both
policies' log-probabilities at the sampled tokens the mismatch is mean |d|, and to second order the divergence
KL(sampled, trained) = mean d^2 / 2 (estimator k2 of http://joschu.net/blog/kl-approx.html). In the divergence a cause
that is not correlated with others has the part that it has alone. A part below 0: the cause reduces the mismatch.

`choose` takes the behaviour correction of the next step from the mismatch of the one before
(`behaviour_correction: auto`). Both figures of a step are means over the trained sampled tokens of the whole batch, so
all ranks choose the same.

`shift_votes` detects recorded log-probabilities that are shifted by one token, with any policy close to the sampling
one. It shows without a tolerance: where neighbouring tokens differ by much, in the records and in the present policy,
the present value of a token is far nearer to the token's own record than to its neighbour's. That holds for policies
that are several versions apart and for coarse arithmetic: a batch of stale tokens can be checked, too.

Of token t and t + 1 of an answer, with records r and present values c::

    late: the record of t is at t + 1          c[t] is at r[t + 1] and not at r[t]
    early: the record of t + 1 is at t         c[t + 1] is at r[t] and not at r[t + 1]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor

from areal_lora.types import Correction


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerScores:
    """Log-probabilities [n] of the same tokens on the side of the servers, over the whole vocabulary but for ``kept``.

    As ``recorded``, and the same over the ids that sampling ``kept``; by a server under the version that ``sampled``
    each token, under the ``current`` one, and of the ``base`` (None: no server has all of those versions, or the base).
    """

    recorded: Tensor
    kept: Tensor
    sampled: Tensor | None
    current: Tensor
    base: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerScores:
    """Those of the trainer at the version in training, [n]; None: not measured.

    As they are ``trained`` (over the kept ids, along routes), with the experts of its ``own`` choice, over the
    ``whole`` vocabulary (``trained`` where nothing is truncated), of the ``base``, and by the weights that servers
    ``served``: of the base, or, where that is not measured, of the policy. Routes are those of the version that
    sampled; ``newest`` is without them where servers score the current version along others (None: as ``whole``).
    """

    trained: Tensor
    whole: Tensor
    own: Tensor | None = None
    base: Tensor | None = None
    served: Tensor | None = None
    newest: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchPart:
    """Nats per token of mean |d| (``gap``) and of the divergence (``kl``)."""

    gap: float
    kl: float


def chain(server: ServerScores, trainer: TrainerScores) -> dict[str, tuple[Tensor, Tensor]]:
    """Both policies with each cause and those after it, for `split`. A cause without its scores has no pair.

    ===============  =================================  ====================================
    cause            with it                            removed by
    ===============  =================================  ====================================
    ``flips``        the trainer's routers choose       replay of the servers' routes
    ``truncation``   over the kept ids                  scores over the whole vocabulary
    ``record``       the records of the sampling        a server's scores under that version
    ``staleness``    the version that sampled           the version in training
    ``adapter``      base and adapter                   the base alone on both sides
    ``weights``      the trainer's own base weights     the servers' rounded or merged weights
    ``numerics``     all that remains
    ===============  =================================  ====================================
    """
    rest = policies = server.current, trainer.whole if trainer.newest is None else trainer.newest
    if server.base is not None and trainer.base is not None:
        rest = server.base, trainer.base
    served = trainer.served if (server.base is None) == (trainer.base is None) else None
    pairs = {
        "flips": (server.kept, trainer.own),
        "truncation": (server.kept, None if trainer.whole is trainer.trained else trainer.trained),
        "record": (server.recorded, None if server.sampled is None else trainer.whole),
        "staleness": (server.recorded if server.sampled is None else server.sampled, trainer.whole),
        "adapter": (server.current, None if rest is policies else policies[1]),
        "weights": (rest[0], None if served is None else rest[1]),
        "numerics": (rest[0], rest[1] if served is None else served),
    }
    return {cause: (a, b) for cause, (a, b) in pairs.items() if b is not None}


def split(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, MismatchPart]:
    """The part of each cause. ``pairs`` are log-probabilities [n] of both policies at n > 0 tokens with this cause and
    those after it: the first pair is that of the whole."""
    gaps = [trained.double() - sampled.double() for sampled, trained in pairs.values()]
    left = [(float(d.abs().mean()), float(d.square().mean()) / 2) for d in gaps]
    steps = pairwise([*left, (0.0, 0.0)])
    return {
        cause: MismatchPart(gap=gap - less, kl=kl - less_kl)
        for cause, ((gap, kl), (less, less_kl)) in zip(pairs, steps, strict=True)
    }


LIMITS: Mapping[Correction, float] = {Correction.TRUNCATE: 0.01, Correction.MASK: 0.1}
"""Mean |log w| of a token in nats above which a correction is chosen.

Rounding of bfloat16 alone is about 0.01. The mask is that of IcePop, of single tokens with w < 0.5 or above the cap. If
their log w is normal, 0.4 % of exactly sampled tokens have w < 0.5 at a mean |log w| of m = 0.2, hardly any at 0.1. The
geometric mean of an exactly sampled answer is about exp(-KL) = exp(-pi m^2 / 4): at 0.2 `geo_mis` drops all of them.
"""
HOLD = 0.5
"""Part of its limit down to which a correction in use remains: a mismatch near a limit does not alternate."""


def choose(current: Correction, mean: float | None) -> Correction:
    """The correction of the next step after one with ``current`` and ``mean`` |log w| of a token.

    Unchanged where nothing was measured (None, 0 or not finite).
    """
    if not mean or not math.isfinite(mean):
        return current
    kept = [to for to, limit in LIMITS.items() if mean > limit * (HOLD if to <= current else 1.0)]
    return max(kept, default=Correction.NONE)


TELLING = 0.5  # nats between neighbours, in records and present values; smaller differences can be rounding
NEARER = 4.0  # times; a token that moved half of the way to its neighbour abstains
FEWEST = 30  # votes
SHIFTED = 2 / 3  # of the votes; aligned records get nearly none, shifted ones nearly all


def shift_votes(current: Tensor, recorded: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Count the tokens nearer to their neighbour's record (``late``, ``early``) and to their own (``..._own``).

    ``current``, ``recorded`` and ``mask`` are packed [t]; entry 0 of every sequence is masked, so no pair
    crosses sequences. Each result is [].
    """
    near, far, first, second = recorded[:-1], recorded[1:], current[:-1], current[1:]
    telling = mask[:-1] & mask[1:] & ((near - far).abs() > TELLING) & ((first - second).abs() > TELLING)

    def votes(value: Tensor, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        to_own, to_other = (value - own).abs(), (value - other).abs()
        at_other, at_own = NEARER * to_other < to_own, NEARER * to_own < to_other
        return (telling & at_other).sum().float(), (telling & at_own).sum().float()

    late, late_own = votes(first, near, far)
    early, early_own = votes(second, far, near)
    return {"late": late, "late_own": late_own, "early": early, "early_own": early_own}


def after_change(versions: Tensor, mask: Tensor) -> Tensor:
    """Mark the tokens [t] bool that come after a change of version in their answer, a run of ``mask`` [t] bool.

    With kept KV caches (``rollout.in_flight: keep``) no version alone has their log-probability. ``versions`` are [t].
    """
    joined = F.pad(mask[1:] & mask[:-1], (1, 0))
    changes = (joined & F.pad(versions[1:] != versions[:-1], (1, 0))).cumsum(0)
    return mask & (changes > changes.masked_fill(joined, 0).cummax(0).values)


def shifted_share(sums: Mapping[str, float]) -> tuple[float, float]:
    """The number of votes and the share for a neighbour's record, in the direction with more votes.

    A shift in one direction also gets votes for the other one by chance, and none for the own record.
    """
    direction = "late" if sums["late"] > sums["early"] else "early"
    votes = sums[direction] + sums[f"{direction}_own"]
    return votes, sums[direction] / votes if votes else 0.0


def is_shifted(sums: Mapping[str, float]) -> bool:
    """Whether the votes show records shifted by one. False for fewer than ``FEWEST`` votes."""
    votes, share = shifted_share(sums)
    return votes >= FEWEST and share > SHIFTED

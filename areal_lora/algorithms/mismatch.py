"""Split the mismatch of the policies that sampled and that are trained into parts by cause, which add up to the whole.

A part is what the mismatch falls by once its cause is removed, after those before it. With d the difference of both
policies' log-probabilities at the sampled tokens the mismatch is mean |d|, and to second order the divergence
KL(sampled, trained) = mean d^2 / 2 (estimator k2 of http://joschu.net/blog/kl-approx.html). In the divergence a cause
that is not correlated with others has the part that it has alone. A part below 0: the cause reduces the mismatch.

`choose` takes the behaviour correction of the next step from the mismatch of the one before
(`behaviour_correction: auto`). Both figures of a step are means over the trained sampled tokens of the whole batch, so
all ranks choose the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

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


LIMITS: Mapping[Correction, float] = {Correction.TRUNCATE: 0.01, Correction.GEOMETRIC: 0.1}
"""Mean |log w| of a token in nats above which a correction is chosen.

Rounding of bfloat16 alone is about 0.01. Log w that is normal with mean |log w| of m has a divergence of pi m^2 / 4: at
0.1 the geometric mean of w is 0.992, where its published bounds (preset `geo_mis`) still keep a usual answer.
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

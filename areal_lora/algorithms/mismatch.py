"""Split the mismatch of the policies that sampled and that are trained into parts by cause, which add up to the whole.

A part is what the mismatch falls by once its cause is removed, after those before it. With d the difference of both
policies' log-probabilities at the sampled tokens the mismatch is mean |d|, and to second order the divergence
KL(sampled, trained) = mean d^2 / 2 (estimator k2 of http://joschu.net/blog/kl-approx.html). In the divergence a cause
that is not correlated with others has the part that it has alone. A part below 0: the cause reduces the mismatch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchPart:
    """Nats per token of mean |d| (``gap``) and of the divergence (``kl``)."""

    gap: float
    kl: float


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

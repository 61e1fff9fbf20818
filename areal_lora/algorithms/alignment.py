"""Detect recorded log-probabilities that are shifted by one token, with any policy close to the sampling one.

A shift by one shows without a tolerance: where neighbouring tokens differ by much, in the records and in the present
policy, the present value of a token is far nearer to the token's own record than to its neighbour's. That holds for
policies that are several versions apart and for coarse arithmetic: a batch of stale tokens can be checked, too.

Of token t and t + 1 of an answer, with records r and present values c::

    late: the record of t is at t + 1          c[t] is at r[t + 1] and not at r[t]
    early: the record of t + 1 is at t         c[t + 1] is at r[t] and not at r[t + 1]
"""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

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

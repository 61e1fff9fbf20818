"""Whether recorded log-probabilities lie at their tokens, told from any policy that is close to the one that sampled.

A shift by one shows without a tolerance: where neighbouring records differ by much, the present policy's value for a
token is nearer to the token's own record than to its neighbour's. That holds for policies that are several versions
apart and for coarse arithmetic, so every batch can be judged, also one in which every token is stale.

Of token t and t + 1 of an answer, with records r and present values c::

    aligned     c[t] = r[t]        late: the record of t lies at t + 1        early: that of t + 1 lies at t
"""

from __future__ import annotations

from torch import Tensor

TELLING = 0.5  # nats between neighbouring records; smaller differences can be rounding or drift
MIN_PAIRS = 30
MAX_SHIFTED = 2 / 3  # at a shift nearly all pairs say so; a policy that changes much, one-sidedly, stays below a half


def shift_votes(current: Tensor, recorded: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """How many neighbours can tell (``pairs``), and how many of them say ``late`` or ``early``; each [].

    ``current``, ``recorded`` and ``mask`` are packed [t]; entry 0 of every sequence is masked, so no pair
    crosses sequences.
    """
    near, far = recorded[:-1], recorded[1:]
    telling = mask[:-1] & mask[1:] & ((near - far).abs() > TELLING)
    late = (current[:-1] - far).abs() < (current[:-1] - near).abs()
    early = (current[1:] - near).abs() < (current[1:] - far).abs()
    return {
        "pairs": telling.sum().float(), "late": (telling & late).sum().float(),
        "early": (telling & early).sum().float(),
    }


def shift_of(pairs: float, late: float, early: float) -> str:
    """"late" or "early" if the records are shifted by one, else an empty string; also where too few pairs can tell."""
    if pairs < MIN_PAIRS or max(late, early) <= MAX_SHIFTED * pairs:
        return ""
    return "late" if late > early else "early"

"""Cut a packed batch into micro-batches for an engine that computes rows [b, s].

The plan is pure. Every data-parallel rank computes the same plan and takes its own rows, so all ranks run the
same number of micro-batches of the same shapes, as the collectives inside a layer require. Sequences are ordered
by length to keep padding small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroPlan:
    """One micro-batch: ``rows[d]`` are the batch's sequence numbers that data-parallel rank d computes.

    All ranks pad to ``n_rows`` rows of ``width`` tokens.
    """

    rows: tuple[tuple[int, ...], ...]
    n_rows: int
    width: int


def plan_microbatches(
    lengths: Sequence[int], *, dp: int, token_budget: int, multiple: int = 1, uniform: bool = False
) -> list[MicroPlan]:
    """Micro-batches of at most ``token_budget`` padded tokens per rank, longest sequences first.

    Widths are rounded up to ``multiple`` (sequence parallelism splits a row). ``uniform``
    gives every micro-batch the same shape (pipeline stages pre-allocate). A sequence longer
    than the budget gets a micro-batch of its own. Every sequence is computed exactly once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plans: list[MicroPlan] = []
    at = 0
    longest = _round_up(lengths[order[0]], multiple) if order else 0
    while at < len(order):
        width = longest if uniform else _round_up(lengths[order[at]], multiple)
        n_rows = max(token_budget // width, 1)
        if not uniform:
            n_rows = min(n_rows, -(-(len(order) - at) // dp))
        chunk = order[at : at + n_rows * dp]
        plans.append(MicroPlan(rows=tuple(tuple(chunk[d::dp]) for d in range(dp)), n_rows=n_rows, width=width))
        at += len(chunk)
    return plans


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple

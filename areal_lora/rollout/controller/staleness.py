"""The staleness budget: how many groups may be in progress, and which may still be trained on.

A training step consumes at version ``k`` and publishes version ``k + 1``. A group issued at
version ``V`` may be consumed at the latest by the step at version ``V + max_staleness``. With ``B``
groups a step, admission therefore keeps (AReaL, arXiv:2505.24298, "staleness-aware training", in groups)::

    consumed + ready + running <= (V + max_staleness + 1) * B

where ``consumed = next_version * B``. Admission assumes that groups are consumed in the order of their
issue, which stragglers break. The bound is enforced by :meth:`freshness`, applied to every group at
hand-over (contract C7).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Freshness(StrEnum):
    """Whether a group may be trained on at a given version."""

    FRESH = "fresh"
    STALE = "stale"
    FROM_THE_FUTURE = "from_the_future"


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBudget:
    """Pure arithmetic of one adapter's budget.

    ``last_version`` is the version at which the last training step consumes: nothing is issued
    for steps after it.
    """

    max_staleness: int
    prompts_per_step: int
    last_version: int

    def capacity(self, *, newest: int, next_version: int, live: int) -> int:
        """Return the number of groups that may be issued now.

        ``newest`` is the newest version announced active, ``next_version`` the one at which the
        next batch will be consumed, ``live`` the groups held for that step and later ones.
        """
        steps = min(newest + self.max_staleness, self.last_version) + 1 - next_version
        return max(0, steps * self.prompts_per_step - live)

    def freshness(self, *, oldest: int, consume_version: int) -> Freshness:
        """Compare a group whose oldest token was sampled at version ``oldest`` with the budget."""
        if oldest > consume_version:
            return Freshness.FROM_THE_FUTURE
        return Freshness.FRESH if consume_version - oldest <= self.max_staleness else Freshness.STALE

"""Pacing: how many groups are issued ahead of the version that they could have been sampled with.

The version of a group is fixed when its request begins, and the trainer takes the next batch before the version
it has just made is on the servers. So a group for step ``k + 1`` is at its freshest, one version behind, from the
moment version ``k`` is announced: beginning it later in that step gains nothing, beginning it earlier costs a
version. A batch is therefore issued at the announcement, as far as it can be whole in time, and only the shortfall
is issued before it::

    consumed + ready + running <= (V + 2) * B + ahead

``ahead`` is measured. When the trainer asks for a batch, each group that is not ready is one that should have been
issued before. It is the most that any of the last ``WINDOW`` requests fell short of: a base stock in the sense of
inventory theory, where the demand is B groups a step and the stock covers what is late. The count contains
everything that makes groups late: sampling, queueing, scoring, retries, dropped groups, slow publishes, other
adapters on the same servers.

A batch that is whole only just in time may be late at the next step. Groups count as ready only if they were
``margin_s`` before the request. The margin grows with every wait of the trainer and shrinks slowly without one.

A trainer that waits at every step raises ``ahead`` to its bound ``(max_staleness - 1) * B``, where the inequality is
that of `StalenessBudget`. This is also where it begins. With ``max_staleness`` 0 or 1 there is nothing to pace.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from areal_lora.rollout.controller.staleness import StalenessBudget

Pacing: TypeAlias = Literal["fresh", "full"]

WINDOW = 5
"""Requests whose largest shortfall is covered."""
DECAY = 0.95
"""Of the margin, at a step without a wait."""
SMALLEST, LARGEST = 0.02, 0.25
"""Of the margin, in steps of the trainer."""
NEGLIGIBLE = 0.005
"""A wait of this part of a step is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingStatus:
    """What pacing does and why. ``ahead`` groups may be issued before the version that would make them fresher.

    A group counts as in time if it is ready ``margin_s`` before it is needed. ``spare_s`` is how long the last batch
    was whole before the trainer asked for it; negative: the trainer waited; None: not measured yet.
    """

    ahead: int
    margin_s: float
    spare_s: float | None


class Pacer:
    """One adapter's pacing; pure, with a clock that is passed in.

    The feed reports each request of the trainer (`requested`) and each batch that it hands over (`taken`).
    """

    def __init__(self, pacing: Pacing, budget: StalenessBudget, clock: Callable[[], float]) -> None:
        self._pacing, self._budget, self._clock = pacing, budget, clock
        self._most = (budget.max_staleness - 1) * budget.prompts_per_step
        self._shortfalls: deque[int] = deque(maxlen=WINDOW)
        self._margin_s = 0.0
        self._spare_s: float | None = None
        self._taken_s: float | None = None  # when the last batch was handed over
        self._asked_s: float | None = None  # when the trainer asked for the next one
        self._step_s: float | None = None  # the trainer's own time for a step

    @property
    def status(self) -> PacingStatus:
        return PacingStatus(ahead=max(0, self._ahead), margin_s=self._margin_s, spare_s=self._spare_s)

    @property
    def _ahead(self) -> int:
        """The bound while nothing is measured."""
        if self._pacing == "full" or not self._shortfalls:
            return self._most
        return max(self._shortfalls)

    def capacity(self, *, newest: int, next_version: int, live: int) -> int:
        """Return the number of groups that may be issued now; see :meth:`StalenessBudget.capacity`, the bound."""
        step = self._budget.prompts_per_step
        wanted = (newest + 2 - next_version) * step + self._ahead
        if self._asked_s is not None:  # nothing is gained by holding back groups that the trainer waits for
            wanted = max(wanted, step + self._ahead)
        bound = self._budget.capacity(newest=newest, next_version=next_version, live=live)
        return max(0, min(bound, wanted - live))

    def requested(self, ready_s: Iterable[float], *, live: int) -> None:
        """The trainer asks for the next batch; repeated calls before `taken` change nothing.

        ``ready_s`` are the times at which the groups that are ready became so, ``live`` counts these and the
        running ones.
        """
        if self._asked_s is not None:
            return
        now, step = self._clock(), self._budget.prompts_per_step
        self._asked_s = now
        ready = sorted(ready_s)
        self._spare_s = now - ready[step - 1] if len(ready) >= step else None
        if self._taken_s is None:
            return  # the first request of a session: the groups did not have a step's time
        self._step_s = now - self._taken_s
        in_time = bisect_right(ready, now - self._margin_s)
        shortfall = max(step + self._ahead, live) - in_time
        self._shortfalls.append(max(min(shortfall, self._most), min(0, self._most)))

    def taken(self) -> None:
        """The batch is handed over."""
        now = self._clock()
        if self._asked_s is not None:
            if self._spare_s is None:
                self._spare_s = self._asked_s - now
            if self._step_s is not None:
                self._adapt_margin(now - self._asked_s, self._step_s)
        self._taken_s, self._asked_s = now, None

    def _adapt_margin(self, waited_s: float, step_s: float) -> None:
        late = waited_s > NEGLIGIBLE * step_s
        margin_s = self._margin_s + waited_s if late else self._margin_s * DECAY
        self._margin_s = min(max(margin_s, SMALLEST * step_s), LARGEST * step_s)

    def new_session(self) -> None:
        """Forget the times of a trainer that has gone; what was measured stays."""
        self._taken_s = self._asked_s = self._step_s = None

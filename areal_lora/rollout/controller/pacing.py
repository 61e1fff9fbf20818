"""Pacing: how many groups are issued ahead of the version that they could have been sampled with.

The version of a group is fixed when its request starts, and the trainer takes the next batch before the version it has
just made is on the servers. So a group for step ``k + 1`` is at its freshest, one version behind, from the moment
version ``k`` is announced: beginning it later in that step gains nothing, beginning it earlier costs a version. A batch
is therefore issued at the announcement, as far as it can be whole in time, and only the shortfall
is issued before it::

    consumed + ready + kept * running <= (V + 2) * B + ahead

``kept`` is the share of the last answered groups that was not dropped for equal rewards (``drop_uniform``). A dropped
group that was counted whole is replaced only after its answers have ended, so that a batch would take several
generations. Below ``max_staleness`` 2, where a surplus group comes too late, ``kept`` is the root of the share.

``ahead`` is measured. When the trainer requests a batch, each group that is not ready is one that should have been
issued before. It is the most that any of the last ``WINDOW`` requests fell short of: a base stock in the sense of
inventory theory, where the demand is B groups a step and the stock covers what is late. The count contains everything
that makes groups late: sampling, queueing, scoring, retries, dropped groups, slow publishes, other adapters on the same
servers.

A batch that is whole only just in time may be late at the next step. Groups count as ready only if they were
``margin_s`` before the request. The margin grows with every wait of the trainer and shrinks slowly without one.

A trainer that waits at every step raises ``ahead`` to its bound ``(max_staleness - 1) * B``, where the inequality is
that of `StalenessBudget`. This is also where it starts. With ``max_staleness`` 0 or 1 there is nothing to pace.

The staleness budget: how many groups may be in progress, and which may still be trained on.

A training step consumes at version ``k`` and publishes version ``k + 1``. A group issued at version ``V`` may be
consumed at the latest by the step at version ``V + max_staleness``. With ``B``
groups a step, admission therefore keeps (AReaL, arXiv:2505.24298, "staleness-aware training", in groups)::

    consumed + ready + kept * running <= (V + max_staleness + 1) * B

where ``consumed = next_version * B``. Admission assumes that groups are consumed in the order of their issue and that
``kept`` holds, which stragglers and chance break. The bound is enforced by :meth:`refusal`, applied to every group at
hand-over (contract C7).
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from areal_lora.rollout.ledger.reconcile import ROLLED_BACK

STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessBudget:
    """Pure arithmetic of one adapter's budget.

    ``last_version`` is the version at which the last training step consumes: nothing is issued for steps after it.
    """

    max_staleness: int
    prompts_per_step: int
    last_version: int

    def capacity(self, *, newest: int, next_version: int, live: int) -> int:
        """Return the number of groups that may be issued now.

        ``newest`` is the newest version announced active, ``next_version`` the one at which the
        next batch will be consumed, ``live`` the groups held for that step and later ones (`GroupPool.live`).
        """
        steps = min(newest + self.max_staleness, self.last_version) + 1 - next_version
        return max(0, steps * self.prompts_per_step - live)

    def refusal(self, oldest: int, newest: int, version: int) -> str:
        """Why tokens of versions ``oldest`` to ``newest`` may not be consumed at ``version``; empty if they may."""
        if newest > version:
            return ROLLED_BACK
        return STALE if version - oldest > self.max_staleness else ""


Pacing: TypeAlias = Literal["fresh", "full"]

WINDOW = 5  # requests whose largest shortfall is covered
DECAY = 0.95  # of the margin, at a step without a wait
SMALLEST, LARGEST = 0.02, 0.25  # of the margin, in steps of the trainer
NEGLIGIBLE = 0.005  # a wait of this part of a step is none
LEAST_KEPT = 0.1  # a measured share of 0 would bound nothing
MIN_ANSWERED = 32  # groups that a share is measured over, or two steps' worth


class Pacer:
    """One adapter's pacing; pure, with a clock that is passed in.

    The feed reports each request of the trainer (`requested`) and each batch that it hands over (`taken`). ``ahead``
    groups may be issued before the version that would make them fresher. A group counts as in time if it is ready
    ``margin_s`` before it is needed. ``spare_s`` is how long the last batch was whole before the trainer requested it;
    negative: the trainer waited; None: not measured yet. ``kept`` is the share that a running group counts.
    """

    def __init__(self, pacing: Pacing, budget: StalenessBudget, clock: Callable[[], float]) -> None:
        self._pacing, self._budget, self._clock = pacing, budget, clock
        self._most = (budget.max_staleness - 1) * budget.prompts_per_step
        self._shortfalls: deque[int] = deque(maxlen=WINDOW)
        answered = max(MIN_ANSWERED, 2 * budget.prompts_per_step)
        self._answered, self.kept = deque([True] * answered, maxlen=answered), 1.0
        self.margin_s = 0.0
        self.spare_s: float | None = None
        self._taken_s: float | None = None  # when the last batch was handed over
        self._requested_s: float | None = None  # when the trainer requested the next one
        self._step_s: float | None = None  # the trainer's own time for a step

    def answered(self, *, kept: bool) -> None:
        """A group was answered in time, and is dropped for its rewards unless ``kept``."""
        self._answered.append(kept)
        share = max(LEAST_KEPT, sum(self._answered) / len(self._answered))
        self.kept = share if self._budget.max_staleness > 1 else share**0.5

    @property
    def ahead(self) -> int:
        return max(0, self._ahead)

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
        if self._requested_s is not None:  # nothing is gained by holding back groups that the trainer waits for
            wanted = max(wanted, step + self._ahead)
        bound = self._budget.capacity(newest=newest, next_version=next_version, live=live)
        return max(0, min(bound, wanted - live))

    def requested(self, ready_s: Iterable[float], *, live: int) -> None:
        """The trainer requests the next batch; repeated calls before `taken` change nothing.

        ``ready_s`` are the times at which the groups that are ready became so, ``live`` counts these, too.
        """
        if self._requested_s is not None:
            return
        now, step = self._clock(), self._budget.prompts_per_step
        self._requested_s = now
        ready = sorted(ready_s)
        self.spare_s = now - ready[step - 1] if len(ready) >= step else None
        if self._taken_s is None:
            return  # the first request of a session: the groups did not have a step's time
        self._step_s = now - self._taken_s
        in_time = bisect_right(ready, now - self.margin_s)
        shortfall = max(step + self._ahead, live) - in_time
        self._shortfalls.append(max(min(shortfall, self._most), min(0, self._most)))

    def taken(self) -> None:
        now = self._clock()
        if self._requested_s is not None:
            if self.spare_s is None:
                self.spare_s = self._requested_s - now
            if (step_s := self._step_s) is not None:
                waited_s = now - self._requested_s
                late = waited_s > NEGLIGIBLE * step_s
                margin_s = self.margin_s + waited_s if late else self.margin_s * DECAY
                self.margin_s = min(max(margin_s, SMALLEST * step_s), LARGEST * step_s)
        self._taken_s, self._requested_s = now, None

    def new_session(self) -> None:
        """Forget the times of an earlier trainer; what was measured stays."""
        self._taken_s = self._requested_s = self._step_s = None

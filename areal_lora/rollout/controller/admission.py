"""Which adapter's group starts next: one fair queue over the sequences that the servers take at once.

Every adapter may use all places that no other one wants. While several want one, it goes to the adapter with the
smallest virtual time: the tokens of its groups per unit of weight, so that sampled tokens follow the weights whatever
the number of places and the length of answers (start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM 1996). A group
in flight counts with an estimate, the recent mean of its adapter, until its tokens are known. Groups in flight are
never cut off for another adapter: places come free as groups end.

The tokens are those that are trained on, as in the trainer's own queue over steps (`areal_lora.trainer.turns`): the
shares of trained tokens are the same whichever side is the slower one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from areal_lora.rollout.controller.groups import Tally

RECENT = 16
"""Answered groups whose mean is the estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One adapter in the queue: a group has ``sequences``, a step ``groups``; ``weight`` is its part."""

    sequences: int
    groups: int
    weight: float


class Starts(Protocol):
    """An adapter that may have a group to start."""

    @property
    def running(self) -> int:
        """Groups in flight."""
        ...

    @property
    def tally(self) -> Tally:
        """What has become of its groups that are not in flight any more."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it wants no group at all, as one that is paused. One that may not yet start a group is not idle."""
        ...

    def start_one(self) -> bool:
        """Start a group; False where pacing or the staleness budget allow none."""
        ...


class Admission:
    """Starts groups of ``adapters`` while there is room for ``sequences`` at once on all servers together."""

    def __init__(self, claims: Mapping[str, Claim], adapters: Mapping[str, Starts]) -> None:
        self.sequences = 0
        self._accounts = {name: Account(claims[name], adapter) for name, adapter in adapters.items()}

    def join(self, name: str, claim: Claim, adapter: Starts) -> None:
        """A newcomer begins at the smallest time of the others: it owes nothing and is owed nothing."""
        self._settle()
        smallest = min((account.time for account in self._accounts.values()), default=0.0)
        self._accounts[name] = Account(claim, adapter, passed=smallest)

    def leave(self, name: str) -> None:
        del self._accounts[name]

    def admit(self) -> None:
        """Start groups until no adapter has one, or no place remains."""
        self._settle()
        asking, waiting = list(self._accounts.values()), list[Account]()
        while asking and self._in_flight() < self.sequences:
            first = min(asking, key=lambda account: account.time)
            start = first.time
            if first.adapter.start_one():
                self._forget(waiting, start)
            else:
                asking.remove(first)
                waiting.append(first)

    def _forget(self, waiting: list[Account], now: float) -> None:
        """``waiting`` have left a place to another adapter, whose time was ``now``.

        What they miss is kept for one step of their own for each other adapter. Without it, a large step of another
        adapter would use up the part of one that has just begun to wait for its next version. With more, an adapter
        that waits for long would hold up all others afterwards. An idle one misses nothing.
        """
        for account in waiting:
            steps = 0 if account.adapter.idle else len(self._accounts) - 1
            account.catch_up(now - steps * account.step_cost)

    def _settle(self) -> None:
        known = [a.estimate / a.claim.sequences for a in self._accounts.values() if a.answered]
        length = sum(known) / len(known) if known else 1.0
        for account in self._accounts.values():
            account.settle(length)

    def _in_flight(self) -> int:
        return sum(account.claim.sequences * account.adapter.running for account in self._accounts.values())


@dataclass(slots=True)
class Account:
    """One adapter's virtual time: ``passed`` is that of groups not in flight any more, in tokens per unit of weight.

    ``estimate`` is what a group in flight counts, in tokens.
    """

    claim: Claim
    adapter: Starts
    passed: float = 0.0
    estimate: float = 0.0
    answered: int = 0
    _seen: Tally = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self.adapter.tally
        self.estimate = float(self.claim.sequences)

    @property
    def time(self) -> float:
        return self.passed + self.adapter.running * self.estimate / self.claim.weight

    @property
    def step_cost(self) -> float:
        return self.claim.groups * self.estimate / self.claim.weight

    def catch_up(self, time: float) -> None:
        """Move the time on to ``time``, unless it is there already."""
        self.passed += max(0.0, time - self.time)

    def settle(self, length: float) -> None:
        """Take in the groups that have ended; ``length`` is the mean of all adapters' answers in tokens.

        A group without an answer counts with the estimate: it had its place, too.
        """
        tally = self.adapter.tally
        ended, answered = tally.ended - self._seen.ended, tally.answered - self._seen.answered
        # A group counts at least one token, or one whose groups have none would have all places.
        tokens = max(tally.tokens - self._seen.tokens, answered)
        self._seen = tally
        if answered:
            self.answered += answered
            self.estimate += (tokens / answered - self.estimate) * min(1.0, answered / min(self.answered, RECENT))
        elif not self.answered:
            self.estimate = self.claim.sequences * length
        self.passed += (tokens + (ended - answered) * self.estimate) / self.claim.weight

"""Which adapter's group starts next: one fair queue over the sequences that the servers take at once.

Every adapter may use all places that no other one wants. While several want one, it goes to the adapter with the
smallest virtual time: the trained tokens of its groups per unit of weight (`areal_lora.algorithms.fair_queue`), so that
tokens follow the weights whatever the number of places and the length of answers. A group in flight counts with an
estimate, the recent mean of its adapter, until its tokens are known. Groups in flight are never cut off for another
adapter: places come free as groups end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.rollout.controller.groups import GroupTally

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
    def tally(self) -> GroupTally:
        """What has become of its groups that are not in flight any more."""
        ...

    @property
    def idle(self) -> bool:
        """Whether it wants no group at all, as one that is paused. One that may not yet start a group is not idle."""
        ...

    def start_one(self) -> bool:
        """Start a group; False where pacing or the staleness budget allow none."""
        ...


class Admission(FairQueue):
    """Starts groups of ``adapters`` while there is room for ``sequences`` at once on all servers together.

    The time of an adapter has its groups in flight, with their estimates.
    """

    def __init__(self, claims: Mapping[str, Claim], adapters: Mapping[str, Starts]) -> None:
        super().__init__({name: claim.weight for name, claim in claims.items()})
        self.sequences = 0
        self._accounts = {name: Account(claims[name], adapter) for name, adapter in adapters.items()}

    def add(self, name: str, claim: Claim, adapter: Starts) -> None:
        """An adapter joins."""
        self._settle()
        self.join(name, claim.weight)
        self._accounts[name] = Account(claim, adapter)

    def leave(self, name: str) -> None:
        super().leave(name)
        del self._accounts[name]

    def time(self, name: str) -> float:
        return super().time(name) + self.cost(name, self._accounts[name].in_flight)

    def admit(self) -> None:
        """Start groups until no adapter has one, or no place remains."""
        self._settle()
        candidates, waiting = list(self._accounts), list[str]()
        while candidates and self._in_flight() < self.sequences:
            first = min(candidates, key=self.time)
            start = self.time(first)
            if self._accounts[first].adapter.start_one():
                for name in waiting:  # they have left a place to another adapter; an idle one misses nothing
                    account = self._accounts[name]
                    self.catch_up(name, start, 0.0 if account.adapter.idle else account.claim.groups * account.estimate)
            else:
                candidates.remove(first)
                waiting.append(first)

    def _settle(self) -> None:
        known = [a.estimate / a.claim.sequences for a in self._accounts.values() if a.answered]
        length = sum(known) / len(known) if known else 1.0
        for name, account in self._accounts.items():
            self.charge(name, account.settle(length))

    def _in_flight(self) -> int:
        return sum(account.claim.sequences * account.adapter.running for account in self._accounts.values())


@dataclass(slots=True)
class Account:
    """Groups of one adapter. ``estimate`` is what a group in flight counts, in tokens."""

    claim: Claim
    adapter: Starts
    estimate: float = 0.0
    answered: int = 0
    _seen: GroupTally = field(init=False)

    def __post_init__(self) -> None:
        self._seen = self.adapter.tally
        self.estimate = float(self.claim.sequences)

    @property
    def in_flight(self) -> float:
        """Tokens of the groups in flight."""
        return self.adapter.running * self.estimate

    def settle(self, length: float) -> float:
        """Tokens of the groups that have ended since the last call; ``length`` is the mean of all adapters' answers.

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
        return tokens + (ended - answered) * self.estimate

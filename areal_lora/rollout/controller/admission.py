"""Which adapter's group starts next: one fair queue over the sequences that the servers take at once.

Every adapter may use all places that no other one wants. While several want one, it goes to the adapter with the
fewest sequences in flight relative to its weight (weighted max-min fairness, Bertsekas and Gallager, Data Networks,
section 6.5.2). Groups in flight are never cut off for another adapter: places come free as groups end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One adapter in the queue: a group has ``sequences``; ``weight`` is its part relative to others."""

    sequences: int
    weight: float


class Starts(Protocol):
    """An adapter that may have a group to start."""

    @property
    def running(self) -> int:
        """Groups in flight."""
        ...

    def start_one(self) -> bool:
        """Start a group; False where pacing or the staleness budget allow none."""
        ...


class Admission:
    """Starts groups of ``adapters`` while there is room for ``sequences`` at once on all servers together."""

    def __init__(self, claims: Mapping[str, Claim], adapters: Mapping[str, Starts]) -> None:
        self.sequences = 0
        self._claims, self._adapters = dict(claims), dict(adapters)

    def join(self, name: str, claim: Claim, adapter: Starts) -> None:
        self._claims[name], self._adapters[name] = claim, adapter

    def leave(self, name: str) -> None:
        del self._claims[name], self._adapters[name]

    def admit(self) -> None:
        """Start groups until no adapter has one, or no place remains."""
        asking = list(self._adapters)
        while asking and self._in_flight() < self.sequences:
            name = next_in(asking, self._claims, lambda n: self._adapters[n].running)
            if not self._adapters[name].start_one():
                asking.remove(name)

    def _in_flight(self) -> int:
        return sum(self._claims[name].sequences * adapter.running for name, adapter in self._adapters.items())


def next_in(asking: Sequence[str], claims: Mapping[str, Claim], running: Callable[[str], int]) -> str:
    """The adapter of ``asking`` with the fewest sequences in flight relative to its weight; the first of equal ones."""
    return min(asking, key=lambda name: claims[name].sequences * running(name) / claims[name].weight)

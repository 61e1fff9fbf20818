"""Whose turn it is to train: weighted fair queueing over trained tokens.

Of the adapters whose batch is ready, the one with the smallest virtual time trains (Demers, Keshav and Shenker,
SIGCOMM 1989; the clock of Goyal, Vin and Cheng's start-time fair queueing, SIGCOMM 1996). A step of n tokens moves an
adapter's time on by n / weight, so that trained tokens follow the weights while several adapters have batches, and
no adapter waits for one that has none.

Adapters with rollouts and those of clients are in one order. An operation of a client is there at once, a batch may
not be: an operation is carried out at its adapter's turn, after the batches of earlier turns that are ready (`before`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile


class Turns:
    """Virtual times by adapter, in tokens per unit of weight. Deterministic: equal times keep the order of names."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._times = dict.fromkeys(weights, 0.0)
        self._now = 0.0
        """The time at which the newest step started."""

    def join(self, name: str, weight: float) -> None:
        """A joining adapter starts at the smallest time of the others: without debt or credit."""
        self._weights[name] = weight
        self._times[name] = min(self._times.values(), default=0.0)

    def leave(self, name: str) -> None:
        del self._weights[name], self._times[name]

    def order(self, names: Iterable[str]) -> list[str]:
        """``names`` by whose turn it is, the first one first."""
        return sorted(names, key=lambda name: self._times[name])

    def trained(self, name: str, tokens: int) -> None:
        """``name`` trained a step of ``tokens`` tokens.

        What an adapter without a batch misses is not kept for later beyond one step of its own for each other
        adapter: it would hold up all others once it has batches again.
        """
        cost = tokens / self._weights[name]
        self._now = max(self._now, self._times[name])
        floor = self._now - cost * (len(self._times) - 1)
        self._times[name] = max(self._times[name], floor) + cost


def before(order: Sequence[str], clients: Collection[str], ready: str | None) -> list[str]:
    """The adapters of ``order`` whose batch is taken before the operation that is ``ready``; in order of turns.

    ``clients`` have operations in place of batches. With an operation of the adapter ``ready``, only batches of earlier
    turns come before it, and only those that are ready now; without one (None) all are waited for.
    """
    earlier = order if ready is None else takewhile(lambda name: name != ready, order)
    return [name for name in earlier if name not in clients]

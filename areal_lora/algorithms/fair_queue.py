"""Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over trained tokens, one virtual time per adapter.

The adapter with the smallest virtual time is served next. n tokens move its time on by n / weight, so that tokens
follow the weights while several adapters wait, and no adapter waits for one that has nothing to do. The trainer
queues steps with it, the rollout controller groups (`areal_lora.rollout.controller.runtime`): the shares of trained
tokens are the same whichever side is the slower one.

The trainer has adapters with rollouts and those of clients in one order. An operation of a client is there at once, a
batch may not be: an operation is carried out at its adapter's turn, after the batches of earlier turns that are ready
(`before`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import takewhile


class FairQueue:
    """Virtual times by adapter, in tokens per unit of weight. Deterministic: equal times keep the order of names."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._times = dict.fromkeys(weights, 0.0)
        self._now = 0.0
        """The time at which the newest step started."""

    def join(self, name: str, weight: float) -> None:
        """A joining adapter starts at the smallest time of the others: it owes nothing and is owed nothing."""
        self._weights[name] = weight
        self._times[name] = min((self.time(each) for each in self._times), default=0.0)

    def leave(self, name: str) -> None:
        del self._weights[name], self._times[name]

    def time(self, name: str) -> float:
        return self._times[name]

    def cost(self, name: str, tokens: float) -> float:
        return tokens / self._weights[name]

    def order(self, names: Iterable[str]) -> list[str]:
        """``names`` by their times, the next one first."""
        return sorted(names, key=self.time)

    def charge(self, name: str, tokens: float) -> None:
        self._times[name] += self.cost(name, tokens)

    def catch_up(self, name: str, missed_from: float, step_tokens: float) -> None:
        """``name`` was not served at the time ``missed_from``, although its own time was smaller.

        What it misses is kept for one step of its own, of ``step_tokens``, for each other adapter. With more, an
        adapter that waits for long would hold up all others afterwards; with less, a large step of another adapter
        would use up the part of one that has just started to wait.
        """
        floor = missed_from - (len(self._times) - 1) * self.cost(name, step_tokens)
        self._times[name] += max(0.0, floor - self.time(name))

    def trained(self, name: str, tokens: int) -> None:
        """``name`` trained a step of ``tokens`` tokens."""
        self._now = max(self._now, self.time(name))
        self.catch_up(name, self._now, tokens)
        self.charge(name, tokens)


def before(order: Sequence[str], clients: Collection[str], ready: str | None) -> list[str]:
    """The adapters of ``order`` whose batch is taken before the operation that is ``ready``; in order of turns.

    ``clients`` have operations in place of batches. With an operation of the adapter ``ready``, only batches of earlier
    turns come before it, and only those that are ready now; without one (None) all are waited for.
    """
    earlier = order if ready is None else takewhile(lambda name: name != ready, order)
    return [name for name in earlier if name not in clients]

"""A trainer and its servers in virtual time around the real feed: what pacing makes of a load.

The servers step all sequences together, and a step takes longer the more there are: throughput is bounded and
latency grows with the load, as in an engine with continuous batching. The trainer takes a batch, trains, and takes
the next one while the version it has made is being published.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import mean

from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.controller.pacing import Pacing
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef, TokenColumns, Trajectory, TrajectoryGroup
from tests.support.clocks import Clock
from tests.support.rollout.helpers import NAME, feed, stream

PROMPTS = stream(499)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """``lag`` is the mean over the batch's tokens; ``ahead`` is what pacing allowed at the hand-over."""

    at_s: float
    waited_s: float
    lag: float
    ahead: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    steps: Sequence[Step]
    stale: int

    def lag(self, first: int = 0, last: int | None = None) -> float:
        return mean(step.lag for step in self.steps[first:last])

    def waited_s(self, first: int = 0, last: int | None = None) -> float:
        return sum(step.waited_s for step in self.steps[first:last])

    def steps_per_hour(self, first: int = 0, last: int = -1) -> float:
        """From the hand-over of step ``first`` to that of ``last``."""
        begin, end = range(len(self.steps))[first], range(len(self.steps))[last]
        return 3600 * (end - begin) / (self.steps[end].at_s - self.steps[begin].at_s)


@dataclass(slots=True, kw_only=True)
class Workload:
    """``train_s`` is the training time and ``slowness`` the servers', by step; ``tokens`` are the lengths of B groups.

    A prompt has the same length at every issue.
    ``at_once`` groups of ``samples`` sequences run at the same time. Of the requests, ``failing`` fail and
    ``uniform`` give a group that is dropped. ``greet_at`` are steps before which the trainer is replaced by
    another that resumes there.
    """

    pacing: Pacing
    seed: int
    eta: int = 2
    b: int = 16
    samples: int = 8
    at_once: int = 8
    steps: int = 100
    train_s: Callable[[int], float] = lambda _: 4.0
    slowness: Callable[[int], float] = lambda _: 1.0
    tokens: Callable[[int], Sequence[int]]
    publish_s: float = 0.1
    failing: float = 0.0
    uniform: float = 0.0
    greet_at: tuple[int, ...] = ()
    clock: Clock = field(default_factory=Clock)
    feed: AdapterFeed = field(init=False)
    rng: random.Random = field(init=False)
    noise: random.Random = field(init=False)  # of the trainer: the same for both kinds of pacing
    chance: random.Random = field(init=False)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: itertools.count[int] = field(default_factory=itertools.count)
    lengths: list[int] = field(default_factory=list)  # by position
    running: list[tuple[float, int, Ticket]] = field(default_factory=list)  # progress at its end, order
    progress: float = 0.0  # tokens of a sequence that ran from the beginning
    done: list[Step] = field(default_factory=list)
    asked_s: float | None = None
    published_s: float = 0.0

    def run(self) -> Outcome:
        self.rng, self.noise, self.chance = (
            random.Random(f"{self.seed} {of}") for of in ("lengths", "steps", "faults")
        )
        self.feed, _, _ = feed(
            eta=self.eta,
            b=self.b,
            steps=self.steps,
            max_running=self.at_once,
            clock=self.clock,
            prompts=PROMPTS,
            pacing=self.pacing,
            drop_uniform=True,
            on_expire=self.abandon,
        )
        self.feed.announce(0)
        self.at(0.0, self.ask)
        while len(self.done) < self.steps:
            self.admit()
            self.advance()
        return Outcome(steps=self.done, stale=self.feed.stats().dropped.get("stale", 0))

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.clock.now + delay_s, next(self.order), event))

    def advance(self) -> None:
        """To the next event, or the next end of a group if that is earlier."""
        sequences = len(self.running) * self.samples
        token_s = self.slowness(len(self.done)) * (0.004 + 0.00018 * sequences)
        assert self.events or self.running, f"nothing will happen any more at step {len(self.done)}"
        event_s = self.events[0][0] if self.events else float("inf")
        end_s = self.clock.now + (self.running[0][0] - self.progress) * token_s if self.running else float("inf")
        at_s = max(min(event_s, end_s), self.clock.now)
        self.progress += (at_s - self.clock.now) / token_s
        self.clock.now = at_s
        if end_s <= event_s:
            self.ended(heapq.heappop(self.running)[2])
        else:
            heapq.heappop(self.events)[2]()
        if self.asked_s is not None:
            self.take()

    # ------------------------------------------------------------ servers

    def admit(self) -> None:
        while (ticket := self.feed.admit()) is not None:
            self.begin(ticket)

    def begin(self, ticket: Ticket) -> None:
        if self.feed.begin(ticket) is not None:
            end = self.progress + self.length(ticket.prompt.position)
            heapq.heappush(self.running, (end, next(self.order), ticket))

    def length(self, position: int) -> int:
        while len(self.lengths) <= position:
            self.lengths += self.rng.sample(self.tokens(self.b), self.b)
        return self.lengths[position]

    def ended(self, ticket: Ticket) -> None:
        if self.chance.random() < self.failing:
            wait_s = self.feed.retry(ticket, GenerationFault(FaultKind.SERVER_ERROR, ""))
            if wait_s is not None:
                self.at(wait_s, lambda: self.begin(ticket))
            return
        assert ticket.version is not None
        self.feed.finish(ticket, episode(ticket, uniform=self.chance.random() < self.uniform))

    def abandon(self, ticket: Ticket) -> None:
        self.running = [entry for entry in self.running if entry[2] is not ticket]
        heapq.heapify(self.running)

    # ------------------------------------------------------------ trainer

    def ask(self) -> None:
        if len(self.done) in self.greet_at:
            self.feed.hello(len(self.done), trainer=f"at {len(self.done)}")
            self.feed.announce(len(self.done))
        self.asked_s = self.clock.now

    def take(self) -> None:
        step = len(self.done)
        lease = self.feed.take(step)
        if lease is None or self.asked_s is None:
            return
        tokens = [self.length(finished.ticket.prompt.position) for finished in lease.finished]
        lags = [n * (step - finished.oldest) for n, finished in zip(tokens, lease.finished, strict=True)]
        self.done.append(
            Step(
                at_s=self.clock.now,
                waited_s=self.clock.now - self.asked_s,
                lag=sum(lags) / sum(tokens),
                ahead=self.feed.stats().ahead,
            )
        )
        self.asked_s = None
        self.at(self.train_s(step) * self.noise.uniform(0.9, 1.1), lambda: self.trained(step))

    def trained(self, step: int) -> None:
        """The next step waits for the publish before the last one, then begins its own."""
        self.feed.commit(step)
        joined_s = max(0.0, self.published_s - self.clock.now)
        self.published_s = self.clock.now + joined_s + self.publish_s
        self.at(joined_s + self.publish_s, lambda: self.announce(step + 1))
        if step + 1 < self.steps:
            self.at(joined_s, self.ask)

    def announce(self, version: int) -> None:
        if version >= self.feed.newest:
            self.feed.announce(version)


@cache
def _columns(version: int) -> TokenColumns:
    return TokenColumns.of([1, 2], [0.0, -1.0], [-1, version])


def episode(ticket: Ticket, *, uniform: bool) -> Episode:
    assert ticket.version is not None

    def one(reward: float, version: int) -> Trajectory:
        return Trajectory(
            uid=ticket.prompt.uid,
            sample=0,
            adapter=AdapterRef(name=NAME, version=version),
            columns=_columns(version),
            reward=reward,
        )

    trajectories = (one(1.0, ticket.version), one(1.0 if uniform else 0.0, ticket.version))
    return Episode(group=TrajectoryGroup(uid=ticket.prompt.uid, trajectories=trajectories), texts=("", ""))

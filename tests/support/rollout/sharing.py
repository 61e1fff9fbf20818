"""Several adapters in virtual time: real feeds, the controller's queue over places, the trainer's queue over steps."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from areal_lora.algorithms.fair_queue import FairQueue
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.controller.pacing import Pacing
from areal_lora.rollout.controller.runtime import Admission, Claim
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef, TrajectoryGroup
from tests.support.clocks import Clock
from tests.support.rollout.helpers import feed, stream, trajectory

PROMPTS = stream(50)
ENDLESS = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Profile:
    """An adapter. An answer has between half of ``tokens`` and one and a half of it, one in ten three times as many."""

    name: str
    weight: float
    tokens: int = 40
    groups: int = 4
    samples: int = 4


@dataclass
class Sharer:
    """An adapter of the simulation, as the admission sees it."""

    profile: Profile
    feed: AdapterFeed
    start: Callable[[Sharer, Ticket], None]
    step: int = 0

    @property
    def claim(self) -> Claim:
        return Claim(sequences=self.profile.samples, groups=self.profile.groups, weight=self.profile.weight)

    @property
    def running(self) -> int:
        return len(self.feed.groups.running)

    @property
    def places(self) -> float:
        return self.claim.sequences

    @property
    def ended(self) -> list[int | None]:
        return self.feed.groups.ended

    @property
    def idle(self) -> bool:
        return False

    def start_one(self) -> bool:
        ticket = self.feed.admit()
        if ticket is not None:
            self.start(self, ticket)
        return ticket is not None


@dataclass(frozen=True)
class Step:
    adapter: str
    tokens: int


class Sharing:
    """``places`` sequences at once, a token of each in ``token_s``; a step of n tokens takes ``train_s`` + n
    ``train_token_s``, and its version is on the servers ``publish_s`` later."""

    def __init__(
        self,
        profiles: Sequence[Profile],
        *,
        places: int,
        token_s: float,
        train_s: float,
        train_token_s: float = 0.0,
        publish_s: float = 0.3,
        eta: int = 4,
        pacing: Pacing = "fresh",
        seed: int = 0,
    ) -> None:
        self.clock, self.rng = Clock(), random.Random(seed)
        self._token_s, self._publish_s = token_s, publish_s
        self._train_s, self._train_token_s = train_s, train_token_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.busy = False
        self.idle_s = 0.0
        self.steps: list[Step] = []
        self.sharers = {p.name: self._sharer(p, eta, pacing) for p in profiles}
        self.turns = FairQueue({p.name: p.weight for p in profiles})
        self.admission = Admission(self.sharers)
        self.admission.sequences = places

    def _sharer(self, profile: Profile, eta: int, pacing: Pacing) -> Sharer:
        made, _, _ = feed(eta=eta, b=profile.groups, steps=ENDLESS, prompts=PROMPTS, clock=self.clock, pacing=pacing)
        made.announce(0)
        return Sharer(profile, made, self._start)

    def run(self, steps: int) -> list[Step]:
        while len(self.steps) < steps:
            self._train()
            self.admission.admit()
            before = self.clock.now
            self.clock.now, _, event = heapq.heappop(self._events)
            self.idle_s += 0.0 if self.busy else self.clock.now - before
            event()
        return self.steps

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock.now + delay_s, next(self._order), event))

    def _start(self, sharer: Sharer, ticket: Ticket) -> None:
        ref = sharer.feed.begin(ticket)
        assert ref is not None
        p = sharer.profile
        lengths = [
            max(1, round(p.tokens * (3 if self.rng.random() < 0.1 else self.rng.uniform(0.5, 1.5))))
            for _ in range(p.samples)
        ]
        self._at(max(lengths) * self._token_s, lambda: self._answer(sharer, ticket, ref, lengths))

    def _answer(self, sharer: Sharer, ticket: Ticket, ref: AdapterRef, lengths: list[int]) -> None:
        trajectories = tuple(trajectory(ticket.prompt, ref.version, i, tokens=n) for i, n in enumerate(lengths))
        group = TrajectoryGroup(uid=ticket.prompt.uid, trajectories=trajectories)
        sharer.feed.finish(ticket, Episode(group=group, texts=("x",) * len(lengths)))

    def _train(self) -> None:
        if self.busy:
            return
        for name in self.turns.order(self.sharers):
            sharer = self.sharers[name]
            lease = sharer.feed.take(sharer.step)
            if lease is not None:
                n = sum(t.columns.n_sampled for group in lease.groups for t in group.trajectories)
                self.busy = True
                self._at(self._train_s + n * self._train_token_s, partial(self._trained, sharer, n))
                return

    def _trained(self, sharer: Sharer, tokens: int) -> None:
        self.busy = False
        self.steps.append(Step(sharer.profile.name, tokens))
        self.turns.trained(sharer.profile.name, tokens)
        sharer.feed.commit(sharer.step)
        sharer.step += 1
        version = sharer.step
        self._at(self._publish_s, lambda: sharer.feed.announce(version))

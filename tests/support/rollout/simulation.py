"""A run in virtual time: Pareto delays, dying servers, controllers and trainers, lost and damaged ledgers."""

from __future__ import annotations

import heapq
import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.ledger.ledger import Ledger, LedgerFile
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef, TokenColumns, Trajectory, TrajectoryGroup
from tests.support.clocks import Clock
from tests.support.rollout.helpers import NAME, feed, stream
from tests.support.rollout.judge import Judge

SAMPLES = 16  # trajectories of a group
PROMPTS = stream(997)


@dataclass(slots=True)
class Trainer:
    name: str
    received: int  # the next version it knows to consume at
    snapshot: bytes
    busy: bool = False
    active: int = -1  # the newest version that it has published


@dataclass(slots=True)
class Simulation:
    eta: int
    steps: int
    seed: int
    folder: Path
    b: int = 16
    every: int = 1  # steps between checkpoints
    uniform: float = 0.1
    rng: random.Random = field(init=False)
    clock: Clock = field(default_factory=Clock)
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    order: itertools.count[int] = field(default_factory=itertools.count)
    happened: dict[str, int] = field(default_factory=dict)
    judge: Judge = field(init=False)
    feed: AdapterFeed = field(init=False)
    ledger: Ledger = field(init=False)
    file: LedgerFile = field(init=False)
    trainer: Trainer = field(init=False)
    gone: dict[int, Ticket] = field(default_factory=dict)  # expired ones by id, held so that no other takes it
    durable: int = 0  # version of the newest checkpoint
    announced: int = -1  # to this controller, by this trainer
    made: dict[int, str] = field(default_factory=dict)  # the trainer's versions, and which trainer made them
    held: dict[int, str] = field(default_factory=dict)  # those that servers hold
    server_session: int = 0
    controller_session: int = 0
    copied: int = 1 << 30  # the next version of the copy that was made of the ledger
    checkpoints: dict[int, tuple[bytes, Judge]] = field(default_factory=dict)

    def run(self) -> None:
        self.rng = random.Random(self.seed)
        self.judge = Judge(eta=self.eta)
        self.checkpoints[0] = (b"", self.judge.saved())
        self.start_controller()
        self.start_trainer(0)
        self.at(1.0, self.disaster)
        compared = 0
        while self.judge.committed + 1 < self.steps:
            while (ticket := self.feed.admit()) is not None:
                self.judge.admitted(ticket)
                self.begin(ticket)
            self.ask_for_a_batch()
            compared += 1
            if compared % 8 == 0:
                self.judge.compare(self.feed)
            self.clock.now, _, event = heapq.heappop(self.events)
            event()
        self.judge.compare(self.feed)
        self.judge.nothing_lost()
        self.file.close()

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.clock.now + delay_s, next(self.order), event))

    def note(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1

    def overdue(self, what: str) -> bool:
        """Whether chance has not brought ``what`` by the middle of the run: it is brought about."""
        return what not in self.happened and 2 * self.trainer.received > self.steps

    # ------------------------------------------------------------ servers

    def begin(self, ticket: Ticket) -> None:
        session, server_session, trainer = self.controller_session, self.server_session, self.trainer.name
        ref = self.feed.begin(ticket)
        if ref is None:
            self.at(0.2, lambda: self.again(session, ticket))
            return
        self.judge.asked(ticket, ref.version)
        maker = self.held[ref.version]
        since = self.judge.trainers

        def answers(ticket: Ticket) -> None:
            self.answers(session, server_session, trainer, ticket, ref.version, maker, since)

        late = replace(ticket)  # as after an expired lease: the next try has another ticket
        self.gone[id(late)] = late
        delay_s = min(0.2 * self.rng.paretovariate(1.1), 60.0)
        if self.rng.random() < 0.1:
            self.at(delay_s, lambda: self.fails(session, ticket))
            if self.rng.random() < 0.2:  # its answer comes all the same, later
                self.at(2 * delay_s, lambda: answers(late))
            return
        self.at(delay_s, lambda: answers(ticket))
        if self.rng.random() < 0.03:
            self.at(1.5 * delay_s, lambda: answers(late))

    def again(self, session: int, ticket: Ticket) -> None:
        if session == self.controller_session and id(ticket) not in self.gone and self.judge.is_live(ticket):
            self.begin(ticket)

    def fails(self, session: int, ticket: Ticket) -> None:
        if session != self.controller_session or id(ticket) in self.gone or not self.judge.is_live(ticket):
            return
        if ticket.version is None:
            return
        kind = FaultKind.SERVER_ERROR if self.rng.random() < 0.9 else FaultKind.REJECTED
        wait_s = self.feed.retry(ticket, GenerationFault(kind, ""))
        if wait_s is None:
            self.note("tries used up")
            self.judge.lost(ticket, kind)
        else:
            self.judge.live[ticket.prompt.position].asked = -1
            self.at(wait_s, lambda: self.again(session, ticket))

    def answers(
        self, session: int, server_session: int, trainer: str, ticket: Ticket, asked: int, maker: str, since: int
    ) -> None:
        if server_session != self.server_session:  # it died with its server
            if session == self.controller_session and ticket.version is not None:
                self.fails(session, ticket)
            return
        if session != self.controller_session and (self.rng.random() < 0.5 or trainer != self.trainer.name):
            return  # else: an answer for an earlier controller reaches this one
        newest = max(asked, *self.held) if self.rng.random() < 0.3 else asked  # interrupted and continued
        versions, makers = (asked, newest), (maker, maker if newest == asked else self.held[newest])
        uniform = self.rng.random() < self.uniform
        wanted = self.judge.is_live(ticket)
        repeated = self.rng.random() < 0.5
        accepted = self.feed.finish(ticket, episode(ticket, versions, uniform, repeated))
        # An answer for an earlier controller may be of an issue that was forgotten and has another number now.
        assert accepted == wanted or (wanted and session != self.controller_session)
        if accepted:
            self.judge.answered(ticket, versions, makers, uniform, since)
        else:
            self.note("late")

    # ------------------------------------------------------------ trainer

    def start_trainer(self, version: int) -> None:
        name = f"trainer-{next(self.order)}"
        saved, _ = self.checkpoints[version]
        self.trainer, self.announced = Trainer(name, version, saved), -1
        self.made = {0: name} | {v: maker for v, maker in self.made.items() if v <= version}
        self.greet(undo=True)
        self.publish(name, version, self.rng.uniform(0, 1))

    def greet(self, undo: bool) -> None:
        trainer, judge = self.trainer, self.judge
        version = trainer.received
        head = self.ledger.head
        rebuild = not self.ledger.known or version < head.known_from or version > head.next_version
        self.feed.hello(version, trainer=trainer.name, snapshot=trainer.snapshot)
        if rebuild:
            self.note("rebuilt")
            self.controller_session += 1  # it abandons all requests, and groups that were answered can be live again
            judge.rebuilt(self.checkpoints[version][1])
        elif undo:
            if version <= judge.committed:
                self.note("fallback")
            judge.resumed(version)
        judge.flushed()
        judge.compare(self.feed)

    def publish(self, name: str, version: int, delay_s: float) -> None:
        """Servers have the version some time before it is announced. The first one of a trainer ends what is lost."""

        def activate() -> None:
            if name == self.trainer.name:
                common = {v: maker for v, maker in self.held.items() if self.made.get(v) == maker}
                if len(common) < len(self.held):
                    self.note("lost versions")
                self.held = common | {version: self.made[version]}
                self.trainer.active = version

        self.at(delay_s * self.rng.random(), activate)
        self.at(delay_s, lambda: self.announce(name, version))

    def announce(self, name: str, version: int) -> None:
        """Announcements arrive in order: one that was overtaken does not come."""
        if name == self.trainer.name and version in self.held and version >= self.announced:
            self.announced = version
            self.feed.announce(version)

    def ask_for_a_batch(self) -> None:
        trainer, step = self.trainer, self.trainer.received
        if trainer.busy or step >= self.steps:
            return
        lease = self.feed.take(step)
        if lease is None:
            return
        self.judge.handed_over(step, lease, len(lease.finished) if step in self.judge.steps else self.b)
        for group in self.judge.steps[step].values():
            for v, maker in zip((group.oldest, group.newest), group.makers, strict=True):
                assert self.made[v] == maker, f"step {step} got tokens of a v{v} that was lost"
        self.checkpoints.setdefault(step + 1, (b"", Judge(eta=self.eta)))
        self.checkpoints[step + 1] = (lease.snapshot, self.judge.saved())
        if self.rng.random() < 0.002:
            self.note("reply lost")
            self.controller_dies()
            return
        trainer.received, trainer.snapshot, trainer.busy = step + 1, lease.snapshot, True
        self.at(self.rng.uniform(0.2, 2.0), lambda: self.learned(trainer.name, step))

    def learned(self, name: str, step: int) -> None:
        if name != self.trainer.name:
            return
        self.trainer.busy, self.made[step + 1] = False, name
        durable = (step + 1) % self.every == 0 or step + 1 == self.steps
        self.durable = step + 1 if durable else self.durable

        def commit() -> None:
            if name == self.trainer.name:
                self.feed.commit(step)
                self.judge.commit(step)

        delay_s = self.rng.uniform(0.0, 0.3)
        if durable:
            self.at(delay_s, commit)
        self.publish(name, step + 1, delay_s + self.rng.uniform(0.0, 0.5))

    # ------------------------------------------------------------ disasters

    def disaster(self) -> None:
        # Steps wait for stragglers at eta 0, and take ten times as long.
        self.at(self.rng.expovariate(1 / (120 if self.eta == 0 else 12)), self.disaster)
        kind = self.rng.choice(["server", "controller", "controller", "trainer", "trainer", "both"])
        if self.overdue("ledger of earlier steps"):
            kind = "controller"
        if self.overdue("fallback"):
            kind = "trainer"  # alone: a ledger lost beside it would be rebuilt
        for missing in ("server", "controller", "trainer", "both"):
            if self.overdue(missing):
                kind = missing
        self.note(kind)
        if kind == "server":
            self.server_session += 1
        if kind in ("controller", "both"):
            if kind == "both" and self.rng.random() < 0.5:
                self.b = self.rng.randint(14, 20)
            self.controller_dies(greet=kind == "controller")
        if kind in ("trainer", "both"):
            back = self.rng.choice([0, 0, 0, 0, 1, 3]) * self.every
            if self.rng.random() < 0.01:
                back = 100 * self.every
            if self.overdue("fallback"):
                back = 3 * self.every
            version = max(self.durable - back, 0)
            self.durable = version
            self.start_trainer(version)

    def controller_dies(self, greet: bool = True) -> None:
        self.file._db.close()  # what was not flushed is lost
        self.judge.controller_died()
        fate, overdue = self.rng.random(), self.overdue("ledger of earlier steps")
        path, copy = self.folder / "ledger.sqlite", self.folder / "copy"
        if fate < 0.04:
            self.note("ledger lost")
            for found in self.folder.glob("ledger.sqlite*"):
                found.unlink()
        elif (0.08 < fate < 0.2 or overdue) and greet and self.copied < self.trainer.received:
            self.note("ledger of earlier steps")
            shutil.copy(copy, path)
        elif fate < 0.08:
            self.note("ledger damaged")
            for found in self.folder.glob("ledger.sqlite-*"):
                found.unlink()
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif fate > 0.7 or overdue:
            shutil.copy(path, copy)
            self.copied = self.ledger.head.next_version
        self.start_controller()
        if greet:
            newest = self.trainer
            self.greet(undo=False)
            # Nothing before its first publish, with which servers forget what is lost.
            self.at(self.rng.uniform(0, 1), lambda: self.announce(newest.name, newest.active))

    def start_controller(self) -> None:
        self.controller_session += 1
        self.announced = -1
        self.file = LedgerFile(self.folder / "ledger.sqlite", "t")
        self.file.execute("PRAGMA synchronous=OFF")  # no power is lost here
        self.feed, self.ledger, _ = feed(
            eta=self.eta,
            b=self.b,
            steps=self.steps,
            clock=self.clock,
            prompts=PROMPTS,
            version=None,
            file=self.file,
            pacing=self.rng.choice(["fresh", "full"]),
            drop_uniform=True,
            on_expire=lambda ticket: self.gone.update({id(ticket): ticket}),
        )


def episode(ticket: Ticket, versions: tuple[int, int], uniform: bool, repeated: bool) -> Episode:
    """Its tokens are of both ``versions``: of half of the samples if the others were ``repeated``, else of each."""

    def one(reward: float, versions: tuple[int, int]) -> Trajectory:
        return Trajectory(
            uid=ticket.prompt.uid,
            sample=0,
            adapter=AdapterRef(name=NAME, version=versions[0]),
            columns=TokenColumns.of([1, 7, 2], [0.0, -1.0, -1.0], [-1, *versions]),
            reward=reward,
        )

    half, (old, new) = SAMPLES // 2, versions
    ways = ((old, old), (new, new)) if repeated else (versions, versions)
    trajectories = (one(1.0, ways[0]),) * half + (one(1.0 if uniform else 0.0, ways[1]),) * half
    return Episode(group=TrajectoryGroup(uid=ticket.prompt.uid, trajectories=trajectories), texts=("",) * SAMPLES)

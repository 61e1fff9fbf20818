"""An independent account of what an adapter's groups must be doing, in plain dictionaries.

It hears what the simulation does and sees what the feed hands out; it never reads ledger or counters
except to compare them with its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import MAX_STALE, Lease, Ticket


@dataclass(slots=True)
class Group:
    """The live issue of a prompt."""

    issue: int = 1
    stale: int = 0
    state: str = "waiting"  # waiting, running, ready
    asked: int = -1  # version of the running request
    oldest: int = -1
    newest: int = -1
    makers: tuple[str, ...] = ()  # who made the versions of the answer


@dataclass(slots=True)
class Judge:
    eta: int
    next_version: int = 0
    next_position: int = 0
    issued: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    live: dict[int, Group] = field(default_factory=dict)  # by position
    steps: dict[int, dict[int, Group]] = field(default_factory=dict)  # handed over at step, of this lineage
    where: dict[int, int] = field(default_factory=dict)  # position -> step that has it
    excused: set[int] = field(default_factory=set)  # positions dropped for good
    committed: int = -1
    fresh: list[int] = field(default_factory=list)  # first issued since the last flush
    given_up: list[tuple[int, Group, str]] = field(default_factory=list)  # dropped since the last flush
    most_stale: int = -1
    resumed_at: list[int] = field(default_factory=list)  # the version of each trainer that has resumed

    # ------------------------------------------------------------ what happens

    def admitted(self, ticket: Ticket) -> None:
        position = ticket.prompt.position
        if position == self.next_position:
            self.next_position += 1
            self.issued += 1
            self.live[position] = Group()
            self.fresh.append(position)
        group = self.live[position]
        assert (group.state, group.issue) == ("waiting", ticket.issue), (position, group, ticket)
        group.state = "running"

    def is_live(self, ticket: Ticket) -> bool:
        group = self.live.get(ticket.prompt.position)
        return group is not None and (group.state, group.issue) == ("running", ticket.issue)

    @property
    def trainers(self) -> int:
        return len(self.resumed_at)

    def asked(self, ticket: Ticket, version: int) -> None:
        self.live[ticket.prompt.position].asked = version

    def answered(
        self, ticket: Ticket, versions: tuple[int, ...], makers: tuple[str, ...], uniform: bool, since: int
    ) -> None:
        """``since``: the number of `trainers` when this try was sent."""
        position, group = ticket.prompt.position, self.live[ticket.prompt.position]
        group.oldest, group.newest, group.makers = min(versions), max(versions), makers
        if group.newest > min([self.next_version, *self.resumed_at[since:]]):
            self._again(position, "rolled_back")
        elif group.oldest < self.next_version - self.eta:
            self._again(position, "stale")
        elif uniform:
            self._drop(position, "no_variance")
        else:
            group.state = "ready"
        self.flushed()

    def lost(self, ticket: Ticket, reason: str) -> None:
        """Its tries are used up."""
        position = ticket.prompt.position
        self.given_up.append((position, self.live[position], reason))
        self._drop(position, reason)

    def handed_over(self, step: int, lease: Lease, b: int) -> None:
        positions = [f.ticket.prompt.position for f in lease.finished]
        if step in self.steps:
            assert positions == list(self.steps[step]), "the same step has other groups"
        else:
            assert step == self.next_version
            assert len(positions) == len(set(positions)) == b
            self.steps[step] = {}
            for position in positions:
                assert position not in self.where, f"{position} was consumed at {self.where[position]}, again at {step}"
                group = self.live.pop(position)
                assert group.state == "ready"
                self.steps[step][position] = group
                self.where[position] = step
            self._advance(step + 1)
        for f in lease.finished:
            for t in f.episode.group.trajectories:
                for v in t.versions:
                    assert v < 0 or step - self.eta <= v <= step, f"a token of v{v} at step {step}"
                    if v >= 0:
                        self.most_stale = max(self.most_stale, step - v)
        self.flushed()

    def commit(self, step: int) -> None:
        self.committed = max(self.committed, step)
        self.flushed()

    def resumed(self, version: int) -> None:
        """The ledger is there; a trainer goes on at ``version``."""
        for step in sorted(s for s in self.steps if s >= version):
            for position, group in self.steps.pop(step).items():
                del self.where[position]
                self.live[position] = group
                if step <= self.committed or group.newest > version:
                    self._again(position, "rolled_back")
                else:
                    group.state = "ready"
        self.committed = version - 1
        self.next_version = version
        self.resumed_at.append(version)
        for position, group in list(self.live.items()):
            future = (group.state == "ready" and group.newest > version) or (
                group.state == "running" and group.asked > version
            )
            if future:
                self._again(position, "rolled_back")
        self._advance(version)
        self.flushed()

    def rebuilt(self, saved: Judge) -> None:
        """All that remains is the snapshot taken when ``saved`` was."""
        self.next_version, self.next_position, self.issued = saved.next_version, saved.next_position, saved.issued
        self.dropped = Counter(saved.dropped)
        self.live = {p: Group(issue=g.issue, stale=g.stale) for p, g in saved.live.items()}
        for step in [s for s in self.steps if s >= saved.next_version]:
            for position in self.steps.pop(step):
                del self.where[position]
        self.excused = set(saved.excused)
        self.committed = saved.next_version - 1
        self.flushed()

    def controller_died(self) -> None:
        """What was not flushed is forgotten; requests are asked again."""
        for position, group, reason in self.given_up:
            self.live[position] = group
            self.dropped[reason] -= 1
            self.excused.discard(position)
        for position in self.fresh:
            self.live.pop(position)
            self.issued -= 1
            self.next_position = min(self.next_position, position)
        for group in self.live.values():
            if group.state == "running":
                group.state = "waiting"
        self.flushed()

    def saved(self) -> Judge:
        """For :meth:`rebuilt`: without what belongs to the lineage only."""
        return Judge(
            eta=self.eta,
            next_version=self.next_version,
            next_position=self.next_position,
            issued=self.issued,
            dropped=Counter(self.dropped),
            live={p: copy.copy(g) for p, g in self.live.items()},
            excused=set(self.excused),
        )

    def flushed(self) -> None:
        self.fresh.clear()
        self.given_up.clear()

    # ------------------------------------------------------------ rules

    def _advance(self, version: int) -> None:
        self.next_version = version
        for position, group in list(self.live.items()):
            oldest = group.oldest if group.state == "ready" else group.asked
            if group.state != "waiting" and 0 <= oldest < version - self.eta:
                self._again(position, "stale")

    def _again(self, position: int, reason: str) -> None:
        group = self.live[position]
        stale = group.stale + (reason == "stale")
        if stale >= MAX_STALE:
            self._drop(position, "stale_given_up")
            return
        self.dropped[reason] += 1
        self.issued += 1
        self.live[position] = Group(issue=group.issue + 1, stale=stale)

    def _drop(self, position: int, reason: str) -> None:
        self.dropped[reason] += 1
        del self.live[position]
        self.excused.add(position)

    # ------------------------------------------------------------ the verdict

    def compare(self, feed: AdapterFeed) -> None:
        stats = feed.stats()
        states = Counter(group.state for group in self.live.values())
        mine = (self.issued, len(self.where), +self.dropped, states["running"], states["ready"])
        theirs = (stats.issued, stats.consumed + stats.leased, stats.dropped, stats.running, stats.ready)
        assert mine == theirs, f"issued, consumed, dropped, running, ready: {mine} != {theirs}"
        held = states["waiting"] + states["running"] + states["ready"]
        assert self.issued == len(self.where) + self.dropped.total() + held
        assert len(self.where) == sum(len(groups) for groups in self.steps.values())

    def nothing_lost(self) -> None:
        for position in range(self.next_position):
            places = (position in self.where) + (position in self.live) + (position in self.excused)
            assert places == 1, f"prompt {position} is in {places} places"

"""The budget's arithmetic, and the property it exists for, in a simulation with a virtual clock."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from areal_lora.rollout.feed import Lease, Ticket
from areal_lora.rollout.ledger import MemoryLedger
from areal_lora.rollout.staleness import StalenessBudget, Verdict
from tests.rollout.helpers import Clock, episode, feed


@pytest.mark.parametrize(
    ("eta", "newest", "next_version", "live", "expected"),
    [
        (0, 0, 0, 0, 4),
        (0, 0, 1, 0, 0),  # synchronous: nothing while step 0 trains
        (0, 1, 1, 3, 1),
        (2, 0, 0, 0, 12),
        (2, 0, 1, 4, 4),
        (2, 0, 1, 12, 0),
        (8, 95, 95, 0, 20),  # only five steps are left
        (2, 100, 100, 0, 0),
    ],
)
def test_capacity(eta: int, newest: int, next_version: int, live: int, expected: int) -> None:
    budget = StalenessBudget(max_staleness=eta, prompts_per_step=4, last_version=99)
    assert budget.capacity(newest=newest, next_version=next_version, live=live) == expected


def test_verdict() -> None:
    budget = StalenessBudget(max_staleness=2, prompts_per_step=4, last_version=99)
    verdicts = [budget.verdict(oldest=v, consume_version=5) for v in (2, 3, 5, 6)]
    assert verdicts == [Verdict.STALE, Verdict.FRESH, Verdict.FRESH, Verdict.FROM_THE_FUTURE]


@dataclass
class Simulation:
    """Rollouts with Pareto-distributed delays and failures against a trainer with steps of about 1 s."""

    eta: int
    b: int
    steps: int
    seed: int
    consumed: list[tuple[int, str, int]] = field(default_factory=list)  # step, uid, staleness

    def run(self) -> MemoryLedger:
        rng, clock = random.Random(self.seed), Clock()
        made, ledger, gone = feed(eta=self.eta, b=self.b, steps=self.steps, n=97, clock=clock)
        events: list[tuple[float, int, str, Ticket | None]] = []
        order = 0

        def at(delay_s: float, what: str, ticket: Ticket | None = None) -> None:
            nonlocal order
            order += 1
            heapq.heappush(events, (clock.now + delay_s, order, what, ticket))

        def start(ticket: Ticket) -> None:
            made.begin(ticket)
            at(min(0.2 * rng.paretovariate(1.1), 60.0), "fails" if rng.random() < 0.1 else "ends", ticket)

        version, step, waiting = 0, 0, True
        made.announce(0)
        while step < self.steps:
            while (ticket := made.admit()) is not None:
                start(ticket)
            if waiting and (lease := made.take(step, step)) is not None:
                self.book(step, lease)
                waiting, step = False, step + 1
                at(rng.uniform(0.2, 2.0), "trained")
                continue
            clock.now, _, what, ticket = heapq.heappop(events)
            if what == "trained":
                # The announcement comes later than the next step's request for a batch.
                waiting = True
                made.commit(step - 1)
                at(rng.uniform(0.0, 0.5), "published")
            elif what == "published":
                version += 1
                made.announce(version)
            elif ticket is None or ticket in gone:
                continue
            elif what == "again":
                start(ticket)
            elif what == "fails":
                delay_s = made.retry(ticket, "injected", "")
                if delay_s is not None:
                    at(delay_s, "again", ticket)
            else:
                assert ticket.version is not None
                made.finish(ticket, episode(ticket.prompt, ticket.version))
            stats = made.stats()
            live = stats.ready + stats.running + stats.leased
            assert stats.issued == stats.consumed + sum(stats.dropped.values()) + live
            assert stats.ready + stats.running <= (self.eta + 1) * self.b
        return ledger

    def book(self, step: int, lease: Lease) -> None:
        assert len(lease.groups) == self.b
        for group in lease.groups:
            self.consumed.append((step, group.uid, step - group.oldest_version))


@pytest.mark.parametrize("eta", [0, 1, 2, 8])
def test_no_sample_beyond_the_budget_none_lost_none_twice(eta: int) -> None:
    for _ in range(4):
        seed = random.SystemRandom().randrange(1 << 30)
        print("seed", seed)
        simulation = Simulation(eta=eta, b=7, steps=60, seed=seed)
        ledger = simulation.run()
        assert max(s for *_, s in simulation.consumed) <= eta
        uids = [uid for _, uid, _ in simulation.consumed]
        assert len(uids) == len(set(uids)) == 60 * 7
        # Every prompt the stream gave out has a book entry; a dropped one says why.
        assert {row.position for row in ledger.rows} == set(range(max(row.position for row in ledger.rows) + 1))
        dropped = [row for row in ledger.rows if row.state == "dropped"]
        assert {row.reason for row in dropped} <= {"stale", "stale_given_up", "injected"}
        last = {row.uid: row for row in ledger.rows}
        assert {uid for uid, row in last.items() if row.state in ("leased", "consumed")} == set(uids)
        if eta:
            assert any(s > 0 for *_, s in simulation.consumed), "rollouts and training overlap"


def test_without_the_check_stragglers_would_be_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission alone does not hold the bound: the simulation sees it broken once the verdict is blind."""
    monkeypatch.setattr(StalenessBudget, "verdict", lambda self, *, oldest, consume_version: Verdict.FRESH)
    simulation = Simulation(eta=1, b=7, steps=60, seed=5)
    simulation.run()
    assert max(s for *_, s in simulation.consumed) > 1

"""The live groups of one adapter, in memory and in the ledger: every move is made in both.

The ledger is flushed where a move must survive a crash: when a group is done, before a step's groups are leased,
when a step is committed. Issues, tries and drops since the last flush may be lost in a crash. Their prompts are
issued again under the same key.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter

import msgspec

from areal_lora.data.prompts import PromptStream
from areal_lora.processes.watched import reached
from areal_lora.rollout.controller.groups import GroupTally, ScoredGroup, Ticket
from areal_lora.rollout.controller.pacing import Freshness
from areal_lora.rollout.ledger.file import LIVE, GroupState, LedgerRow
from areal_lora.rollout.ledger.ledger import Ledger
from areal_lora.rollout.workflow import Episode

MAX_STALE = 4  # issues of one prompt that may come too late
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Episode).decode


class GroupPool:
    """Groups by state: ``waiting`` (oldest issue first), ``running`` and ``ready`` by seq, ``leases`` by step.

    ``on_expire(ticket)`` is called for a running group whose answer is not needed any more.
    """

    def __init__(
        self, prompts: PromptStream, ledger: Ledger, *, on_expire: Callable[[Ticket], None], clock: Callable[[], float]
    ) -> None:
        self.ledger = ledger
        self.loaded = False
        self.birth = 0
        self.waiting: list[Ticket] = []
        self.running: dict[int, Ticket] = {}
        self.ready: dict[int, ScoredGroup] = {}
        self.leases: dict[int, list[int]] = {}
        self.idle_since_s: float | None = None  # nothing in flight
        self.tally = GroupTally()
        self.on_expire, self._prompts, self._clock = on_expire, prompts, clock

    # ------------------------------------------------------------ loading

    def load(self) -> None:
        """Take over what the ledger holds. Requests that run in this process and are still wanted keep running."""
        rows = self.ledger.table.rows(*LIVE)
        wanted = {row.seq: row for row in rows if row.state in (GroupState.ISSUED, GroupState.RUNNING)}
        for ticket in list(self.running.values()):
            row = wanted.get(ticket.seq)
            if row is None or (row.position, row.issue) != (ticket.prompt.position, ticket.issue):
                self.expire(ticket)
        self.waiting.clear()
        self.ready.clear()
        self.leases.clear()
        for row in rows:
            if row.state is GroupState.LEASED:
                self.leases.setdefault(row.step, []).append(row.seq)
            elif row.state is GroupState.DONE:
                self.ready[row.seq] = self._finished(row)
            elif row.seq not in self.running:
                self.waiting.append(self._ticket(row))
        self.loaded = True

    def _ticket(self, row: LedgerRow) -> Ticket:
        return Ticket(
            seq=row.seq,
            prompt=self._prompts.at(row.position),
            issue=row.issue,
            birth=self.birth,
            stale=row.stale,
            failed=row.failed,
            resampled=row.resampled,
        )

    def _finished(self, row: LedgerRow) -> ScoredGroup:
        episode = _decode(self.ledger.table.payload(row.seq))
        return ScoredGroup(ticket=self._ticket(row), episode=episode, oldest=row.version, newest=row.newest)

    # ------------------------------------------------------------ issued and running

    def start(self, *, also_stale: bool) -> Ticket:
        """The oldest waiting issue, or a new one, now counted as running.

        Prompts whose last issue came too late are among them only if ``also_stale``.
        """
        chosen = next((i for i, ticket in enumerate(self.waiting) if also_stale or not ticket.stale), None)
        head, ticket = self.ledger.head, None if chosen is None else self.waiting.pop(chosen)
        while ticket is None:
            prompt = self._prompts.at(head.next_position)
            head.next_position += 1
            seq = self.ledger.issue(prompt.position, 1)
            if (refusal := self._prompts.refusal(prompt)) is not None:
                self.ledger.drop(seq, refusal)
                continue
            reached("controller.issued")
            ticket = Ticket(seq=seq, prompt=prompt, issue=1, birth=self.birth)
        if self.idle_since_s is not None:
            head.counters.idle_s += self._clock() - self.idle_since_s
            self.idle_since_s = None
        self.running[ticket.seq] = ticket
        return ticket

    def stop(self, ticket: Ticket, tokens: int | None = None) -> None:
        """``ticket`` runs no longer; the caller moves its row. If it was answered there are ``tokens`` to train on."""
        del self.running[ticket.seq]
        before, answered = self.tally, tokens is not None
        self.tally = GroupTally(
            ended=before.ended + 1, answered=before.answered + answered, tokens=before.tokens + (tokens or 0)
        )
        if not self.running:
            self.idle_since_s = self._clock()

    def expire(self, ticket: Ticket) -> None:
        """Stop ``ticket`` and abandon its request."""
        self.stop(ticket)
        self.on_expire(ticket)

    def wait_again(self, ticket: Ticket) -> None:
        """Put a running issue back among the waiting ones, as a new ticket: late reports of the old one are ignored."""
        self.stop(ticket)
        bisect.insort(self.waiting, replace(ticket), key=attrgetter("seq"))

    def reissue(self, ticket: Ticket, reason: str) -> None:
        """Drop an issue and issue its prompt again, unless ``MAX_STALE`` issues came too late.

        Only staleness can repeat without end.
        """
        stale = ticket.stale + (reason == Freshness.STALE)
        if stale >= MAX_STALE:
            self.ledger.drop(ticket.seq, f"{reason}_given_up")
            return
        self.ledger.drop(ticket.seq, reason)
        seq = self.ledger.issue(ticket.prompt.position, ticket.issue + 1, stale)
        again = Ticket(seq=seq, prompt=ticket.prompt, issue=ticket.issue + 1, birth=self.birth, stale=stale)
        self.waiting.append(again)

    # ------------------------------------------------------------ done and leased

    @property
    def live(self) -> int:
        """The number of groups held for the next step and later ones."""
        return len(self.running) + len(self.ready)

    def finish(self, finished: ScoredGroup) -> None:
        seq = finished.ticket.seq
        self.ledger.finish(seq, finished.oldest, finished.newest, _encode(finished.episode))
        self.ready[seq] = finished

    def lease(self, chosen: list[ScoredGroup], step: int) -> None:
        seqs = [finished.ticket.seq for finished in chosen]
        self.ledger.lease(seqs, step)
        for seq in seqs:
            del self.ready[seq]
        self.leases[step] = seqs

    def leased(self, step: int) -> list[ScoredGroup]:
        """The groups leased at ``step``, read from the ledger; none if there is no lease."""
        rows = {row.seq: row for row in self.ledger.table.rows(GroupState.LEASED)} if step in self.leases else {}
        return [self._finished(rows[seq]) for seq in self.leases.get(step, ())]

    def consume(self, step: int) -> None:
        """Every group leased at ``step`` or before is consumed."""
        self.ledger.consume(step)
        for leased in [leased for leased in self.leases if leased <= step]:
            del self.leases[leased]

    # ------------------------------------------------------------ the whole

    def check_and_flush(self) -> None:
        """Compare the ledger with the groups held here, then flush it. Raises LedgerError."""
        leased = sum(len(seqs) for seqs in self.leases.values())
        self.ledger.check(len(self.waiting) + len(self.running) + len(self.ready) + leased)
        self.ledger.flush()

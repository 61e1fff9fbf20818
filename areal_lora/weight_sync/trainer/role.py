"""The part of a trainer rank in the decisions about a publish: rank 0 is the leader, the other ranks follow.

publisher thread                 Leader (rank 0)                         Follower
decide(StartOutcome)             members? share        the step          receive the step
Attempt: form groups             invite: POST /admin/join to members     -
         send the shard          announce: POST /admin/publish           -
decide(AttemptOutcome(results))  judge servers and ranks, share          receive
Yield: another adapter's publish goes ahead, then decide(WaitOutcome)
Wait: decide(WaitOutcome)        look for servers, share                 receive
FinishPublish                    conclude: report the active version     -
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from areal_lora.distributed.exchange import Exchange
from areal_lora.weight_sync.messages import ServerEndpoint, SourceEndpoint
from areal_lora.weight_sync.trainer.decisions import Decision, Sent, Step
from areal_lora.weight_sync.trainer.publish_job import Job


@dataclass(frozen=True, slots=True)
class StartOutcome:
    """A publish started: the gates of all ranks are open."""


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    """A ``Wait`` step was taken."""


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """An ``Attempt`` was made; ``results`` of all ranks, in rank order."""

    results: Sequence[Sent]


Event = StartOutcome | WaitOutcome | AttemptOutcome


class Role(Protocol):
    """Called by the publisher thread of one rank, ``changed`` by any thread."""

    def decide(self, job: Job, event: Event, exchange: Exchange) -> Step:
        """Rank 0's next step after ``event``, on every rank (collective); ``job.budget`` is that of rank 0 afterwards.

        Raises PublishError if another rank does not respond.
        """
        ...

    def invite(self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], deadline: float) -> None:
        """Request that every member joins the groups of ``sources`` by ``deadline``, without waiting for answers."""
        ...

    def await_joins(self) -> None:
        """Wait for the answers to ``invite``. Raises PublishError for a member that did not join."""
        ...

    def next_turn(self, number: int | None) -> None:
        """Call before ``decide``: publish ``number`` waits, and could go ahead; None if none does."""
        ...

    def announce(self, job: Job, deadline: float) -> None:
        """Post the version to all members, without waiting for answers. Its transfer ends by ``deadline``."""
        ...

    def conclude(self, job: Job) -> None:
        """The version serves, and all ranks have received the report."""
        ...

    def changed(self) -> bool:
        """Whether servers are available that hold no version or not each adapter's newest, or members do not answer."""
        ...

    def drop(self, name: str) -> None:
        """Have the servers free what they hold of adapter ``name``, without waiting for answers."""
        ...

    def close(self) -> None: ...


class Follower:
    """Role of all ranks but rank 0: take over rank 0's steps and remaining time."""

    def decide(self, job: Job, event: Event, exchange: Exchange) -> Step:
        raw = exchange.broadcast_bytes(None, job.budget.patience_s)
        decision = msgspec.msgpack.decode(raw, type=Decision)
        job.budget.adopt(decision.left_s)
        return decision.step

    def invite(self, members: Sequence[ServerEndpoint], sources: list[SourceEndpoint], deadline: float) -> None:
        """Nothing: rank 0 requests the joins."""

    def await_joins(self) -> None:
        """Nothing: rank 0 waits for the answers."""

    def next_turn(self, number: int | None) -> None:
        """Nothing: rank 0 decides whose turn it is."""

    def announce(self, job: Job, deadline: float) -> None:
        """Nothing: rank 0 announces."""

    def conclude(self, job: Job) -> None:
        """Nothing: rank 0 reports the active version."""

    def changed(self) -> bool:
        return False

    def drop(self, name: str) -> None:
        """Nothing: rank 0 requests it."""

    def close(self) -> None:
        """Nothing is open."""

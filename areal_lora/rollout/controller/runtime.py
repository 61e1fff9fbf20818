"""Everything that belongs to one adapter in the controller, and the tasks that roll its groups out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.channel import messages as m
from areal_lora.rollout.client import GenerationFault
from areal_lora.rollout.controller.evaluation import Evaluator
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.controller.retries import generation_failure, scoring_failure
from areal_lora.rollout.routing import server_observer
from areal_lora.rollout.workflow import Workflow, first_fault

NO_VERSION_WAIT_S = 0.2


@dataclass(slots=True, kw_only=True)
class AdapterRuntime:
    """One adapter: its feed, its workflow, one task per running group, and results not yet fetched.

    ``one_evaluation``: an evaluation holds its version on the servers, which have room for one beside those that
    are rolled out. ``seed`` is the run's.
    """

    feed: AdapterFeed
    workflow: Workflow
    evaluator: Evaluator
    seed: int
    events: list[m.EvalResult] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    one_evaluation: asyncio.Lock = field(default_factory=asyncio.Lock)

    def admit(self, tasks: asyncio.TaskGroup) -> None:
        """Start a task in ``tasks`` for every group that the feed admits now."""
        while (ticket := self.feed.admit()) is not None:
            task = tasks.create_task(self._roll_out(ticket, tasks))
            self.running[ticket.seq] = task
            task.add_done_callback(partial(self._ended, ticket.seq))

    async def _roll_out(self, ticket: Ticket, tasks: asyncio.TaskGroup) -> None:
        """Request one issued group until it is ready or dropped. Cancelled when the group has become too old."""
        feed = self.feed
        server_observer.set(partial(feed.served_by, ticket))
        back_off_s: float | None = 0.0
        while back_off_s is not None:
            await asyncio.sleep(back_off_s)
            ref = feed.begin(ticket)
            if ref is None:
                back_off_s = NO_VERSION_WAIT_S
                continue
            try:
                seed = request_seed(self.seed, ticket.prompt, ticket.issue, ticket.resampled)
                episode = await self.workflow.run(ticket.prompt, ref, seed)
            except GenerationFault as fault:
                back_off_s = feed.retry(ticket, generation_failure(fault))
                continue
            bad = first_fault(episode.group)
            if bad is not None:
                back_off_s = feed.retry(ticket, scoring_failure(bad))
                continue
            feed.finish(ticket, episode)
            back_off_s = None
        self.admit(tasks)
        self.notify()

    def expire(self, ticket: Ticket) -> None:
        """Cancel the request of ``ticket``, if it has not ended without a report."""
        task = self.running.get(ticket.seq)
        if task is not None:
            task.cancel()

    def _ended(self, seq: int, task: asyncio.Task[None]) -> None:
        if self.running.get(seq) is task:
            del self.running[seq]

    def notify(self) -> None:
        """Wake all callers that wait for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when ``ready()``, checked at every change, or after ``timeout_s``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not ready():
            remaining_s = deadline - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                return
            try:
                async with asyncio.timeout(remaining_s):
                    await self.changed.wait()
            except TimeoutError:
                return

    def drain_events(self) -> tuple[m.EvalResult, ...]:
        events = tuple(self.events)
        self.events.clear()
        return events


def request_seed(run_seed: int, prompt: Prompt, issue: int, resampled: int) -> int:
    """31-bit sampling seed of one request: the same run asks the same question with the same seed.

    A try that failed for lack of a server, or in a crash, does not change the seed.
    """
    text = f"{run_seed}:{prompt.uid}:{issue}:{resampled}".encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") >> 1

"""The rollout controller: one task per group in flight, one handler per trainer request.

trainer --announce--> feed.admit -> task: begin -> workflow -> finish | back off and retry
trainer --get batch-> feed.take  <- ready groups, oldest issue first
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from areal_lora.errors import RolloutError
from areal_lora.processes.faults import reached
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import messages as m
from areal_lora.rollout.client import FaultKind, GenerationFault
from areal_lora.rollout.controller.evaluation import Evaluator
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import Lease, Ticket
from areal_lora.rollout.controller.prompts import Prompt
from areal_lora.rollout.routing import Router, told_server
from areal_lora.rollout.workflow import Workflow, first_fault
from areal_lora.types import AdapterRef

N_SAMPLES = 2  # readable examples in a batch
NO_VERSION_WAIT_S = 0.2
LEASE_CHECK_S = 5.0
# Faults that say nothing about the answer: it is asked for again, not another one.
_SAME_ANSWER = (FaultKind.CONNECTION, FaultKind.RETIRED, FaultKind.SERVER_ERROR, FaultKind.ABORTED)

log = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class AdapterRuntime:
    """Everything that belongs to one adapter.

    ``one_evaluation``: each holds its version on the servers, which have room for one beside those that are rolled out.
    """

    feed: AdapterFeed
    workflow: Workflow
    evaluator: Evaluator
    events: list[m.EvalResult] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    one_evaluation: asyncio.Lock = field(default_factory=asyncio.Lock)

    def expire(self, ticket: Ticket) -> None:
        task = self.running.get(ticket.seq)
        if task is not None:  # else it has ended without a report
            task.cancel()

    def ended(self, seq: int, task: asyncio.Task[None]) -> None:
        if self.running.get(seq) is task:
            del self.running[seq]

    def notify(self) -> None:
        """Wake everybody who waits for the present state to change."""
        self.changed.set()
        self.changed = asyncio.Event()


class Controller:
    """Serves trainer requests and keeps the feeds' groups in flight inside ``tasks``.

    An error that is not a rollout fault ends the task group, and with it the process.
    """

    def __init__(
        self,
        adapters: Mapping[str, AdapterRuntime],
        router: Router,
        *,
        seed: int,
        tasks: asyncio.TaskGroup,
        stop: asyncio.Event,
    ) -> None:
        self._adapters, self._router, self._seed, self._tasks, self._stop = adapters, router, seed, tasks, stop
        self._birth = secrets.token_hex(8)
        self._trainer = ""
        self._evaluating: dict[tuple[str, int, str], asyncio.Task[None]] = {}

    @property
    def _life(self) -> str:
        """Of one controller in conversation with one trainer: requests of an earlier trainer are refused too."""
        return f"{self._birth}:{self._trainer}"

    # ------------------------------------------------------------ requests

    async def handle(self, request: m.Request) -> m.Reply:
        if isinstance(request, m.Hello):
            return self._hello(request)
        if request.life != self._life:
            return m.NotGreeted()
        match request:
            case m.AnnounceVersion():
                return self._announce(request)
            case m.GetBatch():
                return await self._get_batch(request)
            case m.CommitStep():
                return self._commit(request)
            case m.Evaluate():
                return self._evaluate(request)
            case m.GetEvents():
                return await self._get_events(request)
            case m.GetStats():
                return self._adapter(request.adapter).feed.stats()
            case m.Shutdown():
                self._stop.set()
                return m.Done()

    def _adapter(self, name: str) -> AdapterRuntime:
        runtime = self._adapters.get(name)
        if runtime is None:
            raise RolloutError(f"adapter {name!r} is not in this run (it has: {', '.join(self._adapters)})")
        return runtime

    def _hello(self, request: m.Hello) -> m.Welcome:
        if request.protocol != m.PROTOCOL:
            raise RolloutError(f"trainer speaks protocol {request.protocol}, this controller {m.PROTOCOL}")
        missing = self._adapters.keys() - request.versions.keys()
        if missing:
            raise RolloutError(f"the trainer says no version of {', '.join(sorted(missing))}")
        self._trainer = request.trainer
        # Whoever greets asks again for what it is owed. An earlier trainer's version may yet become another one.
        for task in self._evaluating.values():
            task.cancel()
        self._evaluating.clear()
        for name, runtime in self._adapters.items():
            runtime.feed.hello(
                request.versions[name], trainer=request.trainer, snapshot=request.snapshots.get(name, b"")
            )
            runtime.events.clear()
            runtime.notify()
        return m.Welcome(adapters=tuple(self._adapters), life=self._life)

    def _announce(self, request: m.AnnounceVersion) -> m.Done:
        runtime = self._adapter(request.adapter)
        runtime.feed.announce(request.version)
        if request.lost:
            log.warning("given up by the trainer: %s", ", ".join(request.lost))
        ref = AdapterRef(name=request.adapter, version=request.version)
        self._router.announce(ref, request.servers, request.lost)
        self._admit(runtime)
        runtime.notify()
        reached("controller.announced")
        return m.Done()

    def _commit(self, request: m.CommitStep) -> m.Done:
        reached("controller.commit_received")
        self._adapter(request.adapter).feed.commit(request.step)
        reached("controller.committed")
        return m.Done()

    async def _get_batch(self, request: m.GetBatch) -> m.Batch | m.NotReady | m.NotGreeted:
        runtime = self._adapter(request.adapter)
        feed = runtime.feed
        lease: Lease | None = None

        def take() -> bool:
            nonlocal lease
            if request.life != self._life:
                return True  # the trainer that asked is gone
            lease = feed.take(request.step, request.version)
            self._admit(runtime)
            return lease is not None

        await self._wait(runtime, take, request.timeout_s)
        if request.life != self._life:
            return m.NotGreeted()
        stats = feed.stats()
        if lease is None:
            return m.NotReady(
                ready=stats.ready,
                needed=feed.budget.prompts_per_step,
                running=stats.running,
                dropped=sum(stats.dropped.values()),
                note=feed.note,
            )
        return m.Batch(
            adapter=request.adapter,
            step=request.step,
            groups=lease.groups,
            stats=stats,
            samples=_examples(lease),
            events=self._drain_events(runtime),
            snapshot=lease.snapshot,
        )

    def _evaluate(self, request: m.Evaluate) -> m.Done:
        runtime = self._adapter(request.adapter)
        ref = AdapterRef(name=request.adapter, version=request.version)
        key = (request.adapter, request.version, request.tag)
        waiting = {(event.adapter, event.version, event.tag) for event in runtime.events}
        if key in self._evaluating or key in waiting:
            return m.Done()

        async def evaluate() -> None:
            # The trainer may ask before its publish in the background has been announced.
            while not runtime.feed.has_announced(request.version):
                await runtime.changed.wait()
            if runtime.one_evaluation.locked():
                log.info("evaluation %s of %s waits for the one before", request.tag, ref)
            async with runtime.one_evaluation:
                result = await runtime.evaluator.run(ref, request.tag)
            if self._evaluating.get(key) is not asyncio.current_task():
                return  # given up, too late to be stopped
            del self._evaluating[key]
            log.info("evaluation %s of %s: %s", result.tag, ref, result.error or _figures(result))
            runtime.events.append(result)
            runtime.notify()

        self._evaluating[key] = self._tasks.create_task(evaluate())
        return m.Done()

    async def _get_events(self, request: m.GetEvents) -> m.Events:
        runtime = self._adapter(request.adapter)
        await self._wait(runtime, lambda: bool(runtime.events), request.timeout_s)
        return m.Events(events=self._drain_events(runtime))

    def _drain_events(self, runtime: AdapterRuntime) -> tuple[m.EvalResult, ...]:
        events = tuple(runtime.events)
        runtime.events.clear()
        return events

    async def _wait(self, runtime: AdapterRuntime, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when ``ready`` says so, checked at every change, or after ``timeout_s``."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not ready():
            remaining_s = deadline - asyncio.get_running_loop().time()
            if remaining_s <= 0:
                return
            try:
                async with asyncio.timeout(remaining_s):
                    await runtime.changed.wait()
            except TimeoutError:
                return

    # ------------------------------------------------------------ groups

    def _admit(self, runtime: AdapterRuntime) -> None:
        while (ticket := runtime.feed.admit()) is not None:
            task = self._tasks.create_task(self._roll_out(runtime, ticket))
            runtime.running[ticket.seq] = task
            task.add_done_callback(partial(runtime.ended, ticket.seq))

    async def watch_leases(self) -> None:
        """Give up requests that outlive their lease, for ever."""
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            for runtime in self._adapters.values():
                runtime.feed.expire_overdue()
                self._admit(runtime)

    async def _roll_out(self, runtime: AdapterRuntime, ticket: Ticket) -> None:
        """One issued group until it is ready or dropped. Cancelled when it has become too old."""
        feed = runtime.feed
        told_server.set(partial(feed.served_by, ticket))
        back_off_s: float | None = 0.0
        while back_off_s is not None:
            await asyncio.sleep(back_off_s)
            ref = feed.begin(ticket)
            if ref is None:
                back_off_s = NO_VERSION_WAIT_S
                continue
            try:
                seed = request_seed(self._seed, ticket.prompt, ticket.issue, ticket.resampled)
                episode = await runtime.workflow.run(ticket.prompt, ref, seed)
            except GenerationFault as fault:
                back_off_s = feed.retry(
                    ticket,
                    fault.kind,
                    fault.detail,
                    retryable=fault.retryable,
                    served=fault.kind is not FaultKind.CONNECTION,
                    resample=fault.kind not in _SAME_ANSWER,
                )
                continue
            bad = first_fault(episode.group)
            if bad is not None:
                back_off_s = feed.retry(ticket, FaultKind.SCORER, f"{bad.outcome}: {bad.detail}", resample=True)
                continue
            feed.finish(ticket, episode)
            back_off_s = None
        self._admit(runtime)
        runtime.notify()


def request_seed(run_seed: int, prompt: Prompt, issue: int, resampled: int) -> int:
    """31-bit sampling seed of one request: the same run asks the same question in the same way.

    A try that failed for lack of a server, or in a crash, does not change it.
    """
    text = f"{run_seed}:{prompt.uid}:{issue}:{resampled}".encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") >> 1


def _figures(result: m.EvalResult) -> str:
    measured = f"accuracy {result.accuracy}, mean reward {result.reward_mean}"
    return f"{measured} over {result.n} problems, {result.unscored} unscored"


def _examples(lease: Lease) -> tuple[m.RolloutSample, ...]:
    return tuple(
        m.RolloutSample(
            uid=trajectory.uid,
            prompt=sample.prompt,
            completion=finished.episode.texts[0],
            answer=sample.answer,
            reward=trajectory.reward,
            version=trajectory.adapter.version,
        )
        for finished in lease.finished[:N_SAMPLES]
        for sample, trajectory in [(finished.ticket.prompt.sample, finished.episode.group.trajectories[0])]
    )

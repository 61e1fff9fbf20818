"""The rollout controller: one handler per trainer request, one task per running group (see `runtime`).

trainer --announce--> feed.admit -> task: begin -> workflow -> finish | back off and retry
trainer --get batch-> feed.take  <- ready groups, oldest issue first
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping

from areal_lora.errors import RolloutError
from areal_lora.processes.faults import reached
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel import messages as m
from areal_lora.rollout.controller.groups import Lease
from areal_lora.rollout.controller.runtime import AdapterRuntime
from areal_lora.rollout.routing import Router
from areal_lora.types import AdapterRef

N_SAMPLES = 2  # readable examples in a batch
LEASE_CHECK_S = 5.0

log = get_logger(__name__)


class Controller:
    """Serves trainer requests and keeps the feeds' groups running inside ``tasks``.

    An error that is not a rollout fault ends the task group, and with it the process.
    """

    def __init__(
        self, adapters: Mapping[str, AdapterRuntime], router: Router, *, tasks: asyncio.TaskGroup, stop: asyncio.Event
    ) -> None:
        self._adapters, self._router, self._tasks, self._stop = adapters, router, tasks, stop
        self._birth = secrets.token_hex(8)
        self._trainer = ""
        self._evaluating: dict[tuple[str, int, str], asyncio.Task[None]] = {}

    @property
    def _session(self) -> str:
        """One controller process in contact with one trainer: requests of a previous trainer are refused too."""
        return f"{self._birth}:{self._trainer}"

    # ------------------------------------------------------------ requests

    async def handle(self, request: m.Request) -> m.Reply:
        if isinstance(request, m.Hello):
            return self._hello(request)
        if request.session != self._session:
            return m.StaleSession()
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
                return m.Accepted()

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
            raise RolloutError(f"the trainer states no version of {', '.join(sorted(missing))}")
        self._trainer = request.trainer
        # The trainer requests pending evaluations again. Versions of a previous trainer may be replaced.
        for task in self._evaluating.values():
            task.cancel()
        self._evaluating.clear()
        for name, runtime in self._adapters.items():
            runtime.feed.hello(
                request.versions[name], trainer=request.trainer, snapshot=request.snapshots.get(name, b"")
            )
            runtime.events.clear()
            runtime.notify()
        return m.Welcome(adapters=tuple(self._adapters), session=self._session)

    def _announce(self, request: m.AnnounceVersion) -> m.Accepted:
        runtime = self._adapter(request.adapter)
        runtime.feed.announce(request.version)
        if request.lost:
            log.warning("excluded by the trainer: %s", ", ".join(request.lost))
        ref = AdapterRef(name=request.adapter, version=request.version)
        self._router.announce(ref, request.servers, request.lost)
        runtime.admit(self._tasks)
        runtime.notify()
        reached("controller.announced")
        return m.Accepted()

    def _commit(self, request: m.CommitStep) -> m.Accepted:
        reached("controller.commit_received")
        self._adapter(request.adapter).feed.commit(request.step)
        reached("controller.committed")
        return m.Accepted()

    async def _get_batch(self, request: m.GetBatch) -> m.Batch | m.NotReady | m.StaleSession:
        runtime = self._adapter(request.adapter)
        feed = runtime.feed
        lease: Lease | None = None

        def take() -> bool:
            nonlocal lease
            if request.session != self._session:
                return True  # the trainer that asked is gone
            lease = feed.take(request.step, request.version)
            runtime.admit(self._tasks)
            return lease is not None

        await runtime.wait(take, request.timeout_s)
        if request.session != self._session:
            return m.StaleSession()
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
            events=runtime.drain_events(),
            snapshot=lease.snapshot,
        )

    def _evaluate(self, request: m.Evaluate) -> m.Accepted:
        runtime = self._adapter(request.adapter)
        ref = AdapterRef(name=request.adapter, version=request.version)
        key = (request.adapter, request.version, request.tag)
        waiting = {(event.adapter, event.version, event.tag) for event in runtime.events}
        if key in self._evaluating or key in waiting:
            return m.Accepted()

        async def evaluate() -> None:
            # The trainer may send the request before its background publish is announced.
            while runtime.feed.newest < request.version:
                await runtime.changed.wait()
            if runtime.one_evaluation.locked():
                log.info("evaluation %s of %s waits for the previous one", request.tag, ref)
            async with runtime.one_evaluation:
                result = await runtime.evaluator.run(ref, request.tag)
            if self._evaluating.get(key) is not asyncio.current_task():
                return  # abandoned when it could not be cancelled any more
            del self._evaluating[key]
            log.info("evaluation %s of %s: %s", result.tag, ref, result.error or _figures(result))
            runtime.events.append(result)
            runtime.notify()

        self._evaluating[key] = self._tasks.create_task(evaluate())
        return m.Accepted()

    async def _get_events(self, request: m.GetEvents) -> m.Events:
        runtime = self._adapter(request.adapter)
        await runtime.wait(lambda: bool(runtime.events), request.timeout_s)
        return m.Events(events=runtime.drain_events())

    async def watch_leases(self) -> None:
        """Abandon requests that outlive their lease, until the process ends."""
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            for runtime in self._adapters.values():
                runtime.feed.expire_overdue()
                runtime.admit(self._tasks)


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

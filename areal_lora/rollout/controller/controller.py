"""The rollout controller: one handler per trainer request, one task per running group (see `runtime`).

trainer --announce--> admission -> feed.admit -> task: workflow -> finish | back off and retry
trainer --get batch-> feed.take of the first wanted adapter that has a batch  <- ready groups, oldest issue first
"""

import asyncio
import secrets
import statistics
from collections.abc import Awaitable, Callable, Mapping
from weakref import WeakValueDictionary

import msgspec

from areal_lora.errors import ArealLoraError, RolloutError
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.controller.evaluation import Changes
from areal_lora.rollout.controller.groups import Lease, Ticket, group_text
from areal_lora.rollout.controller.runtime import AdapterRuntime, Admission
from areal_lora.rollout.ledger.ledger import LedgerError
from areal_lora.rollout.routing import Router
from areal_lora.types import AdapterRef

LEASE_CHECK_S = 5.0
CUT_OFF_S = 5.0  # for requests that were cut off: a workflow may not let itself be cut off

log = get_logger(__name__)


class Controller:
    """Serves trainer requests and keeps the feeds' groups running inside ``tasks``.

    A fault of one adapter's rollouts ends that adapter. An error of what all share ends the task group, and with it the
    process. Adapters that join are opened with ``open_adapter`` from their entry of the configuration, as JSON; it
    raises ArealLoraError for one that cannot be rolled out. They are forgotten when they end and when a trainer greets.
    """

    def __init__(
        self,
        adapters: Mapping[str, AdapterRuntime],
        router: Router,
        *,
        tasks: asyncio.TaskGroup,
        stop: asyncio.Event,
        open_adapter: Callable[[bytes], Awaitable[AdapterRuntime]],
    ) -> None:
        self._adapters, self._router, self._tasks, self._stop = dict(adapters), router, tasks, stop
        self._open, self._joined = open_adapter, dict[str, AdapterRuntime]()
        self._turns = WeakValueDictionary[str, asyncio.Lock]()  # joins and ends of an adapter, one after the other
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._birth = secrets.token_hex(8)
        self._trainer = ""
        # Of this process with one trainer: requests of a previous trainer are refused, too.
        self._session = f"{self._birth}:"
        self._changes = Changes()
        self._evaluating: dict[tuple[str, int, str], asyncio.Task[None]] = {}
        self._one_evaluation = asyncio.Lock()  # it holds its version on the servers, which have one slot for that
        self._moved: dict[str, tuple[int, int]] = {}  # of that evaluation
        self._admission = Admission(adapters)
        self._served = lambda adapter: router.holds(router.newest(AdapterRef(name=adapter, version=0)))
        for runtime in adapters.values():
            runtime.start, runtime.served = self._start, self._served

    def _start(self, runtime: AdapterRuntime, ticket: Ticket) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if runtime.tasks.get(ticket.seq) is task:
                del runtime.tasks[ticket.seq]

        runtime.tasks[ticket.seq] = task = self._tasks.create_task(self._roll_out(runtime, ticket))
        task.add_done_callback(ended)

    async def _roll_out(self, runtime: AdapterRuntime, ticket: Ticket) -> None:
        try:
            await runtime.roll_out(ticket)
        except LedgerError:
            raise  # all adapters have one ledger file
        except Exception as error:  # fault boundary: a user's workflow
            if not isinstance(error, ArealLoraError):
                log.exception("the rollout of %s of %s", ticket.prompt.uid, runtime.feed.name)
            if self._adapters.get(runtime.feed.name) is runtime:  # else it has left, and its ledger is closed
                runtime.fail(error)
        self._admission.admit()
        self._changes.notify()

    async def handle(self, request: m.Request) -> m.Reply:
        if isinstance(request, m.Hello):
            return await self._hello(request)
        if request.session != self._session:
            return m.StaleSession()
        match request:
            case m.AnnounceVersion():
                return self._announce(request)
            case m.GetBatch():
                return await self._get_batch(request)
            case m.CommitStep():
                reached("controller.commit_received")
                self.adapter(request.adapter).feed.commit(request.step)
                reached("controller.committed")
                return m.Ack()
            case m.Evaluate():
                return self._evaluate(request)
            case m.JoinAdapter():
                return await self._join(request)
            case m.EndAdapter():
                return await self._end(request)
            case m.Shutdown():
                self._stop.set()
                return m.Ack()

    def adapter(self, name: str) -> AdapterRuntime:
        runtime = self._adapters.get(name)
        if runtime is None:
            raise RolloutError(f"adapter {name!r} is not in this run (it has: {', '.join(self._adapters)})")
        return runtime

    async def _hello(self, request: m.Hello) -> m.Welcome:
        if request.protocol != m.PROTOCOL:
            raise RolloutError(f"trainer speaks protocol {request.protocol}, this controller {m.PROTOCOL}")
        for name in list(self._joined):
            self._forget(name)
        missing = self._adapters.keys() - request.versions.keys()
        if missing:
            raise RolloutError(f"the trainer states no version of {', '.join(sorted(missing))}")
        self._trainer, self._session = request.trainer, f"{self._birth}:{request.trainer}"
        self._trainer_waits(False)
        # The trainer requests pending evaluations again. Versions of a previous trainer may be replaced.
        for task in self._evaluating.values():
            task.cancel()
        self._evaluating.clear()
        for name, runtime in self._adapters.items():
            runtime.hello(request.versions[name], trainer=request.trainer, snapshot=request.snapshots.get(name, b""))
        self._changes.notify()
        return m.Welcome(session=self._session)

    def _announce(self, request: m.AnnounceVersion) -> m.Ack:
        runtime = self.adapter(request.adapter)
        runtime.feed.announce(request.version)
        if request.lost:
            log.warning("excluded by the trainer: %s", ", ".join(request.lost))
        ref = AdapterRef(name=request.adapter, version=request.version)
        if request.left:
            log.info("left: %s", ", ".join(request.left))
        self._router.announce(ref, request.servers, request.lost, request.left)
        for each in self._adapters.values():
            each.resize(len(self._router.servers))
        self._admission.sequences = len(self._router.servers) * runtime.capacity.sequences
        self._admission.admit()
        self._changes.notify()
        reached("controller.announced")
        return m.Ack()

    async def _end(self, request: m.EndAdapter) -> m.Ack:
        async with self._turns.setdefault(request.adapter, asyncio.Lock()):
            if request.adapter in self._joined:
                await asyncio.wait({self._forget(request.adapter, leaves=True)})
                self._router.forget(request.adapter)
            elif request.adapter in self._adapters:
                self._adapters[request.adapter].feed.end()
        self._admission.admit()
        return m.Ack()

    async def _join(self, request: m.JoinAdapter) -> m.Ack | m.AdapterFailed | m.StaleSession:
        """The first request opens the adapter; a repeated one, after a lost reply, changes nothing but the pause."""
        name = request.adapter
        async with self._turns.setdefault(name, asyncio.Lock()):
            if name in self._leaving:
                await asyncio.wait({self._leaving[name]})
            if name not in self._joined:
                try:
                    runtime = await self._open(request.config)
                except LedgerError:
                    raise
                except ArealLoraError as error:
                    return m.AdapterFailed(adapter=name, reason=str(error))
                except Exception as error:  # fault boundary: a user's task, workflow or reward
                    log.exception("opening %s", name)
                    return m.AdapterFailed(adapter=name, reason=f"{type(error).__name__}: {error}")
                if request.session != self._session:
                    await runtime.close()
                    return m.StaleSession()
                runtime.hello(request.version, trainer=self._trainer, snapshot=request.snapshot)
                if self._router.servers:
                    runtime.resize(len(self._router.servers))
                runtime.start, runtime.served = self._start, self._served
                self._joined[name] = self._adapters[name] = runtime
                self._admission.add(name, runtime)
                log.info("%s joins at version %d", name, request.version)
            self._joined[name].paused = request.paused
        self._admission.admit()
        return m.Ack()

    def _forget(self, name: str, *, leaves: bool = False) -> asyncio.Task[None]:
        """Cut off what runs for an adapter that joined; the task closes its scorers. Its rows of the ledger stay.

        Their trajectories stay for another trainer's session, not where the adapter ``leaves``.
        """
        runtime = self._joined.pop(name)
        del self._adapters[name]
        self._admission.leave(name)
        running = list(runtime.tasks.values())
        runtime.feed.end(leaves=leaves)
        for key in [key for key in self._evaluating if key[0] == name]:
            running.append(evaluation := self._evaluating.pop(key))
            evaluation.cancel()

        async def leave() -> None:
            try:
                if running:
                    await asyncio.wait(running, timeout=CUT_OFF_S)
                await runtime.close()
                runtime.feed.groups.ledger.close()
            finally:
                del self._leaving[name]
            log.info("%s has left", name)

        self._leaving[name] = leaving = self._tasks.create_task(leave())
        return leaving

    async def close(self) -> None:
        for runtime in self._joined.values():
            await runtime.close()

    async def _get_batch(self, request: m.GetBatch) -> m.Batch | m.AdapterFailed | m.NotReady | m.StaleSession:
        wanted = [(self.adapter(ref.name), ref.version) for ref in request.wanted]
        reply: m.Batch | m.AdapterFailed | None = None

        def ready() -> bool:
            nonlocal reply
            if request.session != self._session:
                return True  # of a trainer that another one has replaced
            for runtime, version in wanted:
                reply = _take(runtime, version)
                if reply is not None:
                    break
            self._admission.admit()
            return reply is not None or any(runtime.events for runtime in self._adapters.values())

        self._trainer_waits(bool(wanted))
        await self._changes.wait(ready, request.timeout_s)
        if request.session != self._session:
            return m.StaleSession()
        if reply is not None:
            self._trainer_waits(False)
        if isinstance(reply, m.AdapterFailed):
            return reply
        events = tuple(event for runtime in self._adapters.values() for event in runtime.events)
        for runtime in self._adapters.values():
            runtime.events.clear()
        if isinstance(reply, m.Batch):
            return msgspec.structs.replace(reply, events=events, moved=self._moved)
        lacking = tuple(_lacking(runtime) for runtime, _ in wanted)
        return m.NotReady(lacking=lacking, events=events, moved=self._moved)

    def _trainer_waits(self, waits: bool) -> None:
        """Whether the trainer has nothing to do until it has a batch, also between two of its requests for one."""
        for runtime in self._adapters.values():
            runtime.evaluator.places.trainer_waits(waits)

    def _evaluate(self, request: m.Evaluate) -> m.Ack:
        runtime = self.adapter(request.adapter)
        ref = AdapterRef(name=request.adapter, version=request.version)
        key = (request.adapter, request.version, request.tag)
        waiting = {(event.adapter, event.version, event.tag) for event in runtime.events}
        if key in self._evaluating or key in waiting:
            return m.Ack()

        def newer(retired: AdapterRef) -> AdapterRef:
            newest = self._router.newest(retired)
            if (newest.name, newest.version, request.tag) in self._evaluating:
                return retired
            self._moved = {retired.name: (retired.version, newest.version)}
            return newest

        async def evaluate() -> None:
            # The trainer may send the request before its background publish is announced.
            while runtime.feed.newest < request.version:
                await self._changes.next()
            if self._one_evaluation.locked():
                log.info("evaluation %s of %s waits for another one", request.tag, ref)
            async with self._one_evaluation:
                try:
                    result = await runtime.evaluator.run(ref, request.tag, newer)
                finally:
                    self._moved = {}
            if self._evaluating.get(key) is not asyncio.current_task():
                return  # abandoned when it could not be cancelled any more
            del self._evaluating[key]
            figures = {record.name: record.figures() for record in result.sets}
            for name, found in (figures | result.failed).items():
                log.info("evaluation %s of %s: %s: %s", result.tag, ref, name, found)
            runtime.events.append(result)
            self._changes.notify()

        self._evaluating[key] = self._tasks.create_task(evaluate())
        return m.Ack()

    async def watch_leases(self) -> None:
        """Abandon requests that outlive their lease, until the process ends."""
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            for runtime in self._adapters.values():
                try:
                    runtime.feed.expire_overdue()
                except LedgerError:
                    raise  # all adapters have one ledger file
                except RolloutError as error:
                    runtime.fail(error)
            self._admission.admit()
            self._changes.notify()


def _take(runtime: AdapterRuntime, step: int) -> m.Batch | m.AdapterFailed | None:
    """What the adapter has for the trainer; None while a batch is not ready."""
    if runtime.failure is not None:
        return runtime.failure
    lease = runtime.feed.take(step)
    if lease is None:
        return None
    dropped = runtime.feed.take_dropped()
    return m.Batch(
        adapter=runtime.feed.name,
        step=step,
        groups=lease.groups,
        stats=runtime.feed.stats(),
        sampled=runtime.feed.sampled,
        texts=tuple(group_text(each.ticket, each.episode) for each in lease.finished) if runtime.texts else (),
        reward_components=_components(lease),
        reward_costs=runtime.take_costs(),
        events=(),
        snapshot=lease.snapshot,
        dropped=dropped if runtime.texts else (),
    )


def _lacking(runtime: AdapterRuntime) -> m.Lacking:
    stats = runtime.feed.stats()
    return m.Lacking(
        adapter=runtime.feed.name,
        ready=stats.ready,
        needed=runtime.feed.budget.prompts_per_step,
        running=stats.running,
        dropped=sum(stats.dropped.values()),
        note=runtime.feed.note,
    )


def _components(lease: Lease) -> dict[str, float]:
    """Mean of each named part of the reward over the batch's samples that name it."""
    # The trajectories of one sample have its one reward.
    samples = {(group.uid, t.sample): t.components for group in lease.groups for t in group.trajectories}
    names = {name: None for components in samples.values() for name in components}
    return {name: statistics.fmean(c[name] for c in samples.values() if name in c) for name in names}

"""Serve adapter versions with vLLM: leases of requests, publishes of new versions (contracts C2, C3).

    publish(announcement)  reserve a slot
                           Receive to all workers ----> they receive, write, verify beside generation
                           all have answered <---------
                           al_commit on all workers     the only moment generation waits, < 2 ms
                           requests can name the version

``server.transaction`` decides each step; this module does it. A failure before the commit frees the slot, and
the previous versions keep serving.

With merged rollouts the weights of the model are the one version. Then the commit comes between two requests, not
only between two steps (`gate.Gate`): pinned requests get half of the remaining time to end, rollouts are cut and
continue on the new version, and cached blocks are dropped. A commit that fails leaves a mixture, and the server serves
no version until one is written whole.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from areal_lora.engine.vllm_ext.compat.engine import call_follow_version
from areal_lora.engine.vllm_ext.server.gate import Gate
from areal_lora.engine.vllm_ext.worker import channel as workers
from areal_lora.errors import PublishError, UnknownVersionError
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached, watched_task
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import decode
from areal_lora.weight_sync.messages import PING_S, JoinRequest, PublishReply, StageResult
from areal_lora.weight_sync.server import transaction
from areal_lora.weight_sync.server.slot_table import ResidentVersion, ServedVersions

log = get_logger(__name__)

BASE = "base"  # the model name of the base without an adapter
GRACE_S = 10.0  # after a worker's own deadline; a worker that is silent for longer counts as dead
DRAIN_POLL_S = 0.005  # between two questions whether the engine's batch still uses a retired version
DROP_POLL_S = 0.05  # between two looks at the requests of dropped adapters
PINNED_S = 10.0  # a version stays this long after a pinned request, for the next request of the same evaluation
PINNED_ALONE_S = 1.0  # where it holds up the next version


@dataclass(slots=True, kw_only=True)
class VersionLease:
    """The version a request runs on while it holds the lease; without ``resident`` the base.

    ``lora`` names it for the engine. One that ``follows`` may move to newer versions: ``lora`` still names the first.
    """

    resident: ResidentVersion | None = None
    lora: LoRARequest | None = None
    follows: bool = False

    @property
    def ref(self) -> AdapterRef | None:
        return None if self.resident is None else self.resident.ref

    @property
    def name(self) -> str:
        """The full name of the version."""
        return BASE if self.resident is None else str(self.resident.ref)

    @property
    def incarnation(self) -> int:
        """Distinguishes adapters that have had the same name, one after the other."""
        return 0 if self.resident is None else self.resident.incarnation

    def move(self, versions: ServedVersions, ref: AdapterRef) -> None:
        """Hold ``ref`` in place of the version held before."""
        assert self.resident is not None
        versions.release(self.resident)
        self.resident = versions.acquire(str(ref))


class ServedAdapters:
    """Serve and publish the versions of one server. Call it from the server's event loop only."""

    def __init__(
        self,
        engine: AsyncLLM,
        channel: workers.WorkerChannel,
        *,
        n_workers: int,
        n_slots: int,
        resident: int,
        adapters: int = 1,
        merged: bool = False,
    ) -> None:
        self._engine, self._channel = engine, channel
        self._n_workers = n_workers
        # The incoming version needs the last slot; merged weights are one version and the staged one.
        self.versions = ServedVersions(n_slots, 0 if merged else resident - 1, adapters)
        self._merged, self.gate = merged, Gate()
        self._pinned_s = PINNED_ALONE_S if merged else PINNED_S
        self.has_base = True
        """Whether requests can name the base: merged rollouts have none from the first version on."""
        self.turn = asyncio.Lock()
        """Locked while a publish or a join is in progress, also of different adapters."""
        self._released = asyncio.Event()
        self._leaving: set[int] = set()  # ids that no request can name, and that the engine's batch still uses
        self._dropping: asyncio.Task[None] | None = None
        self.interrupt: Callable[[AdapterRef], Awaitable[None]] | None = None
        """Cuts the sequences on other versions than the given one. Awaited before it is committed with merged weights,
        and first of all where versions are lost."""
        self.switch: Callable[[AdapterRef], Awaitable[None]] | None = None
        """Has sequences continue on the given version. Awaited when requests can name it, before its publish is
        acknowledged."""

    @contextlib.contextmanager
    def lease(
        self,
        model: str,
        *,
        pinned: bool = False,
        or_newer: bool = False,
        incarnation: int | None = None,
        follow: bool = False,
    ) -> Iterator[VersionLease]:
        """Hold the version that ``model`` names; with ``or_newer`` the newest of its adapter, if not older.

        With ``incarnation`` only in that incarnation of the adapter. With ``or_newer`` and ``follow`` the engine has
        the request under the id that `follow` maps to newer versions, if there is one.

        ``pinned`` keeps the version for some seconds after the lease, unless a publish finds no other slot or a
        pinned request names another version of the adapter: there is a slot for one pin. Raises
        UnknownVersionError and never falls back to the base.
        """
        if model == BASE:
            if not self.has_base:
                raise UnknownVersionError("the weights of this server are a merged version; it serves no base")
            with self.gate.inside(pinned=False):
                yield VersionLease()
            return
        with self.gate.inside(pinned=pinned):
            resident = self.versions.acquire(model, pinned=pinned, or_newer=or_newer, incarnation=incarnation)
            self._released.set()  # a pin may have ended
            lease = VersionLease(resident=resident)
            if not self._merged:
                follow_id = self.versions.follow_ids.get(resident.ref.name) if follow else None
                lease.follows, lora_id = follow_id is not None, follow_id or resident.lora_id
                # The engine's prefix cache goes by the name: of one version, one incarnation, pinned or following.
                name = f"{resident.ref}#{lora_id}"
                lease.lora = LoRARequest(lora_name=name, lora_int_id=lora_id, lora_path=f"xccl://{name}")
            try:
                yield lease
            finally:
                assert lease.resident is not None
                self.versions.release(lease.resident, time.monotonic() + self._pinned_s if pinned else None)
                self._released.set()

    async def follow(self, ref: AdapterRef) -> dict[str, tuple[int, int]]:
        """From the engine's next step on, compute requests that follow the adapter under ``ref``, its newest version.

        Returns their tokens before it (`compat.engine.follow_version`); move their leases. Raises PublishError.
        """
        follow_id = self.versions.follow_ids.setdefault(ref.name, next(self.versions.lora_ids))
        lora_id = self.versions.resolve(str(ref)).lora_id
        return await _answer("al_follow", call_follow_version(self._engine, follow_id, lora_id))

    async def ping(self) -> None:
        """Ping every worker's background thread. Raises PublishError if one does not answer."""
        await self._channel.call(workers.Ping(), PING_S)

    async def join(self, request: JoinRequest, came: float | None = None) -> None:
        """Have all workers join the trainer's groups. Raises PublishError.

        The request's timeout counts from ``came`` (time.monotonic), its arrival at this server; None means now.
        """
        if len(request.ranks) != self._n_workers:
            raise PublishError(f"{len(request.ranks)} ranks for {self._n_workers} workers")
        deadline = _deadline(request.timeout_s, came)
        async with self._turn("a join", deadline):
            left = msgspec.structs.replace(request, timeout_s=max(deadline - time.monotonic(), 0.0))
            answers = await self._channel.call(workers.JoinCommand(request=left), left.timeout_s + GRACE_S)
        errors = [f"worker {w}: {a.error}" for w, a in enumerate(answers) if a.error]
        if errors:
            raise PublishError("; ".join(errors))

    async def publish(self, body: bytes, came: float | None = None) -> PublishReply:
        """Stage, commit and activate a version. Raises ManifestError (refused, nothing changed) or PublishError.

        Repeating the newest version is idempotent: the trainer may have missed the first acknowledgement.
        The announcement's timeout counts from ``came``, like that of ``join``; a later version is dropped.
        """
        announced = decode(body)
        ref, deadline = announced.manifest.ref, _deadline(announced.timeout_s, came)
        async with self._turn(str(ref), deadline):
            publish = transaction.PublishTransaction(self.versions, announced.manifest, deadline, time.monotonic())
            try:
                if publish.lost and self.interrupt is not None:
                    await self.interrupt(ref)
                slot = await self._reserve(publish)
                staged = await self._stage(body, ref, slot, deadline)
                async with self._alone(ref, staged, deadline) as hold_s:
                    commit = publish.staged(staged, time.monotonic())
                    if isinstance(commit, PublishReply):
                        return commit
                    reply = publish.activated(commit, await self._commit(commit), time.monotonic(), hold_s)
            finally:
                publish.end()
            reached("server.activated")
            if self.switch is not None:
                await self.switch(ref)
        phases = " ".join(f"{k} {v:.1f} ms" for k, v in reply.phases.items())
        log.info("%s is live in slot %d: %s", ref, commit.slot, phases)
        return reply

    @contextlib.asynccontextmanager
    async def _turn(self, what: str, deadline: float) -> AsyncIterator[None]:
        """Wait for the previous publish or join. Raises PublishError at the deadline (``late_turn``)."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self.turn.acquire()
        except TimeoutError:
            raise transaction.late_turn(what) from None
        try:
            # asyncio takes a free lock without checking the timeout.
            transaction.check_turn(what, deadline, time.monotonic())
            yield
        finally:
            self.turn.release()

    async def drop(self, name: str) -> int:
        """Forget adapter ``name``: no request gets it any more. Return how many still run; then its slots are freed.

        It may be published again at once. Raises PublishError if a worker does not answer.
        """

        async def free_dropped() -> None:
            """Free the slots of dropped adapters as their requests end."""
            while self.versions.left:
                await asyncio.sleep(DROP_POLL_S)
                async with self.turn:
                    await self._forget(self.versions.retire_left())

        async with self.turn:
            running = self.versions.drop(name)
            self._released.set()
            await self._channel.call(workers.Forget(name=name), PING_S)
            await self._forget(self.versions.retire_left())
        if running and (self._dropping is None or self._dropping.done()):
            self._dropping = watched_task("dropped-adapters", free_dropped)
        log.info("%s is dropped; %d requests run on it", name, running)
        return running

    async def _reserve(self, publish: transaction.PublishTransaction) -> int | None:
        """Reserve a slot, waiting for running requests if necessary; None: the workers must drain the bytes."""
        while True:
            self._released.clear()
            match publish.next_step(time.monotonic()):
                case transaction.Stage(slot=slot, refusal=refusal):
                    if refusal is not None:
                        log.warning("%s", refusal)
                    return slot
                case transaction.Retire(residents=residents):
                    await self._forget(residents)
                case transaction.EndedPin(ref=ref, refusal=refusal):
                    log.warning("%s; the pin on %s ends early", refusal, ref)
                case transaction.AwaitRelease(timeout_s=timeout_s):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._released.wait(), timeout_s)

    async def _stage(self, body: bytes, ref: AdapterRef, slot: int | None, deadline: float) -> list[StageResult]:
        """Stage on all workers, once no worker's batch uses a retired version, and return their results.

        Raises PublishError at the deadline.
        """
        while self._leaving:
            requested, self._leaving = sorted(self._leaving), set()
            await self._retire(requested)
            if self._leaving and time.monotonic() >= deadline:
                raise PublishError(f"requests of retired adapter ids {sorted(self._leaving)} are still in the engine")
            if self._leaving:
                await asyncio.sleep(DRAIN_POLL_S)
        receive = workers.Receive(
            announcement=body,
            ref=str(ref),
            slot=-1 if slot is None else slot,
            deadline=deadline,
            active=tuple(map(str, sorted(self.versions.active))),
        )
        answers = await self._channel.call(receive, deadline - time.monotonic() + GRACE_S)
        staged = [answer.staged for answer in answers if answer.staged is not None]
        assert len(staged) == len(answers), "a Receive is answered with its result"
        return staged

    @contextlib.asynccontextmanager
    async def _alone(self, ref: AdapterRef, staged: list[StageResult], deadline: float) -> AsyncIterator[float]:
        """With merged weights, let no request run meanwhile; yield the seconds that this took.

        Raises ManifestError (``slot``) if a request does not end in time; the old version keeps serving.
        """
        if not self._merged or not all(result.ok for result in staged):
            yield 0.0
            return
        await self._await_pinned(deadline)
        started = time.monotonic()
        with self.gate.closed():
            ended = self.gate.end_pinned(f"{ref} replaced the weights: a merged server holds one version")
            if ended:
                log.warning("%d pinned requests end early: %s could not wait for them longer", ended, ref)
            if self.interrupt is not None:
                await self.interrupt(ref)
            if not await self.gate.empty(deadline - time.monotonic()):
                raise self.versions.full(ref)
            self.versions.expire_pins(math.inf)
            while not await self._engine.reset_prefix_cache():  # the engine may still free a request that has ended
                if time.monotonic() >= deadline:
                    raise PublishError(f"{ref}: the engine does not forget the cached blocks of the version before")
                await asyncio.sleep(DRAIN_POLL_S)
            yield time.monotonic() - started

    async def _await_pinned(self, deadline: float) -> None:
        """Wait for pinned requests and pins, at most half of the time until ``deadline``."""
        until = time.monotonic() + (deadline - time.monotonic()) / 2
        while (now := time.monotonic()) < until:
            next_expiry = self.versions.expire_pins(now)
            if not self.gate.holds_pinned and not self.versions.pins:
                return
            self._released.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._released.wait(), min(until, next_expiry) - now)

    async def _commit(self, commit: transaction.Commit) -> float:
        """Activate on all workers and retire old versions between two model steps; return the seconds taken."""
        for resident in commit.retired:
            log.info("%s retired from slot %d", resident.ref, resident.slot)
        self.has_base = self.has_base and not self._merged
        try:
            arguments = commit.lora_id, commit.slot, commit.retired_ids
            answers: list[tuple[float, list[int]]] = await _answer(
                "al_commit", self._engine.collective_rpc("al_commit", args=arguments)
            )
        except PublishError:
            await self._retire(commit.undo_ids)
            raise
        self._leaving.update(*(left for _, left in answers))
        return max(stall for stall, _ in answers)

    async def _forget(self, retired: list[ResidentVersion]) -> None:
        for resident in retired:
            log.info("%s retired from slot %d", resident.ref, resident.slot)
        if retired:
            await self._retire([r.lora_id for r in retired])

    async def _retire(self, lora_ids: Iterable[int]) -> None:
        """Have the workers stop serving; what their batches still use is retried by `_stage`."""
        retiring = self._engine.collective_rpc("al_retire", args=(list(lora_ids),))
        self._leaving.update(*await _answer("al_retire", retiring))


T = TypeVar("T")


async def _answer(method: str, call: Awaitable[T]) -> T:
    """Await a call of the engine, which answers between two model steps. Raises PublishError."""
    try:
        return await call
    except Exception as e:  # fault boundary: vLLM raises a worker's error, or reports that the engine has died
        raise PublishError(f"{method} failed in the engine: {e!r}; see the server's log") from e


def _deadline(timeout_s: float, came: float | None) -> float:
    """Return the time at which the sender of a request stops waiting (time.monotonic)."""
    return (time.monotonic() if came is None else came) + timeout_s

"""The versions a server serves: which slot, who uses them, and how a new one comes in (contracts C2, C3).

    publish(announcement)  reserve a slot
                           Begin to all workers ------> they receive, write, verify beside generation
                           all have answered <---------
                           al_commit on all workers     the only moment generation waits, < 2 ms
                           the name can be requested

Anything wrong before the commit gives the slot back; the versions before keep serving.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from vllm.lora.request import LoRARequest

from areal_lora.engine.vllm_ext.worker_channel import Begin, Done, Join, Ping, Staged, WorkerChannel
from areal_lora.errors import ManifestError, PublishError
from areal_lora.processes.faults import reached
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import decode
from areal_lora.weight_sync.messages import PING_S, JoinRequest, PublishReply, StageResult
from areal_lora.weight_sync.refusal import Refusal
from areal_lora.weight_sync.server.slots import SlotTable

log = get_logger(__name__)

BASE = "base"  # the model name of the base without an adapter
GRACE_S = 10.0  # a worker's own deadline passes first; beyond this it is taken for dead
PINNED_S = 10.0  # how long a pinned request keeps its version after its end, for the next one of the same evaluation


class Workers(Protocol):
    """The engine's way to call a method on all its workers (``AsyncLLM``)."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """What a request runs on, for as long as it is held. ``name`` is the full name that is really used."""

    name: str
    ref: AdapterRef | None
    lora: LoRARequest | None


class ServedAdapters:
    """Slots, versions and publishes of one server. Lives on its event loop."""

    def __init__(
        self,
        workers: Workers,
        channel: WorkerChannel,
        *,
        n_workers: int,
        n_slots: int,
        resident: int,
        generating: Callable[[], bool],
    ) -> None:
        self._workers, self._channel = workers, channel
        self._n_workers, self._generating = n_workers, generating
        self._slots, self._keep = SlotTable(n_slots), resident - 1  # the incoming version needs the last one
        self._loras: dict[AdapterRef, LoRARequest] = {}
        self._replies: dict[AdapterRef, PublishReply] = {}
        self._next_id = 1
        self._lock = asyncio.Lock()  # publishes, also of different adapters, come one after the other
        self._released = asyncio.Event()
        self._pins: dict[AdapterRef, asyncio.TimerHandle] = {}
        self.on_active: Callable[[AdapterRef], Awaitable[None]] | None = None
        """Called when a version can be requested, before its publish is acknowledged."""

    @contextmanager
    def lease(self, model: str, *, pinned: bool = False, or_newer: bool = False) -> Iterator[Lease]:
        """Hold the version that ``model`` names; ``or_newer``: the newest of its adapter, if that is no older one.

        ``pinned`` keeps it for ``PINNED_S`` after that, unless a publish finds no other slot or another version of
        the adapter is asked for so: there is room for one. Raises UnknownVersionError, never falls back to the base.
        """
        if model == BASE:
            yield Lease(name=BASE, ref=None, lora=None)
            return
        ref = self._slots.newest_from(model) if or_newer else self._slots.resolve(model).ref
        self._slots.acquire(ref)
        if pinned:
            for other in [pin for pin in self._pins if pin.name == ref.name and pin != ref]:
                self._unpin(other)
        try:
            yield Lease(name=str(ref), ref=ref, lora=self._loras[ref])
        finally:
            if pinned:
                self._pin(ref)
            self._slots.release(ref)
            self._released.set()

    def _pin(self, ref: AdapterRef) -> None:
        if ref in self._pins:
            self._pins[ref].cancel()
        else:
            self._slots.acquire(ref)
        self._pins[ref] = asyncio.get_running_loop().call_later(PINNED_S, self._unpin, ref)

    def _unpin(self, ref: AdapterRef) -> None:
        self._pins.pop(ref).cancel()
        self._slots.release(ref)
        self._released.set()

    def active(self) -> list[AdapterRef]:
        return self._slots.active()

    async def ping(self) -> None:
        """Raises PublishError if a worker's background thread does not answer."""
        await self._channel.ask(Ping(), Done, PING_S)

    async def join(self, request: JoinRequest, came: float | None = None) -> None:
        """Make all workers members of the trainer's groups. Raises PublishError.

        Its time counts from ``came`` (time.monotonic), when the request reached this server; now if that is None.
        """
        if len(request.ranks) != self._n_workers:
            raise PublishError(f"{len(request.ranks)} ranks for {self._n_workers} workers")
        deadline = _deadline(request.timeout_s, came)
        async with self._turn("a join", deadline):
            left = msgspec.structs.replace(request, timeout_s=max(deadline - time.monotonic(), 0.0))
            answers = await self._channel.ask(Join(request=left), Done, left.timeout_s + GRACE_S)
        errors = [f"worker {w}: {a.error}" for w, a in enumerate(answers) if a.error]
        if errors:
            raise PublishError("; ".join(errors))

    async def publish(self, body: bytes, came: float | None = None) -> PublishReply:
        """The whole transaction. Raises ManifestError (refused, nothing changed) or PublishError.

        The newest version again is acknowledged again: the trainer may not have heard the first time.
        The announcement's time counts from ``came``, like that of ``join``; what is not staged by then is dropped.
        """
        announced = decode(body)
        ref, deadline = announced.manifest.ref, _deadline(announced.timeout_s, came)
        async with self._turn(str(ref), deadline):
            began = time.perf_counter()
            if ref == self._slots.newest(ref.name):
                return await self._again(body, ref, deadline)
            slot = await self._reserve(ref, deadline)
            reply = None
            try:
                staged = await self._stage(body, ref, -1 if slot is None else slot, deadline)
                if slot is None:
                    raise PublishError(f"{ref} was staged without a slot")
                if time.monotonic() >= deadline:
                    raise PublishError(f"{ref} was staged too late: its trainer has given it up")
                reply = await self._commit(ref, slot, staged, began)
            finally:
                # A worker that is late has passed its own deadline by now and writes no more.
                if reply is None and slot is not None:
                    self._slots.abort(ref)
            if self.on_active is not None:
                await self.on_active(ref)
        phases = " ".join(f"{k} {v:.1f} ms" for k, v in reply.phases.items())
        log.info("%s is live in slot %d: %s", ref, slot, phases)
        return reply

    @asynccontextmanager
    async def _turn(self, what: str, deadline: float) -> AsyncIterator[None]:
        """Wait for the request before. Raises PublishError at the deadline: whoever asked has given up by then.

        What was given up must not be done late. The next one would wait for it, until it is given up, too.
        """
        late = PublishError(f"{what} came while this server was busy, and is late by now; ask again")
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._lock.acquire()
        except TimeoutError:
            raise late from None
        try:
            if time.monotonic() >= deadline:  # a free lock is taken without a look at the time
                raise late
            yield
        finally:
            self._lock.release()

    async def retire(self, ref: AdapterRef) -> None:
        """Free the slot of a version. Raises UnknownVersionError; ValueError if it is in use or the newest."""
        async with self._lock:
            await self._retire([ref])

    async def _reserve(self, ref: AdapterRef, deadline: float) -> int | None:
        """A slot, waiting for running requests if need be; None if the version must be refused.

        The trainer already sends: without a slot the workers still take the bytes off the wire.
        """
        give_up = time.monotonic() + (deadline - time.monotonic()) / 2
        while True:
            self._released.clear()
            try:
                return self._slots.reserve(ref)
            except ManifestError as e:
                left = give_up - time.monotonic()
                # Most were retired by the commit before. Else a straggler holds an old one: the oldest unused goes.
                spare = self._slots.retirable(self._keep) or self._slots.retirable(1)[:1]
                if e.reason == Refusal.SLOT and spare:
                    await self._retire(spare)
                    continue
                if e.reason == Refusal.SLOT and left <= 0 and self._pins:
                    pinned = next(iter(self._pins))
                    log.warning("%s; %s is given up although it is pinned", e, pinned)
                    self._unpin(pinned)
                    continue
                if e.reason != Refusal.SLOT or left <= 0:
                    log.warning("%s", e)
                    return None
            try:
                await asyncio.wait_for(self._released.wait(), left)
            except TimeoutError:
                continue

    async def _begin(self, body: bytes, ref: AdapterRef, slot: int, deadline: float) -> list[StageResult]:
        left = deadline - time.monotonic()
        active = tuple(map(str, self._slots.active()))
        begin = Begin(
            announcement=body, ref=str(ref), slot=slot, deadline=deadline, active=active, generating=self._generating()
        )
        return [a.result for a in await self._channel.ask(begin, Staged, left + GRACE_S)]

    async def _stage(self, body: bytes, ref: AdapterRef, slot: int, deadline: float) -> list[StageResult]:
        """All workers hold the version, verified, or none does."""
        results = await self._begin(body, ref, slot, deadline)
        refused = [r for r in results if not r.ok]
        if refused and refused[0].reason == Refusal.SLOT:
            raise self._slots.full(ref)  # a worker does not know what holds them
        if not refused and len({r.digest for r in results}) > 1:
            detail = "workers received different numbers"
            refused = [msgspec.structs.replace(results[0], reason=Refusal.HASH, detail=detail)]
        if refused:
            raise ManifestError(refused[0].reason, refused[0].detail)
        return results

    async def _again(self, body: bytes, ref: AdapterRef, deadline: float) -> PublishReply:
        """The reply of a version that serves already. Workers that are members take the bytes off the wire."""
        for result in await self._begin(body, ref, -1, deadline):
            if result.reason not in (Refusal.DUPLICATE, Refusal.WIRE):
                raise ManifestError(result.reason, result.detail)
        return self._replies[ref]

    async def _commit(self, ref: AdapterRef, slot: int, staged: list[StageResult], began: float) -> PublishReply:
        """Activate on all workers, and make room for the next version in the same turn between two steps."""
        staged_at = time.perf_counter()
        lora_id, self._next_id = self._next_id, self._next_id + 1
        retired = [self._forget(old) for old in self._slots.retirable(self._keep, ref.name)]
        try:
            stalls = await self._call("al_commit", lora_id, slot, retired)
        except PublishError:
            await self._call("al_retire", [lora_id, *retired])  # on no worker rather than on some
            raise
        phases = {name: 1e3 * max(getattr(r, f"{name}_s") for r in staged) for name in ("wire", "verify", "write")}
        phases["stage"], phases["commit"] = 1e3 * (staged_at - began), 1e3 * max(stalls)
        phases["commit_wait"] = 1e3 * (time.perf_counter() - staged_at)
        self._slots.activate(ref, lora_id)
        self._loras[ref] = LoRARequest(lora_name=str(ref), lora_int_id=lora_id, lora_path=f"xccl://{ref}")
        self._replies[ref] = PublishReply(ref=str(ref), digest=staged[0].digest, phases=phases)
        reached("server.activated")
        return self._replies[ref]

    async def _retire(self, refs: list[AdapterRef]) -> None:
        await self._call("al_retire", [self._forget(ref) for ref in refs])

    def _forget(self, ref: AdapterRef) -> int:
        """From here on nobody can ask for ``ref``; the id that the engine must forget, too."""
        resident = self._slots.retire(ref)
        del self._loras[ref], self._replies[ref]
        log.info("%s retired from slot %d", ref, resident.slot)
        return resident.lora_id

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """A method of the worker extension, between two model steps."""
        try:
            return await self._workers.collective_rpc(method, args=args)
        except Exception as e:  # fault boundary: vLLM raises what a worker raised, or that the engine has died
            raise PublishError(f"{method} failed in the engine: {e!r}; see the server's log") from e


def _deadline(timeout_s: float, came: float | None) -> float:
    """When whoever sent a request waits no longer, as this machine counts (time.monotonic)."""
    return (time.monotonic() if came is None else came) + timeout_s

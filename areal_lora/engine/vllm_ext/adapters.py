"""Serve adapter versions with vLLM: leases of requests, publishes of new versions (contracts C2, C3).

    publish(announcement)  reserve a slot
                           Begin to all workers ------> they receive, write, verify beside generation
                           all have answered <---------
                           al_commit on all workers     the only moment generation waits, < 2 ms
                           requests can name the version

``server.transaction`` decides each step; this module does it. A failure before the commit frees the slot, and
the previous versions keep serving.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from vllm.lora.request import LoRARequest

from areal_lora.engine.vllm_ext.worker_channel import Begin, CommandDone, Hurry, Join, Ping, Staged, WorkerChannel
from areal_lora.errors import PublishError
from areal_lora.processes.faults import reached
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import decode
from areal_lora.weight_sync.messages import PING_S, JoinRequest, PublishReply, StageResult
from areal_lora.weight_sync.server.slots import Resident
from areal_lora.weight_sync.server.transaction import (
    AwaitRelease,
    Commit,
    EndedPin,
    PublishTransaction,
    Retire,
    Stage,
    check_turn,
    late_turn,
)
from areal_lora.weight_sync.server.versions import ServedVersions

log = get_logger(__name__)

BASE = "base"  # the model name of the base without an adapter
GRACE_S = 10.0  # after a worker's own deadline; a worker that is silent for longer counts as dead
PINNED_S = 10.0  # a version stays this long after a pinned request, for the next request of the same evaluation


class Workers(Protocol):
    """Call a method on all workers of an engine (``AsyncLLM``)."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()
    ) -> list[Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLease:
    """The version a request runs on while it holds the lease. ``name`` is the full name of that version."""

    name: str
    ref: AdapterRef | None
    lora: LoRARequest | None


class ServedAdapters:
    """Serve and publish the versions of one server. Call it from the server's event loop only."""

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
        self._versions = ServedVersions(n_slots, keep=resident - 1)  # the incoming version needs the last slot
        self._lock = asyncio.Lock()  # serializes publishes, also those of different adapters
        self._released = asyncio.Event()
        self.on_active: Callable[[AdapterRef], Awaitable[None]] | None = None
        """Awaited when requests can name a version, before its publish is acknowledged."""

    @contextmanager
    def lease(self, model: str, *, pinned: bool = False, or_newer: bool = False) -> Iterator[VersionLease]:
        """Hold the version that ``model`` names; with ``or_newer`` the newest of its adapter, if not older.

        ``pinned`` keeps the version for ``PINNED_S`` after the lease, unless a publish finds no other slot or a
        pinned request names another version of the adapter: there is a slot for one pin. Raises
        UnknownVersionError and never falls back to the base.
        """
        if model == BASE:
            yield VersionLease(name=BASE, ref=None, lora=None)
            return
        resident = self._versions.acquire(model, pinned=pinned, or_newer=or_newer)
        self._released.set()  # a pin may have ended
        ref, name = resident.ref, str(resident.ref)
        lora = LoRARequest(lora_name=name, lora_int_id=resident.lora_id, lora_path=f"xccl://{name}")
        try:
            yield VersionLease(name=name, ref=ref, lora=lora)
        finally:
            self._versions.release(ref, time.monotonic() + PINNED_S if pinned else None)
            self._released.set()

    def active(self) -> list[AdapterRef]:
        return self._versions.slots.active()

    async def ping(self) -> None:
        """Ask every worker's background thread for a sign. Raises PublishError if one does not answer."""
        await self._channel.ask(Ping(), CommandDone, PING_S)

    async def hurry(self, ref: AdapterRef) -> None:
        """Have all workers write ``ref`` at full speed: its trainer waits. Raises PublishError."""
        await self._channel.ask(Hurry(ref=str(ref)), CommandDone, PING_S)

    async def join(self, request: JoinRequest, came: float | None = None) -> None:
        """Have all workers join the trainer's groups. Raises PublishError.

        The request's timeout counts from ``came`` (time.monotonic), its arrival at this server; None means now.
        """
        if len(request.ranks) != self._n_workers:
            raise PublishError(f"{len(request.ranks)} ranks for {self._n_workers} workers")
        deadline = _deadline(request.timeout_s, came)
        async with self._turn("a join", deadline):
            left = msgspec.structs.replace(request, timeout_s=max(deadline - time.monotonic(), 0.0))
            answers = await self._channel.ask(Join(request=left), CommandDone, left.timeout_s + GRACE_S)
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
            publish = PublishTransaction(self._versions, ref, deadline, time.monotonic())
            try:
                slot = await self._reserve(publish)
                staged = await self._stage(body, ref, slot, deadline)
                commit = publish.staged(staged, time.monotonic())
                if isinstance(commit, PublishReply):
                    return commit
                reply = publish.activated(commit, await self._commit(commit), time.monotonic())
            finally:
                publish.end()
            reached("server.activated")
            if self.on_active is not None:
                await self.on_active(ref)
        phases = " ".join(f"{k} {v:.1f} ms" for k, v in reply.phases.items())
        log.info("%s is live in slot %d: %s", ref, commit.slot, phases)
        return reply

    @asynccontextmanager
    async def _turn(self, what: str, deadline: float) -> AsyncIterator[None]:
        """Wait for the previous publish or join. Raises PublishError at the deadline (``late_turn``)."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._lock.acquire()
        except TimeoutError:
            raise late_turn(what) from None
        try:
            check_turn(what, deadline, time.monotonic())  # asyncio takes a free lock without checking the timeout
            yield
        finally:
            self._lock.release()

    async def retire(self, ref: AdapterRef) -> None:
        """Free the slot of a version. Raises UnknownVersionError; ValueError if it is in use or the newest."""
        async with self._lock:
            await self._forget([self._versions.retire(ref, time.monotonic())])

    async def _reserve(self, publish: PublishTransaction) -> int | None:
        """Reserve a slot, waiting for running requests if necessary; None: the workers must drain the bytes."""
        while True:
            self._released.clear()
            match publish.next_step(time.monotonic()):
                case Stage(slot=slot, refusal=refusal):
                    if refusal is not None:
                        log.warning("%s", refusal)
                    return slot
                case Retire(residents=residents):
                    await self._forget(residents)
                case EndedPin(ref=ref, refusal=refusal):
                    log.warning("%s; the pin on %s ends early", refusal, ref)
                case AwaitRelease(timeout_s=timeout_s):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._released.wait(), timeout_s)

    async def _stage(self, body: bytes, ref: AdapterRef, slot: int | None, deadline: float) -> list[StageResult]:
        """Stage on all workers and return their results."""
        begin = Begin(
            announcement=body,
            ref=str(ref),
            slot=-1 if slot is None else slot,
            deadline=deadline,
            active=tuple(map(str, self.active())),
            generating=self._generating(),
        )
        answers = await self._channel.ask(begin, Staged, deadline - time.monotonic() + GRACE_S)
        return [a.result for a in answers]

    async def _commit(self, commit: Commit) -> float:
        """Activate on all workers and retire old versions between two model steps; return the seconds taken."""
        _log_retired(commit.retired)
        try:
            stalls: list[float] = await self._call("al_commit", commit.lora_id, commit.slot, commit.retired_ids)
        except PublishError:
            await self._call("al_retire", commit.undo_ids)
            raise
        return max(stalls)

    async def _forget(self, retired: list[Resident]) -> None:
        _log_retired(retired)
        await self._call("al_retire", [r.lora_id for r in retired])

    async def _call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension, between two model steps."""
        try:
            return await self._workers.collective_rpc(method, args=args)
        except Exception as e:  # fault boundary: vLLM raises a worker's error, or reports that the engine has died
            raise PublishError(f"{method} failed in the engine: {e!r}; see the server's log") from e


def _log_retired(retired: list[Resident]) -> None:
    for resident in retired:
        log.info("%s retired from slot %d", resident.ref, resident.slot)


def _deadline(timeout_s: float, came: float | None) -> float:
    """Return the time at which the sender of a request stops waiting (time.monotonic)."""
    return (time.monotonic() if came is None else came) + timeout_s

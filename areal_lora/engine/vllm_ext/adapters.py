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
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from vllm.lora.request import LoRARequest

from areal_lora.engine.vllm_ext.worker_channel import Begin, CommandDone, Join, Ping, Staged, WorkerChannel
from areal_lora.errors import PublishError
from areal_lora.processes.faults import reached
from areal_lora.processes.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import decode
from areal_lora.weight_sync.messages import PING_S, JoinRequest, PublishReply, StageResult
from areal_lora.weight_sync.server.slots import Resident
from areal_lora.weight_sync.server.transaction import (
    Commit,
    EndedPin,
    PublishTransaction,
    Retire,
    Stage,
    Wait,
    check_turn,
    late_turn,
)
from areal_lora.weight_sync.server.versions import ServedVersions

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
class VersionLease:
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
        self._versions = ServedVersions(n_slots, keep=resident - 1)  # the incoming version needs the last slot
        self._lock = asyncio.Lock()  # publishes, also of different adapters, come one after the other
        self._released = asyncio.Event()
        self.on_active: Callable[[AdapterRef], Awaitable[None]] | None = None
        """Called when a version can be requested, before its publish is acknowledged."""

    @contextmanager
    def lease(self, model: str, *, pinned: bool = False, or_newer: bool = False) -> Iterator[VersionLease]:
        """Hold the version that ``model`` names; ``or_newer``: the newest of its adapter, if that is no older one.

        ``pinned`` keeps it for ``PINNED_S`` after that, unless a publish finds no other slot or another version of
        the adapter is asked for so: there is room for one. Raises UnknownVersionError, never falls back to the base.
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
        """Raises PublishError if a worker's background thread does not answer."""
        await self._channel.ask(Ping(), CommandDone, PING_S)

    async def join(self, request: JoinRequest, came: float | None = None) -> None:
        """Make all workers members of the trainer's groups. Raises PublishError.

        Its time counts from ``came`` (time.monotonic), when the request reached this server; now if that is None.
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
        """The whole transaction. Raises ManifestError (refused, nothing changed) or PublishError.

        The newest version again is acknowledged again: the trainer may not have heard the first time.
        The announcement's time counts from ``came``, like that of ``join``; what is not staged by then is dropped.
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
        """Wait for the request before. Raises PublishError at the deadline: whoever asked has given up by then.

        What was given up must not be done late. The next one would wait for it, until it is given up, too.
        """
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._lock.acquire()
        except TimeoutError:
            raise late_turn(what) from None
        try:
            check_turn(what, deadline, time.monotonic())  # a free lock is taken without a look at the time
            yield
        finally:
            self._lock.release()

    async def retire(self, ref: AdapterRef) -> None:
        """Free the slot of a version. Raises UnknownVersionError; ValueError if it is in use or the newest."""
        async with self._lock:
            await self._forget([self._versions.retire(ref, time.monotonic())])

    async def _reserve(self, publish: PublishTransaction) -> int | None:
        """A slot, waiting for running requests if necessary; None: the workers must drain the bytes."""
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
                    log.warning("%s; %s is given up although it is pinned", refusal, ref)
                case Wait(timeout_s=timeout_s):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._released.wait(), timeout_s)

    async def _stage(self, body: bytes, ref: AdapterRef, slot: int | None, deadline: float) -> list[StageResult]:
        """Every worker's result."""
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
        """Activate on all workers, and make room for the next version between the same two steps; seconds taken."""
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
        """A method of the worker extension, between two model steps."""
        try:
            return await self._workers.collective_rpc(method, args=args)
        except Exception as e:  # fault boundary: vLLM raises what a worker raised, or that the engine has died
            raise PublishError(f"{method} failed in the engine: {e!r}; see the server's log") from e


def _log_retired(retired: list[Resident]) -> None:
    for resident in retired:
        log.info("%s retired from slot %d", resident.ref, resident.slot)


def _deadline(timeout_s: float, came: float | None) -> float:
    """When whoever sent a request waits no longer, as this machine counts (time.monotonic)."""
    return (time.monotonic() if came is None else came) + timeout_s

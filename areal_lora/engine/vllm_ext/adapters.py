"""The versions a server serves: which slot, who uses them, and how a new one comes in (contracts C2, C3).

    publish(manifest)      reserve a slot (retiring old, unused versions)
                           al_begin on all workers ---> they receive, verify, write beside generation
                           all report "staged" <-----
                           al_commit on all workers     the only moment generation waits, < 2 ms
                           the name can be requested

Anything wrong before the commit gives the slot back; the versions before keep serving.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio
from vllm.lora.request import LoRARequest

from areal_lora.config.rendezvous import zmq_curve_keys
from areal_lora.engine.vllm_ext.worker_extension import REPORT_ROLE, Joined, Report, Staged
from areal_lora.errors import ManifestError, PublishError
from areal_lora.obs.log import get_logger
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.manifest import Refusal, decode
from areal_lora.weight_sync.slots import SlotTable
from areal_lora.weight_sync.transport import JoinRequest, PublishReply, StageResult

log = get_logger(__name__)

BASE = "base"  # the model name of the base without an adapter
GRACE_S = 10.0  # a worker's own deadline passes first; beyond this it is taken for dead

R = TypeVar("R", Joined, Staged)


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


class ReportSocket:
    """Receives what the workers' threads report; CURVE, loopback, a port of its own."""

    def __init__(self, secret: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq_curve_keys(secret, REPORT_ROLE)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    async def gather(self, kind: type[R], n_workers: int, ref: str | None, timeout_s: float) -> list[R]:
        """One report of every worker, in worker order. Raises PublishError if one does not come in time."""
        got: dict[int, R] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while len(got) < n_workers:
                    report = msgspec.msgpack.decode(await self._socket.recv(), type=Report)
                    if isinstance(report, kind) and (not isinstance(report, Staged) or report.result.ref == ref):
                        got[report.worker] = report
                    else:
                        log.warning("late report dropped: %s", report)
        except TimeoutError:
            missing = sorted(set(range(n_workers)) - got.keys())
            raise PublishError(f"workers {missing} silent for {timeout_s:.0f} s; restart the server") from None
        return [got[w] for w in range(n_workers)]

    def close(self) -> None:
        self._socket.close()


class ServedAdapters:
    """Slots, versions and publishes of one server. Lives on its event loop."""

    def __init__(
        self, workers: Workers, reports: ReportSocket, *, n_workers: int, n_slots: int, resident: int, deadline_s: float
    ) -> None:
        self._workers, self._reports = workers, reports
        self._n_workers, self._deadline_s = n_workers, deadline_s
        self._slots, self._keep = SlotTable(n_slots), resident - 1  # the incoming version needs the last one
        self._loras: dict[AdapterRef, LoRARequest] = {}
        self._next_id = 1
        self._lock = asyncio.Lock()
        self._released = asyncio.Event()

    @contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """Hold the version that ``model`` names. Raises UnknownVersionError, never falls back to the base."""
        if model == BASE:
            yield Lease(name=BASE, ref=None, lora=None)
            return
        ref = self._slots.resolve(model).ref
        self._slots.acquire(ref)
        try:
            yield Lease(name=str(ref), ref=ref, lora=self._loras[ref])
        finally:
            self._slots.release(ref)
            self._released.set()

    def active(self) -> list[AdapterRef]:
        return self._slots.active()

    async def join(self, request: JoinRequest) -> None:
        """Make all workers members of the trainer's groups. Raises PublishError."""
        if len(request.ranks) != self._n_workers:
            raise PublishError(f"{len(request.ranks)} ranks for {self._n_workers} workers")
        async with self._lock:
            await self._workers.collective_rpc("al_join", args=(msgspec.msgpack.encode(request),))
            reports = await self._reports.gather(Joined, self._n_workers, None, request.timeout_s + GRACE_S)
        errors = [f"worker {r.worker}: {r.error}" for r in reports if r.error]
        if errors:
            raise PublishError("; ".join(errors))

    async def publish(self, body: bytes) -> PublishReply:
        """The whole transaction. Raises ManifestError (refused, nothing changed) or PublishError."""
        ref = decode(body).ref
        async with self._lock:
            deadline = time.monotonic() + self._deadline_s
            slot = await self._reserve(ref, deadline)
            try:
                staged = await self._stage(body, ref, -1 if slot is None else slot, deadline)
            except (ManifestError, PublishError):
                # A worker that is late has passed its own deadline by now and writes no more.
                if slot is not None:
                    self._slots.abort(ref)
                raise
            if slot is None:
                raise PublishError(f"{ref} was staged without a slot")
            started = time.perf_counter()
            stall_s = await self._commit(ref, slot)
            self._activated(ref)
        phases = {name: 1e3 * max(getattr(r, f"{name}_s") for r in staged) for name in ("wire", "verify", "write")}
        phases |= {"commit": 1e3 * stall_s, "commit_wait": 1e3 * (time.perf_counter() - started)}
        log.info("%s is live in slot %d: %s", ref, slot, " ".join(f"{k} {v:.1f} ms" for k, v in phases.items()))
        return PublishReply(ref=str(ref), digest=staged[0].digest, phases=phases)

    async def retire(self, ref: AdapterRef) -> None:
        """Free the slot of a version. Raises UnknownVersionError; ValueError if it is in use or the newest."""
        async with self._lock:
            await self._retire(ref)

    async def _reserve(self, ref: AdapterRef, deadline: float) -> int | None:
        """A slot, waiting for running requests if need be; None if the version must be refused.

        The trainer already sends: without a slot the workers still take the bytes off the wire.
        """
        give_up = time.monotonic() + (deadline - time.monotonic()) / 2
        while True:
            for old in self._slots.retirable(self._keep):
                await self._retire(old)
            self._released.clear()
            try:
                return self._slots.reserve(ref)
            except ManifestError as e:
                left = give_up - time.monotonic()
                if e.reason == Refusal.SLOT and (spare := self._slots.retirable(1)):
                    await self._retire(spare[0])  # a straggler holds an older one: the oldest unused goes instead
                    continue
                if e.reason != Refusal.SLOT or left <= 0:
                    log.warning("%s", e)
                    return None
            try:
                await asyncio.wait_for(self._released.wait(), left)
            except TimeoutError:
                continue

    async def _stage(self, body: bytes, ref: AdapterRef, slot: int, deadline: float) -> list[StageResult]:
        left = deadline - time.monotonic()
        await self._workers.collective_rpc("al_begin", args=(body, str(ref), slot, left))
        reports = await self._reports.gather(Staged, self._n_workers, str(ref), left + GRACE_S)
        results = [r.result for r in reports]
        refused = [r for r in results if not r.ok]
        if not refused and len({r.digest for r in results}) > 1:
            detail = "workers received different numbers"
            refused = [msgspec.structs.replace(results[0], reason=Refusal.HASH, detail=detail)]
        if refused:
            await self._workers.collective_rpc("al_discard", args=(str(ref),))
            raise ManifestError(refused[0].reason, refused[0].detail)
        return results

    async def _commit(self, ref: AdapterRef, slot: int) -> float:
        """Seconds that generation waited."""
        return max(await self._workers.collective_rpc("al_commit", args=(self._next_id, slot)))

    def _activated(self, ref: AdapterRef) -> None:
        lora_id, self._next_id = self._next_id, self._next_id + 1
        self._slots.activate(ref, lora_id)
        self._loras[ref] = LoRARequest(lora_name=str(ref), lora_int_id=lora_id, lora_path=f"xccl://{ref}")

    async def _retire(self, ref: AdapterRef) -> None:
        resident = self._slots.retire(ref)
        del self._loras[ref]
        await self._workers.collective_rpc("al_retire", args=(resident.lora_id,))
        log.info("%s retired from slot %d", ref, resident.slot)

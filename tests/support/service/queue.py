"""A queue with the real file, writer and connection, and a trainer without a model that follows the desired state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from areal_lora.operations.protocol import Datum, Loss, Operation, OperationFailure, OptimStep, Pass
from areal_lora.run_folder.paths import RunFolder, read_desired
from areal_lora.run_folder.rendezvous import create_secret
from areal_lora.service.queue.client_sessions import AdapterRequest
from areal_lora.service.queue.placement import ObservedAdapter, RunObserver
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_rows import Quota
from areal_lora.service.queue.queue_store import Store, put_tenant
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.service.queue.requests import Answer, CreateModel, Load, Lora, ModelAction, Pending, Train
from areal_lora.types import AdapterPhase
from tests.support.operations.scripted_trainer import Disk, ScriptedTrainer

LORA = Lora(rank=4, alpha=32.0, target_modules=("linear_qkv",))
QUOTA = Quota(adapters=3, rank=8, weight=1.0, operations=99, body_kib=1, sequences=64, problems=9, workers=1, saved=4)
WAIT_S = 120.0


def tokens(*ids: int) -> Train:
    """A pass over one sequence."""
    weights = np.ones(len(ids) - 1, "<f4").tobytes()
    datum = Datum(tokens=np.array(ids, "<i4").tobytes(), weights=weights)
    return Train(what=Pass(data=(datum,), loss=Loss.CROSS_ENTROPY))


STEP = Train(what=OptimStep(lr=1e-3))


def accept(name: str, tenant: str, lora: Lora, quota: Quota) -> AdapterRequest:
    return AdapterRequest(name=name, rank=lora.rank, weight=1.0, settings={"rank": lora.rank})


@dataclass(slots=True)
class Town:
    """``now_s`` is the queue's clock. The trainer holds ``capacity`` adapters."""

    folder: RunFolder
    capacity: int = 4
    now_s: float = field(default_factory=time.time)
    seen: dict[str, ObservedAdapter] = field(default_factory=dict)
    trainer: ScriptedTrainer = field(init=False)
    queue: RequestQueue = field(init=False)
    writer: Writer = field(init=False)

    def follow(self) -> None:
        """Adapters join and leave the trainer as the desired state says."""
        wanted = [adapter.key for adapter in read_desired(self.folder).adapters]
        here = [key for key, seen in self.seen.items() if seen.phase is AdapterPhase.ACTIVE]
        for key in here:
            if key not in wanted:
                self.trainer.leave(key)
                self.seen[key] = ObservedAdapter(phase=AdapterPhase.DELETED)
                here = [other for other in here if other != key]
        for key in wanted:
            phase = self.seen[key].phase if key in self.seen else None
            if phase in (None, AdapterPhase.PENDING):
                if len(here) < self.capacity:
                    self.trainer.join(key)
                    self.seen[key] = ObservedAdapter(phase=AdapterPhase.ACTIVE)
                    here.append(key)
                else:
                    self.seen[key] = ObservedAdapter(phase=AdapterPhase.PENDING, reason="waits for a place")

    def phases(self) -> dict[str, AdapterPhase]:
        return {key: seen.phase for key, seen in self.seen.items() if seen.phase is not None}

    async def answer(self, tenant: str, request: str) -> Answer:
        found = await self.queue.outcome(tenant, request, WAIT_S)
        assert not isinstance(found, Pending), found
        return found

    async def model(self, tenant: str = "acme", session: str = "", seq: int = 0, load: Load | None = None) -> str:
        session = session or await self.queue.open_session(tenant)
        action = CreateModel(lora=None if load else LORA, load=load)
        request = await self.queue.create_model(tenant, session, seq, "print", action)
        await self.answer(tenant, request)
        return f"{session}:train:{seq}"

    async def asked(self, model: str, seq: int, action: ModelAction, tenant: str = "acme") -> Answer:
        return await self.answer(tenant, await self.queue.submit(tenant, model, seq, f"print {seq}", action))


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@asynccontextmanager
async def town(
    root: Path,
    *,
    capacity: int = 4,
    quota: Quota = QUOTA,
    fault: Callable[[Operation], OperationFailure | None] = lambda _: None,
    disk: Disk | None = None,
) -> AsyncIterator[Town]:
    folder = RunFolder(root)
    root.mkdir(parents=True, exist_ok=True)
    if not folder.secret.exists():
        create_secret(folder)
    it = Town(folder=folder, capacity=capacity)
    it.trainer = ScriptedTrainer(folder, fault)
    it.trainer.disk = disk or it.trainer.disk
    store = Store(folder.service_tables, "run")
    for tenant in ("acme", "bolt"):
        store.change(lambda tx, tenant=tenant: put_tenant(tx, tenant, quota), it.now_s)  # type: ignore[misc]
    it.writer = Writer(store, folder, it.phases)
    observed = RunObserver(folder, capacity=capacity)
    observed._seen = it.seen
    it.queue = RequestQueue(it.writer, folder, accept, observed, now_s=lambda: it.now_s)

    async def roster() -> None:
        while True:
            it.follow()
            await asyncio.sleep(0.02)

    following = asyncio.create_task(roster())
    try:
        async with it.queue:
            yield it
    finally:
        following.cancel()
        it.writer.close()
        it.trainer.close()

"""Latency of a client's optim_step while its checkpoints of 1 GB are written: ``python -m benchmarks.client_steps``.

The queue with its file, link, trainer loop and checkpoints are real. The engine is a toy that takes its step on
32 numbers, so that the times are those of everything but the arithmetic, and has a state of 1 GB: weights and both
moments, fp32. A step is requested when the pass before it is answered, and a pass a second after the step before it.
Milliseconds from request to answer, on a disk and on one whose renames take 5 s more. An argument is the folder of the
files.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from areal_lora.checkpoint.state import PARTS, Disk
from areal_lora.service.queue.placement import ObservedAdapter, Surroundings
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_store import Store, put_tenant
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.service.queue.requests import CreateModel, Pending
from areal_lora.types import AdapterPhase
from tests.support.operations.side import Side
from tests.support.service.queue import LORA, QUOTA, STEP, accept, tokens

STATE_BYTES, STEPS, PAUSE_S, SLOW_S, BEHIND = 1 << 30, 16, 1.0, 5.0, 64


class SlowDisk(Disk):
    def about_to(self, operation: str, path: Path) -> None:
        if operation == "rename" and path.name != "newest":
            time.sleep(SLOW_S)


async def measure(root: Path, disk: Disk) -> None:
    side = Side(root, "idle", disk=disk, max_behind=BEHIND)
    side.engine.padding = STATE_BYTES // 4 // len(PARTS)
    side.client.close()  # the queue takes its place
    store = Store(side.folder.service_tables, "run")
    store.change(lambda tx: put_tenant(tx, "acme", QUOTA), time.time())
    writer = Writer(store, side.folder, dict)
    active = ObservedAdapter(phase=AdapterPhase.ACTIVE)
    around = Surroundings(seen=lambda _: active, phases=dict, configured=frozenset(), capacity=4)
    async with RequestQueue(writer, side.folder, accept, around) as queue:

        async def answered(request: str) -> None:
            assert not isinstance(found := await queue.outcome("acme", request, 600.0), Pending), found

        session = await queue.open_session("acme")
        created = await queue.create_model("acme", session, 0, "p", CreateModel(lora=LORA))
        side.later.append(lambda: side.join(f"acme-{session}-0"))
        await answered(created)
        took = []
        for seq in range(1, 2 * STEPS, 2):
            await asyncio.sleep(PAUSE_S)
            for number, action in ((seq, tokens(1, 2, 3)), (seq + 1, STEP)):
                start = time.perf_counter()
                await answered(await queue.submit("acme", f"{session}:train:0", number, str(number), action))
            took.append((time.perf_counter() - start) * 1e3)
    p50, p99 = np.quantile(took, [0.5, 0.99])
    print(f"{type(disk).__name__:10}{len(took):6}{min(took):10.1f}{p50:10.1f}{p99:10.1f}", flush=True)
    side.close()
    writer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{'disk':10}{'steps':>6}{'min ms':>10}{'p50 ms':>10}{'p99 ms':>10}")
    for each in (Disk(), SlowDisk()):
        with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
            asyncio.run(measure(Path(made), each))

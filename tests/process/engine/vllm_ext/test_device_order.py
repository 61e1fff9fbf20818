"""A publish into a worker with a device, without one: real server, channel, worker thread, receiver and slot writer.

The device is a `RecordedLane`: its copies happen when the host waits for them, and not before. The broadcasts' library
is gloo behind a gate, inside which a call waits as NCCL's first one does while a communicator forms.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from areal_lora.engine.vllm_ext.worker import channel as ch
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret, read_secret
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import Payload
from areal_lora.weight_sync.link import backends
from areal_lora.weight_sync.link.backends import Backend, GroupSeat
from areal_lora.weight_sync.link.broadcast_groups import CPU, GroupListener
from areal_lora.weight_sync.manifest import encode, shard_keys
from areal_lora.weight_sync.messages import JoinRequest
from tests.support.lazy import Lazy
from tests.support.weight_sync.helpers import BASE, BUCKET_BYTES, RUN, packed, spec
from tests.support.weight_sync.recorded_lane import RecordedLane

weights = Lazy("areal_lora.engine.vllm_ext.compat.weights")
served_adapters = Lazy("areal_lora.engine.vllm_ext.server.adapters")

pytestmark = pytest.mark.slow  # importing vLLM

LONG_S = 80.0
SLOTS, RANK, WIDTH = 3, 4, 16
PROJECTIONS = tuple(f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qo")
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"


class Gate:
    """Holds calls of the broadcasts' library while it is closed."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()

    def close(self) -> None:
        self.open.clear()
        self.reached.clear()


class Gated:
    """gloo behind a gate."""

    def __init__(self, group: dist.ProcessGroup, gate: Gate) -> None:
        self._group, self._gate = group, gate
        self.abort = group.abort

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        self._gate.reached.set()
        assert self._gate.open.wait(LONG_S)
        return self._group.broadcast(tensors, options)


class Worker:
    """vLLM's worker as the extension sees it, with two projections, and the engine that calls it between two steps."""

    def __init__(self, folder: Path, ports: tuple[int, ...], calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.lora.model_manager import LRUCacheLoRAModelManager

        from areal_lora.engine.vllm_ext.compat.first_runner import FirstRunner
        from areal_lora.engine.vllm_ext.worker import extension, lora_install

        class Manager(LRUCacheLoRAModelManager):
            capacity = SLOTS

            def __init__(self) -> None:
                self.lora_config = SimpleNamespace(max_lora_rank=RANK)
                self.modules, self.lora_index_to_id = {}, [None] * SLOTS
                self._registered_adapters, self._active_adapters = {}, {}

        self.calls, self.manager = calls, Manager()
        self.stacks = {
            name + suffix: torch.full((SLOTS, 1, *shape), 9.0)
            for name in PROJECTIONS
            for suffix, shape in ((LORA_A, (RANK, WIDTH)), (LORA_B, (WIDTH, RANK)))
        }
        matrices = [weights.Matrix(name=n, stacked=t, index=0, start=0, full=WIDTH) for n, t in self.stacks.items()]
        lane = RecordedLane(calls, CPU)
        monkeypatch.setattr(extension.weights, "bound_matrices", lambda worker: matrices)
        monkeypatch.setattr(extension, "runner_of", lambda worker: FirstRunner(worker.model_runner))
        monkeypatch.setattr(lora_install, "lane_of", lambda device: lane)
        staged = extension._WorkerAdapters._staged

        def record(state: Any, result: Any) -> None:
            calls.append("staged")
            self.seen = {name: stack.clone() for name, stack in self.stacks.items()}
            staged(state, result)

        monkeypatch.setattr(extension._WorkerAdapters, "_staged", record)
        runner = SimpleNamespace(
            lora_manager=SimpleNamespace(_adapter_manager=self.manager, set_active_adapters=None),
            input_batch=SimpleNamespace(lora_id_to_request_ids={}),
        )
        setup = extension.WorkerSetup(
            run=RUN,
            run_folder=str(folder),
            base_digest=BASE,
            ports=ports,
            index=0,
            declared={},
            bind="127.0.0.1",
            cores=tuple(sorted(os.sched_getaffinity(0))),
            model="m",
            payload=Payload.UNMERGED,
            adapters=1,
        )
        self._extension = extension.AdapterWorkerExtension()
        self._extension._al_state = extension._WorkerAdapters(SimpleNamespace(model_runner=runner), 0, setup)

    async def collective_rpc(self, method: str, timeout: float | None = None, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(method)
        return [getattr(self._extension, method)(*args)]

    async def reset_prefix_cache(self) -> bool:
        return True

    def close(self) -> None:
        self._extension._al_state._receiver.close()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()

    def through(seat: GroupSeat) -> Backend:
        group = Gated(backends.gloo(seat).group, made)
        return Backend(group, RecordedLane([], CPU))

    monkeypatch.setitem(backends._BACKENDS, "gated", through)
    yield made
    made.open.set()


def test_a_slot_is_whole_before_it_is_staged_and_a_slow_library_keeps_no_worker_from_answering(
    gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.of(tmp_path)
    create_secret(folder)
    calls: list[str] = []
    asyncio.run(asyncio.wait_for(publish(gate, folder, tmp_path, calls, monkeypatch), 3 * LONG_S))


async def publish(gate: Gate, folder: RunFolder, path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    secret = read_secret(folder)
    channel = ch.WorkerChannel(secret)
    worker = Worker(path, channel.ports, calls, monkeypatch)
    await channel.connect(1)
    served = served_adapters.ServedAdapters(worker, channel, n_workers=1, n_slots=SLOTS, resident=SLOTS)

    async def answers_while_the_library_waits() -> None:
        await asyncio.to_thread(gate.reached.wait, LONG_S)
        assert gate.reached.is_set()
        try:
            for _ in range(3):
                await channel.call(ch.Ping(), LONG_S)
            assert not gate.open.is_set()
        finally:
            gate.open.set()

    listener = GroupListener(
        source=0,
        bind="127.0.0.1",
        receivers=["a worker"],
        bucket_bytes=BUCKET_BYTES,
        backend="gated",
        timeout_s=2 * LONG_S,
        secret=secret,
    )
    join = JoinRequest(run=RUN, endpoints=[listener.endpoint], ranks=[1], timeout_s=2 * LONG_S)
    group, _, _ = await asyncio.gather(
        asyncio.to_thread(listener.accept), served.join(join), answers_while_the_library_waits()
    )
    rng = np.random.default_rng(7)
    full = {n: torch.from_numpy(rng.standard_normal(t.shape[2:], dtype=np.float32)) for n, t in worker.stacks.items()}
    targets = spec(targets=("linear_qkv", "linear_proj"))
    shard, announcement = packed(list(full.items()), s=targets, version=0, keys=shard_keys(secret))
    gate.close()
    reply, _, _ = await asyncio.gather(
        served.publish(encode(announcement)),
        asyncio.to_thread(shard.send, group, time.monotonic() + LONG_S),
        answers_while_the_library_waits(),
    )
    *queued, flushed, staged, committed = calls
    assert (flushed, staged, committed) == ("synchronize", "staged", "al_commit")
    assert len(queued) >= 2, "the slot is cleared, then buckets are written"
    assert set(queued) == {"queue"}, "all of it beside the model, on the lane"
    assert reply.ref == "a@v0"
    assert list(served.versions.active) == [AdapterRef(name="a", version=0)]
    slot = worker.manager.lora_index_to_id.index(1)
    for name, tensor in full.items():
        want = tensor * 2.0 if name.endswith(LORA_B) else tensor
        assert torch.equal(worker.seen[name][slot, 0], want), "the device had not got it when it was said to be staged"
    worker.close()
    group.close()
    channel.close()

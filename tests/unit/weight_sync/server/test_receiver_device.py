"""Which device is current in the threads that work for a receiver, and the contexts that this leaves."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from areal_lora.types import ShardManifest
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup
from areal_lora.weight_sync.messages import SourceEndpoint, StageResult
from areal_lora.weight_sync.server import receiver as receiver_module
from areal_lora.weight_sync.server.receiver import AdapterReceiver
from tests.support.platforms.accelerator import Accelerator
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, ref

DEVICE = torch.device("cuda", 3)


def test_no_thread_of_a_receiver_stays_on_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads start on device 0. A stream that is left there would give each worker a context on it."""
    accelerator, devices, staged = Accelerator(monkeypatch), dict[str, int](), queue.SimpleQueue[StageResult]()

    def note(what: str) -> None:
        assert threading.current_thread() is not threading.main_thread()
        devices[what] = accelerator.current

    def join_group(endpoint: SourceEndpoint, *place: object) -> BroadcastGroup:
        note("join")
        return cast(BroadcastGroup, SimpleNamespace(detach=list))

    def on_staged(result: StageResult) -> None:
        note("stage")
        staged.put(result)

    def layout(self: AdapterReceiver, manifest: ShardManifest, layout: None) -> Any:
        note("start")
        raise RuntimeError("no version is needed here")

    monkeypatch.setattr(receiver_module, "join_group", join_group)
    monkeypatch.setattr(AdapterReceiver, "_layout", layout)
    receiver = AdapterReceiver(
        cast(Any, SimpleNamespace(on_device=False)),
        run=RUN,
        secret=SECRET,
        base_digest=BASE,
        on_staged=on_staged,
        device=DEVICE,
    )
    endpoint = SourceEndpoint(
        source=0, host="127.0.0.1", port=1, world=2, token="t", bucket_bytes=64, backend="nccl", library=""
    )
    manifest = ShardManifest(run=RUN, ref=ref(0), parent=None, base_digest=BASE, layout="none")
    with ThreadPoolExecutor(1) as commands, ThreadPoolExecutor(1) as joining:
        joining.submit(receiver.join, [endpoint], 1, 120.0).result(120)
        commands.submit(receiver.start, manifest, None, 0, 120.0).result(120)
        assert not staged.get(timeout=120).ok
        joining.submit(receiver.close).result(120)
    assert devices == {"join": 3, "start": 3, "stage": 3}
    assert accelerator.contexts == {3}

"""Many adapters on one base: mixed targets and ranks, attention on trainer rank 0 and the experts on two ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from areal_lora.config.models import WeightSyncConfig
from areal_lora.distributed.store import Exchange
from areal_lora.types import AdapterRef, AdapterSpec, AdapterStructure
from areal_lora.weight_sync import messages as tp
from areal_lora.weight_sync.layout import AdapterLayout, make_layout
from areal_lora.weight_sync.messages import ServerEndpoint, covered
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publish_job import PublishJob
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync import PATIENT
from tests.support.weight_sync.adapters import moe_shapes, pack_of
from tests.support.weight_sync.helpers import BASE, RUN, SECRET
from tests.support.weight_sync.memory_server import MemoryServer

ATTENTION, EXPERTS = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
TARGETS = (ATTENTION, EXPERTS, ATTENTION + EXPERTS)
_EVERY = moe_shapes(1)
MODULES = {
    name.removesuffix(".lora_A.weight"): (shape[1], _EVERY[name.replace("lora_A", "lora_B")][0])
    for name, shape in _EVERY.items()
    if ".lora_A." in name
}
Tensors = Mapping[str, torch.Tensor]


def made(i: int) -> AdapterSpec:
    """Adapter ``i``: the targets, rank and alpha go round."""
    return AdapterSpec(
        name=f"a{i}",
        base_model="m",
        rank=(2, 4)[i % 2],
        alpha=(4.0, 8.0, 16.0)[i // 6 % 3],
        target_modules=TARGETS[i % 3],
    )


def shapes(structure: AdapterStructure) -> dict[str, tuple[int, ...]]:
    every = moe_shapes(structure.rank)
    return {n: s for n, s in every.items() if covered(n.partition(".lora_")[0], structure.target_modules)}


def numbers(spec: AdapterSpec, version: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1000 * version + int(spec.name[1:]))
    return {name: torch.randn(shape, generator=g) for name, shape in shapes(spec).items()}


def layout(spec: AdapterSpec, ranks: int = 1) -> AdapterLayout:
    """The upper half of the experts on rank 1 where there are two; a rank without tensors sends nothing."""
    owned: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes(spec).items():
        owned.setdefault(int(".experts.2." in name or ".experts.3." in name) % ranks, []).append((name, shape))
    return make_layout(spec, "float32", owned, {})


class CountingServer(MemoryServer):
    """Counts joins, versions and refusals."""

    joins = versions = 0

    def __init__(self, *, n_slots: int, adapters: int, name: str = "server-0", **options: Any) -> None:
        self.refused: list[str] = []
        super().__init__(
            run=RUN,
            secret=SECRET,
            base_digest=BASE,
            shapes=shapes,
            n_slots=n_slots,
            adapters=adapters,
            keep=1,
            name=name,
            modules=MODULES,
            **{"layouts": adapters} | options,
        )

    def handle(self, method: str, path: str, header: str | None, body: bytes) -> tuple[int, bytes]:
        status, answer = super().handle(method, path, header, body)
        self.joins += path == tp.JOIN_PATH
        self.versions += (path, status) == (tp.PUBLISH_PATH, 200)
        if status == 409:
            self.refused.append(msgspec.msgpack.decode(answer, type=tp.RefusalReply).reason)
        return status, answer

    def assert_serves(self, spec: AdapterSpec, version: int) -> None:
        got = self.tensors(AdapterRef(name=spec.name, version=version))
        want = numbers(spec, version)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            scaled = tensor.numpy() * np.float32(spec.alpha / spec.rank if ".lora_B." in name else 1.0)
            np.testing.assert_array_equal(got[name], scaled)


class Adapters:
    """A publisher of one rank, or one rank of two."""

    def __init__(
        self,
        *servers: ServerEndpoint,
        exchange: Exchange | None = None,
        ranks: int = 1,
        watch: Any = None,
        **config: Any,
    ) -> None:
        self.active: list[Any] = []
        self.waits: list[tuple[AdapterRef, str]] = []
        self._ranks, exchange = ranks, exchange or SoloExchange()
        sync = WeightSyncConfig(**({"timeout_s": 150.0, "bucket_mib": 0.001} | config))
        leader = None
        if exchange.rank == 0:
            leader = Leader(
                run=RUN,
                secret=SECRET,
                servers=servers,
                config=sync,
                watch=watch,
                on_active=self.active.append,
                on_wait=lambda ref, held: self.waits.append((ref, held)),
            )
        self.rank = exchange.rank
        self.publisher = Publisher(run=RUN, config=sync, exchange=exchange, leader=leader, secret=SECRET)

    def publish(self, spec: AdapterSpec, version: int, tensors: Tensors | None = None) -> PublishJob:
        ref, laid = AdapterRef(name=spec.name, version=version), layout(spec, self._ranks)
        tensors = numbers(spec, version) if tensors is None else tensors
        return self.publisher.publish(ref, None, laid, pack_of(laid, self.rank, tensors), BASE, None)

    def __enter__(self) -> Adapters:
        return self

    def __exit__(self, *exc: object) -> None:
        self.publisher.close()


@contextmanager
def counted_formations() -> Iterator[list[int]]:
    form, formed = Publisher._form, list[int]()

    def counting(self: Publisher, *args: Any) -> None:
        formed.append(1)
        form(self, *args)

    Publisher._form = counting  # type: ignore[method-assign]
    try:
        yield formed
    finally:
        Publisher._form = form  # type: ignore[method-assign]


def train_many(pipe: Connection, rank: int, port: int, server: ServerEndpoint, n: int, rounds: int) -> None:
    """One of two ranks: publish ``rounds`` versions of ``n`` adapters, and send (attempts, formations)."""
    torch.set_num_threads(1)
    setattr(WeightSyncConfig, "ping_s", PATIENT)  # noqa: B010 (a property)
    store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=150))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    attempts = []
    with counted_formations() as formed, Adapters(server, exchange=Exchange(timeout_s=150.0), ranks=2) as adapters:
        for version in range(rounds):
            handles = [adapters.publish(made(i), version) for i in range(n)]
            attempts += [handle.wait().attempts for handle in handles]
    pipe.send((attempts, len(formed)))
    dist.destroy_process_group()

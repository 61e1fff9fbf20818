"""Trainer ranks and rollout servers as real processes, driven through pipes by the test."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import ArealLoraError, ManifestError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.exchange import GroupExchange
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.publisher import Publisher
from areal_lora.weight_sync.testing import MemoryServer

from .helpers import BASE, RUN, SECRET, ref, shapes_of, share, spec, values

PROBE_IDS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def scores(tensors: dict[str, np.ndarray] | None, ids: list[list[int]]) -> list[list[float]]:
    """A stand-in for a model: log-probabilities that depend on every lora_B (scaled) value."""
    lora_b = [t.astype(np.float64) for n, t in sorted((tensors or {}).items()) if ".lora_B." in n]
    shift = sum(float(np.abs(t).sum()) for t in lora_b)
    return [[0.0] + [-t * (1.0 + 0.01 * shift) for t in row[1:]] for row in ids]


def truth(version: int, seed: int) -> dict[str, torch.Tensor]:
    """The adapter of a version: version 0 has B = 0."""
    full = values(seed)
    share(full)
    if version == 0:
        full = {n: torch.zeros_like(t) if ".lora_B." in n else t for n, t in full.items()}
    return full


def serve(pipe: Connection, workers: int, deadline_s: float) -> None:
    torch.set_num_threads(1)
    server = MemoryServer(
        run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, workers=workers, deadline_s=deadline_s,
        declared={"a": spec()},
        score=lambda model, ids: scores(server.tensors(AdapterRef.parse(model)) if model else None, ids),
    )
    with server:
        pipe.send(server.endpoint)
        while (command := pipe.recv()) is not None:
            what, *args = command
            if what == "tensors":
                pipe.send(server.tensors(ref(args[0]), args[1]))
            elif what == "refs":
                pipe.send([str(r) for r in server.slots.active()])
            elif what == "writes":
                pipe.send(sum(w.writes for w in server.writers))
            elif what == "forget":  # the next publish finds writers that drop one expert's lora_B
                for w in server.writers:
                    write = w.write
                    w.write = lambda slot, name, t, scale, write=write: write(  # type: ignore[method-assign]
                        slot, name, t * 0 if ".lora_B." in name else t, scale
                    )
                pipe.send(None)


class FaultyPublisher(Publisher):
    """Flips one bit between hashing and sending."""

    flip = False

    def run(self, manifest: Any, probe: Any) -> Any:
        if self.flip and self._is_source:
            self._buffer.flat[5] ^= 64
        return super().run(manifest, probe)


def train(pipe: Connection, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    exchange = GroupExchange(timeout_s=60.0)
    publisher: FaultyPublisher | None = None
    while (command := pipe.recv()) is not None:
        what, *args = command
        began = time.monotonic()
        try:
            if what == "open":
                sources, servers, deadline_s = args
                publisher = FaultyPublisher(
                    run=RUN, sources=sources, rank=rank, servers=servers, secret=SECRET, exchange=exchange,
                    config=WeightSyncConfig(bucket_mib=0.0002, deadline_s=deadline_s, probe_tolerance=1e-6),
                )
                publisher.connect()
                answer: Any = None
            else:
                assert publisher is not None
                version, seed, fault = args
                answer = publish(publisher, rank, version, seed, fault)
            pipe.send(("ok", answer, time.monotonic() - began))
        except ArealLoraError as e:
            reason = e.reason if isinstance(e, ManifestError) else ""
            pipe.send((type(e).__name__, (reason, str(e)), time.monotonic() - began))
    dist.destroy_process_group()


def publish(publisher: FaultyPublisher, rank: int, version: int, seed: int, fault: str) -> Any:
    full = truth(version, seed)
    scaled = {n: t.numpy() * np.float32(2.0) for n, t in full.items() if ".lora_B." in n}
    probe = ProbeExpectation(token_ids=PROBE_IDS, b_nonzero=version > 0, logprobs=scores(scaled, PROBE_IDS))
    if fault == "NaN" and rank == 1:
        full["model.layers.1.mlp.experts.3.up_proj.lora_B.weight"][0, 0] = float("nan")
    owned, aliases = share(full)
    mine = owned_by(rank, publisher, owned)
    names = {n for n, _ in mine}
    if fault == "missing layer" and rank == 1:
        mine, names = [], set()
    if fault == "owned twice":
        mine = mine + [p for p in owned if p[0] not in names][:1] if rank == 1 else mine
    publisher.flip = fault == "flipped bit" and rank == 1
    handle = publisher.publish(
        ref(version), ref(version - 1) if version else None, spec(alpha=16.0) if fault == "wrong alpha" else spec(),
        mine, {a: w for a, w in aliases.items() if w in names}, BASE, probe if rank == 0 else None,
    )
    for _, t in mine:
        t.fill_(7.0)  # the trainer goes on: what is published must be a copy
    report = handle.join()
    assert handle.join() == report
    return report


def owned_by(rank: int, publisher: FaultyPublisher, owned: list[tuple[str, torch.Tensor]]) -> list[Any]:
    """Layer l on rank l, or everything on the only source."""
    if not publisher._is_source:
        return []
    if publisher.sources == (rank,):
        return owned
    return [(n, t) for n, t in owned if f".layers.{rank}." in n]


@dataclass
class Child:
    process: Any
    pipe: Connection

    def ask(self, *command: Any, timeout_s: float = 60.0) -> Any:
        self.pipe.send(command)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = 60.0) -> Any:
        assert self.pipe.poll(timeout_s), f"{self.process.name} did not answer"
        return self.pipe.recv()


def start(target: Any, *args: Any) -> Child:
    context = mp.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), name=f"{target.__name__}{args[0]}", daemon=True)
    process.start()
    theirs.close()
    return Child(process, mine)

"""Trainer ranks and rollout servers as real processes, driven through pipes by the test."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from areal_lora.config.models import WeightSyncConfig
from areal_lora.distributed.store import Exchange
from areal_lora.errors import ArealLoraError, ManifestError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import AdapterLayout, make_layout
from areal_lora.weight_sync.link import broadcast_groups
from areal_lora.weight_sync.link.backends import register_backend
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.server.receiver import AdapterReceiver
from areal_lora.weight_sync.server.transaction import PublishTransaction
from areal_lora.weight_sync.trainer.gathering import PlaceGather
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publish_job import PackedShard
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.clocks import wait_until
from tests.support.distributed.spawn import forking
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync import PATIENT, SOCKETS
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, ref, shapes_of, share, spec, values
from tests.support.weight_sync.memory_server import MemoryServer

PROBE_IDS = [[3, 1, 4, 1, 5], [9, 2, 6]]
LONG_S = 150.0
BUCKET_MIB = 0.0004


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


def serve(pipe: Connection, name: str, workers: int, host: str = "127.0.0.1") -> None:
    torch.set_num_threads(1)
    leaving = threading.Event()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})  # in all threads, or any of them would take it
    server = MemoryServer(
        run=RUN,
        secret=SECRET,
        base_digest=BASE,
        shapes=shapes_of,
        workers=workers,
        declared={"a": spec()},
        name=name,
        host=host,
        leaving=leaving.is_set,
        score=lambda model, ids: scores(server.tensors(AdapterRef.parse(model)) if model else None, ids),
    )
    writers, going, activated = server.writers, threading.Event(), PublishTransaction.activated
    going.set()
    PublishTransaction.activated = lambda *args: (going.wait(), activated(*args))[1]  # type: ignore[method-assign]
    with server:
        pipe.send(server.endpoint)
        while (command := pipe.recv()) is not None:
            what, *args = command
            if what == "tensors":
                pipe.send(server.tensors(ref(args[0]), args[1]))
            elif what == "refs":
                pipe.send([str(r) for r in sorted(server.held.active)])
            elif what == "pause":  # in the middle of the next transfer, for a signal to arrive
                signal.sigtimedwait({signal.SIGCONT}, 0)
                writers[0].on_write = partial(pause, pipe, itertools.count())
                pipe.send(None)  # from now on: a transfer that begins earlier may end without the pause
            elif what == "die":
                die(*args)
                pipe.send(None)
            elif what == "hang":  # activations from now on do not end before "continue"
                going.clear()
                pipe.send(None)
            elif what == "continue":
                going.set()
                pipe.send(None)
            elif what == "leave":
                leaving.set()
                pipe.send(None)
            elif what == "forget":  # versions from now on lose their lora_B
                for w in writers:
                    w.flush = lambda slot, w=w: forget(w.slots[slot])  # type: ignore[method-assign]
                pipe.send(None)


def die(join: int, moment: str) -> None:
    """Have this process be killed in its ``join``-th join: the moments are in the order of `broadcast_groups`."""
    joins, proceed = itertools.count(1), AdapterReceiver.join

    def killed(*args: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    def joined(*args: Any) -> None:
        if next(joins) == join:
            match moment:
                case "invited":
                    killed()
                case "connecting":
                    broadcast_groups.CurveStore = killed  # type: ignore[assignment,misc]
                case "signed in":
                    register_backend(SOCKETS, killed)
        proceed(*args)

    AdapterReceiver.join = joined  # type: ignore[method-assign]


def pause(pipe: Connection, buckets: Iterator[int]) -> None:
    """In the middle of a transfer, until this process is killed or, stopped, continues."""
    if next(buckets) == 2:
        pipe.send("midway")
        signal.sigtimedwait({signal.SIGCONT}, LONG_S)


def forget(tensors: dict[str, np.ndarray]) -> None:
    for name, tensor in tensors.items():
        if ".lora_B." in name:
            tensor[:] = 0.0


class Watch:
    """Servers that the test says are there, in a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def show(self, servers: Iterable[ServerEndpoint]) -> None:
        whole = self._path.with_suffix(".new")
        whole.write_bytes(msgspec.msgpack.encode(list(servers)))
        whole.replace(self._path)

    def present(self) -> list[ServerEndpoint]:
        return msgspec.msgpack.decode(self._path.read_bytes(), type=list[ServerEndpoint])


class Rank:
    """One trainer rank."""

    def __init__(self, rank: int, watch: Watch) -> None:
        self.rank, self.watch = rank, watch
        self.exchange = Exchange(timeout_s=LONG_S)
        self.active: list[Any] = []
        self.announce_s = 0.0  # how long the controller lets itself be waited for
        self.publisher: Publisher | None = None
        self.leader: Leader | None = None

    def announce(self, active: Any) -> None:
        time.sleep(self.announce_s)
        self.active.append(active)

    def announce_slowly(self, seconds: float) -> None:
        self.announce_s = seconds

    def open(
        self,
        sources: tuple[int, ...],
        servers: list[ServerEndpoint],
        config: dict[str, Any],
        backend: str,
        places: tuple[int, ...] = (),
    ) -> None:
        if self.publisher is not None:
            self.publisher.close()
        self.sources = sources
        sync = WeightSyncConfig(**({"bucket_mib": BUCKET_MIB} | config))
        self.leader = None
        if self.rank == 0:
            self.leader = Leader(
                run=RUN,
                secret=SECRET,
                servers=servers,
                config=sync,
                tolerance=1e-6,
                watch=self.watch,
                on_active=self.announce,
            )
        self.publisher = Publisher(
            run=RUN,
            config=sync,
            exchange=self.exchange,
            leader=self.leader,
            secret=SECRET,
            backend=backend,
            gather=PlaceGather(places, self.rank, torch.device("cpu")) if places else None,
        )

    def has_group(self) -> bool:
        assert self.publisher is not None
        return self.publisher._group is not None

    def reads(self) -> bool:
        """Whether the receivers of this rank's group read its memory."""
        assert self.publisher is not None
        return self.publisher._group is not None and self.publisher._group.same_host

    def changed(self) -> bool:
        assert self.publisher is not None
        return self.publisher.changed()

    def newcomers(self) -> bool:
        assert self.leader is not None
        return bool(self.leader.roster.available())

    def last_active(self) -> Any:
        return self.active[-1] if self.active else None

    def again(self) -> Any:
        assert self.publisher is not None
        return self.publisher.again("a").wait()

    def publish(self, version: int, seed: int, fault: str) -> Any:
        assert self.publisher is not None
        full = truth(version, seed)
        scaled = {n: t.numpy() * np.float32(2.0) for n, t in full.items() if ".lora_B." in n}
        probe = ProbeExpectation(token_ids=PROBE_IDS, base=scores(None, PROBE_IDS), logprobs=scores(scaled, PROBE_IDS))
        if fault == "NaN" and self.rank == 1:
            full["model.layers.1.mlp.experts.3.up_proj.lora_B.weight"][0, 0] = float("nan")
        layout = layout_of(full, self.sources, fault)
        told = ref(version + 1) if fault == "another version" and self.rank == 1 else ref(version)
        with flipped_bit(fault == "flipped bit" and self.rank == 1):
            handle = self.publisher.publish(
                told,
                ref(version - 1) if version else None,
                layout,
                pack_of(layout, self.rank, full),
                BASE,
                probe if self.rank == 0 else None,
            )
            for t in full.values():
                t.fill_(7.0)  # the trainer goes on: what is published must be a copy
            report = handle.wait()
        assert handle.wait() == report
        return report


def layout_of(full: dict[str, torch.Tensor], sources: tuple[int, ...], fault: str = "") -> AdapterLayout:
    """Layer l on rank l, or everything on the only source."""
    owned, aliases = share(full)
    if fault == "missing layer":
        owned = [(n, t) for n, t in owned if ".layers.1." not in n]
        aliases = {a: w for a, w in aliases.items() if ".layers.1." not in a}
    shapes = {
        source: [(n, tuple(t.shape)) for n, t in owned if len(sources) == 1 or f".layers.{source}." in n]
        for source in sources
    }
    return make_layout(spec(alpha=16.0) if fault == "wrong alpha" else spec(), "float32", shapes, aliases)


@contextmanager
def flipped_bit(wanted: bool) -> Iterator[None]:
    """Flip one bit between fingerprinting and sending."""
    send = PackedShard.send

    def corrupt(self: PackedShard, group: Any, deadline: float) -> None:
        self._wait(len(self.shard.tensors), True, deadline)
        self.flat[5] ^= 64
        send(self, group, deadline)

    if wanted:
        PackedShard.send = corrupt  # type: ignore[method-assign]
    try:
        yield
    finally:
        PackedShard.send = send  # type: ignore[method-assign]


def train(pipe: Connection, rank: int, world: int, port: int, watch: str) -> None:
    torch.set_num_threads(1)
    setattr(WeightSyncConfig, "ping_s", PATIENT)  # noqa: B010 (a property)
    store = dist.TCPStore("127.0.0.1", port, world, False, timedelta(seconds=LONG_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    me = Rank(rank, Watch(watch))
    while (command := pipe.recv()) is not None:
        what, *args = command
        began = time.monotonic()
        try:
            answer = getattr(me, what)(*args)
            pipe.send(("ok", answer, time.monotonic() - began))
        except ArealLoraError as e:
            reason = e.reason if isinstance(e, ManifestError) else ""
            pipe.send((type(e).__name__, (reason, str(e)), time.monotonic() - began))
    dist.destroy_process_group()


@dataclass
class Child:
    process: Any
    pipe: Connection

    def ask(self, *command: Any, timeout_s: float = LONG_S) -> Any:
        self.pipe.send(command)
        return self.answer(timeout_s)

    def answer(self, timeout_s: float = LONG_S) -> Any:
        assert self.pipe.poll(timeout_s), f"{self.process.name} did not answer"
        return self.pipe.recv()


def start(target: Any, *args: Any) -> Child:
    context = forking()
    mine, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), name=f"{target.__name__}{args[0]}", daemon=True)
    process.start()
    theirs.close()
    return Child(process, mine)


def names(*numbers: int) -> list[str]:
    return [f"server-{n}" for n in numbers]


class Tree:
    """A trainer in this process, server n at 127.0.0.(n + 2) with one worker unless ``workers`` has another number.

    Counts which servers are told to connect, and how long groups take to form. ``most`` is that of `relay_tree`.
    """

    def __init__(
        self,
        numbers: Iterable[int],
        workers: Mapping[int, int] = MappingProxyType({}),
        *,
        most: int,
        timeout_s: float = LONG_S,
    ) -> None:
        self.servers: dict[str, Child] = {}
        self.endpoints: dict[str, ServerEndpoint] = {}
        self._workers = workers
        for n in numbers:
            self.start(n)
        config = WeightSyncConfig(timeout_s=timeout_s, bucket_mib=BUCKET_MIB)
        leader = Leader(
            run=RUN,
            secret=SECRET,
            servers=self.endpoints.values(),
            config=config,
            tolerance=1e-6,
            watch=self,
            most=most,
        )
        self.leader, self.told, self.formed_s = leader, list[set[str]](), list[float]()
        join, await_joins, began_s = leader._fleet.join, leader.await_joins, 0.0

        def counted(*args):
            nonlocal began_s
            began_s = time.monotonic()
            posts = join(*args)
            self.told.append({server.name for server in posts})
            return posts

        def timed() -> None:
            await_joins()
            self.formed_s.append(time.monotonic() - began_s)

        leader._fleet.join, leader.await_joins = counted, timed  # type: ignore[method-assign]
        self.publisher = Publisher(
            run=RUN, config=config, exchange=SoloExchange(), secret=SECRET, leader=leader, backend=SOCKETS
        )
        self.version = -1

    def present(self) -> list[ServerEndpoint]:
        return list(self.endpoints.values())

    def start(self, n: int) -> None:
        name = f"server-{n}"
        self.servers[name] = start(serve, name, self._workers.get(n, 1), f"127.0.0.{n + 2}")
        self.endpoints[name] = self.servers[name].answer()

    def joins(self, *numbers: int) -> None:
        for n in numbers:
            self.start(n)
        wait_until(lambda: {s.name for s in self.leader.roster.available()} == set(names(*numbers)), what="joining")

    def begin(self):
        self.version += 1
        self.told.clear()
        full = truth(self.version, self.version)
        scaled = {n: t.numpy() * np.float32(2.0) for n, t in full.items() if ".lora_B." in n}
        logprobs, base = scores(scaled, PROBE_IDS), scores(None, PROBE_IDS)
        probe = ProbeExpectation(token_ids=PROBE_IDS, base=base, logprobs=logprobs)
        layout = layout_of(full, (0,))
        parent = ref(self.version - 1) if self.version else None
        return self.publisher.publish(ref(self.version), parent, layout, pack_of(layout, 0, full), BASE, probe)

    def end(self, job, dead: Collection[str] = ()):
        """The report; every server that it names has every tensor bit for bit, but those that were killed."""
        report, want = job.wait(), truth(self.version, self.version)
        for server in (server for server in report.servers if server.name not in dead):
            for worker in range(server.workers):
                got = self.servers[server.name].ask("tensors", self.version, worker)
                assert got.keys() == want.keys()
                for name, tensor in want.items():
                    scaled = tensor.numpy() * np.float32(2.0 if ".lora_B." in name else 1.0)
                    np.testing.assert_array_equal(got[name].view(np.uint32), scaled.view(np.uint32))
        return report

    def killed(self, name: str):
        """The report of a version in the middle of whose transfer ``name`` is killed."""
        server = self.servers[name]
        server.ask("pause")
        job = self.begin()
        assert server.answer() == "midway"
        os.kill(server.process.pid, signal.SIGKILL)
        report = self.end(job)
        del self.endpoints[name]
        assert list(report.lost) == [name]
        assert {s.name for s in report.servers} == set(self.endpoints)
        return report

    def groups(self) -> list[tuple[str | None, list[str]]]:
        return [(g.relay.name if g.relay else None, [s.name for s in g.members]) for g in self.leader._tree]

    def close(self) -> None:
        self.publisher.close()
        for server in self.servers.values():
            server.process.kill()
            server.process.join(120)

"""A run without models, its gateway, and machines elsewhere that serve in it; everything between them is real HTTP.

A publisher sends versions to a server in the run and to remote ones; a controller samples from both. A machine may
have a host of its own: ``python -m tests.support.engine.vllm_ext.remote_world URL FOLDER WIDTH``, with the token in the
first line of its input; it leaves at the end of that.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from safetensors.numpy import save_file
from starlette.datastructures import QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lora.config.models import Config, WeightSyncConfig
from areal_lora.config.sections.run import RemoteConfig
from areal_lora.engine.vllm_ext.remote.remote_gateway import RemoteGateway
from areal_lora.engine.vllm_ext.remote.remote_seat import RemoteSettings
from areal_lora.engine.vllm_ext.remote.remote_server import GatewayClient, RemoteServer
from areal_lora.network.http_server import HttpServer
from areal_lora.network.tls import Plane, bearer_key
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret, publish_endpoint, read_secret
from areal_lora.types import AdapterRef, AdapterStructure
from areal_lora.weight_sync.manifest import base_digest, expanded, shard_keys
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer.decisions import PublishReport
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.membership import RendezvousWatch
from areal_lora.weight_sync.trainer.publish_job import PublishJob
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, config
from tests.support.rollout.running import Loop
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import moe_shapes, pack_of
from tests.support.weight_sync.helpers import layout_of, ref, share, spec, values
from tests.support.weight_sync.memory_server import MemoryServer

RUN = "t"


class Damage:
    """The gateway's app; ``left`` shards more have a byte changed on their way.

    The next one ends after ``cut_at`` bytes, if set. Shards were
    requested from the bytes ``starts`` on and answered with ``statuses``; ``nbytes`` were sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app, self.left, self.nbytes = app, 0, 0
        self.cut_at: int | None = None
        self.starts, self.statuses = list[int](), list[int]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "/shard/" not in scope.get("path", ""):
            await self._app(scope, receive, send)
            return
        self.starts.append(int(QueryParams(scope["query_string"])["at"]))
        wrong, self.left = self.left > 0, max(0, self.left - 1)
        room, self.cut_at = self.cut_at, None

        async def changed(message: Message) -> None:
            nonlocal wrong, room
            if message["type"] == "http.response.start":
                self.statuses.append(message["status"])
            body = bytearray(message.get("body", b""))
            self.nbytes += len(body)
            if wrong and body:
                body[len(body) // 2] ^= 1
                wrong = False
            if room is not None and message["type"] == "http.response.body":
                await send(message | {"body": bytes(body[:room]), "more_body": True})
                room -= len(body[:room])
                if not room:
                    raise ConnectionAbortedError("the line is cut")
                return
            await send(message | {"body": bytes(body)} if body else message)

        await self._app(scope, receive, changed)


class Line:
    """A machine's TCP connections to a port: bytes take ``delay_s`` each way; while ``dead`` none arrive."""

    def __init__(self, target: int, delay_s: float) -> None:
        self._target, self._delay_s, self.dead = target, delay_s, False

    async def start(self) -> int:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.dead:
                    loop.call_later(self._delay_s, writer.write, data)
        loop.call_later(self._delay_s, writer.close)


def sizes(width: int) -> dict[str, int]:
    """Of modules with ``width`` inputs and outputs, or half of that within experts."""
    return {"hidden": width, "ffn": width // 2}


def serving(stack: ExitStack, loop: Loop, width: int, **how: Any) -> tuple[MemoryServer, FakeServer]:
    """What a machine serves, until the end of ``stack``; its data plane is in ``loop``."""

    def shapes(s: AdapterStructure) -> dict[str, tuple[int, ...]]:
        return moe_shapes(s.rank, **sizes(width))

    def score(model: str | None, ids: list[list[int]]) -> list[list[float]]:
        return [[0.0] + [-1.0 if model else -2.0] * (len(row) - 1) for row in ids]

    memory = MemoryServer(run=RUN, shapes=shapes, score=score, n_slots=6, keep=4, **how)
    stack.enter_context(memory)
    held: Any = Held(memory)
    data = FakeServer(models=held)
    loop.run(data.__aenter__())
    stack.callback(lambda: loop.run(data.__aexit__()))
    return memory, data


class Held:
    """What a `MemoryServer` serves, as the models of a `FakeServer`."""

    def __init__(self, memory: MemoryServer) -> None:
        self._memory = memory

    def __contains__(self, model: str) -> bool:
        return AdapterRef.parse(model) in self._memory.held.active


@dataclass
class Machine:
    """A server elsewhere; ``serving`` is its stay in the run."""

    memory: MemoryServer
    data: FakeServer
    serving: Future[None]
    line: Line

    def leave(self) -> None:
        self.serving.cancel()

    def vanish(self) -> None:
        """As a machine that is taken away: no connection ends, and nothing arrives."""
        self.line.dead = True


@dataclass
class World:
    """Use as a context manager. The gateway is at ``host``, adapters are of ``rank`` and ``width``."""

    folder: RunFolder
    config: Config
    delay_s: float = 0.0
    timeout_s: float = 60.0
    host: str = "127.0.0.1"
    rank: int = 4
    width: int = 16
    on_active: Callable[[PublishReport], None] = lambda _: None
    reports: list[PublishReport] = field(default_factory=list)
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> World:
        self.secret, self.base = read_secret(self.folder), base_digest(self.config.model.folder)
        self.token = bearer_key(self.secret, Plane.REMOTE)
        self._loop = Loop(uvloop.new_event_loop())  # the gateway's
        self._stack.callback(self._loop.close)
        self._numbers = itertools.count()
        sock = socket.create_server((self.host, 0))

        async def start() -> None:
            self.gateway = RemoteGateway(self.config, self.folder)
            self.damage = Damage(self.gateway.app())
            self._http = [asyncio.ensure_future(HttpServer(self.damage, sock, None).serve())]
            self._http.append(asyncio.ensure_future(self.gateway.watch()))

        self._loop.run(start())
        self._port = sock.getsockname()[1]
        self.url = f"http://{self.host}:{self._port}"
        how = {"keys": shard_keys(self.secret), "secret": self.secret, "base_digest": self.base}
        self.local, self.local_data = serving(self._stack, self._loop, self.width, **how)
        self.publisher = self._publisher()
        self._stack.callback(self.publisher.close)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _publisher(self) -> Publisher:
        def active(report: PublishReport) -> None:
            self.reports.append(report)
            self.on_active(report)

        config = WeightSyncConfig(timeout_s=self.timeout_s, bucket_mib=self.width / 16000)
        endpoint = msgspec.structs.replace(self.local.endpoint, data_port=self.local_data.port)
        leader = Leader(
            run=RUN,
            secret=self.secret,
            servers=[endpoint],
            config=config,
            watch=RendezvousWatch(self.folder, workers=3),  # not that of remote ones
            on_active=active,
        )
        return Publisher(run=RUN, config=config, exchange=SoloExchange(), secret=self.secret, leader=leader)

    def publish(self, version: int) -> PublishJob:
        owned, aliases = share(values(version, self.rank, **sizes(self.width)))
        layout = layout_of(owned, aliases, s=spec(self.rank))
        probe = ProbeExpectation(token_ids=[[1, 2, 3]], logprobs=[[0.0, -1.0, -1.0]], base=[[0.0, -2.0, -2.0]])
        pack = pack_of(layout, 0, dict(owned))
        return self.publisher.publish(ref(version, NAME), None, layout, pack, self.base, probe)

    def lose_all(self) -> None:
        """As after a restart of the gateway."""

        async def lose() -> None:
            for seat in list(self.gateway.seats.values()):
                self.gateway._end(seat, "is lost")

        self._loop.run(lose())

    def end(self) -> None:
        """As the gateway at the end of the run."""
        self._loop.run(self.gateway.end())

    def settings(self) -> RemoteSettings:
        """What the gateway gives to a remote server."""
        return settings_of(self.url, self.token)

    def machine(self, root: Path) -> Machine:
        """A machine whose server joins the run. It has nothing of the run but URL and token."""
        loop, line = Loop(), Line(self._port, self.delay_s)
        url = f"http://127.0.0.1:{self._loop.run(line.start())}"
        folder = RunFolder(root / f"machine-{next(self._numbers)}" / RUN)
        memory, data, stay = joining(self._stack, loop, self._loop, folder, url, self.token, self.width)
        self._stack.callback(setattr, line, "dead", False)
        return Machine(memory, data, stay, line)


def settings_of(url: str, token: str) -> RemoteSettings:
    async def get() -> RemoteSettings:
        async with GatewayClient(url, token) as gateway:
            return await gateway.get("settings", RemoteSettings)

    return asyncio.run(get())


def joining(
    stack: ExitStack, loop: Loop, data_loop: Loop, folder: RunFolder, url: str, token: str, width: int
) -> tuple[MemoryServer, FakeServer, Future[None]]:
    """A server that joins the run at ``url`` from ``loop``: its planes, and its stay there."""
    folder.path.mkdir(parents=True)
    create_secret(folder)
    given = settings_of(url, token)
    how = {"keys": expanded(given.shard_keys), "secret": read_secret(folder), "base_digest": given.base_digest}
    memory, data = serving(stack, data_loop, width, **how)
    stack.callback(loop.close)  # before its server, which waits for requests
    publish_endpoint(folder, "server", 0, {"data": data.port, "admin": memory.endpoint.admin_port}, tls=["admin"])

    async def serve() -> None:
        async with GatewayClient(url, token) as gateway:
            await RemoteServer(gateway, folder, given, 1).serve()

    return memory, data, asyncio.run_coroutine_threadsafe(serve(), loop.loop)


def equal(one: MemoryServer, other: MemoryServer, version: int) -> bool:
    """Whether both serve the same numbers as a version."""
    mine, its = one.tensors(ref(version, NAME)), other.tensors(ref(version, NAME))
    return mine.keys() == its.keys() and all(np.array_equal(mine[name], its[name]) for name in mine)


def remote_run(root: Path, store: str | None = None, **how: Any) -> World:
    """A run in ``root`` that nothing else uses; its versions go through ``store`` if given. ``how`` are its fields."""
    folder = RunFolder(root / RUN)
    folder.path.mkdir()
    create_secret(folder)
    made = config(str(base_folder(root / "model")))
    rollout = made.rollout.model_copy(update={"remote": RemoteConfig(store=store)})
    return World(folder, made.model_copy(update={"rollout": rollout}), **how)


def base_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    save_file({"w": np.zeros(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def main(url: str, folder: str, width: str) -> None:
    token, loop, data_loop = sys.stdin.readline().strip(), Loop(), Loop()
    with ExitStack() as stack:
        stack.callback(data_loop.close)
        _, data, stay = joining(stack, loop, data_loop, RunFolder(Path(folder)), url, token, int(width))
        threading.Thread(target=lambda: sys.stdin.read() or stay.cancel(), daemon=True).start()
        with suppress(CancelledError):
            stay.result()
        print(len(data.requests))


if __name__ == "__main__":
    main(*sys.argv[1:])

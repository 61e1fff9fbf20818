"""Let servers on other machines take part in a run: ``python -m areal_lora.engine.vllm_ext.remote.remote_gateway``.

    trainer rank 0 --> admin plane --,               ,<-- fetches work ----,
    controller ------> data plane ---+-- RemoteSeat -+<-- posts answers ---+-- remote server
    source ranks ----> groups -------'               '<-- fetches shards --'

Trainer and controller see one more server for each remote one, here: a seat has planes and an endpoint, is a member of
the groups, and forwards requests. So a remote version is live under the same transaction, digest and probe as others,
and counts as late or lost by the same rules. Shards pass through unread; the remote worker compares the fingerprints.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.sections.run import RemoteConfig, own_place
from areal_lora.config.sizing.slots import adapter_capacity, has_tenants
from areal_lora.engine.vllm_ext.remote.remote_messages import (
    HOLD_S,
    LOST_S,
    Admission,
    Answer,
    Forwarded,
    Settings,
    Work,
)
from areal_lora.engine.vllm_ext.server.guards import MAX_DATA_BODY_BYTES, BearerAuth, guarded
from areal_lora.engine.vllm_ext.server.main import bound_sockets, server_tls, tick
from areal_lora.errors import ArealLoraError, ConfigError, ManifestError, PublishError, RefusalReason
from areal_lora.network.addresses import bracketed
from areal_lora.network.http_server import CLOSE_S, LEAVING_HEADER, BodyLimit, HttpServer, unless_disconnected
from areal_lora.network.tls import Plane, bearer_key
from areal_lora.processes import stacks
from areal_lora.processes.log import get_logger, setup_logging
from areal_lora.processes.startup import die_with_parent
from areal_lora.processes.watched import watched_task
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import claim_indices, forget_endpoint, publish_endpoint, read_secret
from areal_lora.run_folder.status import EVENT_LOOP, Heart, set_status
from areal_lora.weight_sync import messages as wire
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup, join_group
from areal_lora.weight_sync.link.inbox import Part, RingInbox, WindowInbox
from areal_lora.weight_sync.manifest import base_digest, decode, shard_key_bytes, trailer_part

ROLE = "remote"
CHUNK_BYTES = 1 << 20
LINGER_S = 30.0
"""Time in which the data plane of a server that has left hands requests back: then the controller knows it."""

log = get_logger("areal_lora.engine.vllm_ext.remote.remote_gateway")  # __name__ is __main__ here
M = TypeVar("M")


class ShardSpool:
    """The bytes of one packed shard, from the group to a remote server. ``ready`` of ``memory`` have arrived."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.zeros(nbytes, dtype=np.uint8)
        self.ready, self._failure = 0, ""
        self._loop, self._more = asyncio.get_running_loop(), asyncio.Event()

    def fill(self, inbox: RingInbox | WindowInbox, parts: Sequence[Part]) -> None:
        """Receive all parts. Blocks. Raises PublishError, also in ``chunks``."""
        try:
            for start, end in parts:
                self.memory[start:end] = np.asarray(inbox.take())
                if end == len(self.memory):
                    inbox.finish()
                self._loop.call_soon_threadsafe(self._note, end)
        except PublishError as error:
            self._loop.call_soon_threadsafe(self._note, self.ready, str(error))
            raise

    def _note(self, ready: int, failure: str = "") -> None:
        self.ready, self._failure = ready, failure
        self._more.set()

    async def chunks(self, at: int) -> AsyncIterator[bytes]:
        """Yield the bytes from ``at`` on as they arrive. Raises PublishError if they do not."""
        while at < len(self.memory):
            while self.ready <= at:
                if self._failure:
                    raise PublishError(self._failure)
                self._more.clear()
                await self._more.wait()
            end = min(self.ready, at + CHUNK_BYTES)
            yield self.memory[at:end].tobytes()
            at = end


class RemoteSeat:
    """The place of one remote server in the run, of whose processes it appears as server ``index``."""

    def __init__(self, index: int, *, bind: str, secret: str, layouts: int) -> None:
        self.index, self.name = index, f"server-{index}"
        self._bind, self._secret, self._layouts = bind, secret, layouts
        self._numbers = itertools.count(1)
        self._unfetched: dict[int, Forwarded] = {}
        self._unanswered: dict[int, asyncio.Future[Answer]] = {}
        self._more = asyncio.Event()
        self._polls, self._fetched_at = 0, time.monotonic()
        self._known: dict[str, AdapterLayout] = {}
        self._groups: dict[int, BroadcastGroup] = {}
        self._transfer, self._spools = 0, dict[int, ShardSpool]()
        self._pool = ThreadPoolExecutor(64, thread_name_prefix=self.name)  # a member of all groups at once
        self.left, self.over = asyncio.Event(), False

    def admin_app(self) -> ASGIApp:
        routes = [
            Route(wire.JOIN_PATH, self._join, methods=["POST"]),
            Route(wire.PUBLISH_PATH, self._publish, methods=["POST"]),
            Route("/{path:path}", partial(self._pass_on, Plane.ADMIN), methods=["GET", "POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers={ManifestError: _refused, PublishError: _failed})
        return BearerAuth(BodyLimit(app, wire.MAX_BODY_BYTES), self._secret, Plane.ADMIN)

    def data_app(self) -> ASGIApp:
        route = Route("/{path:path}", partial(self._pass_on, Plane.DATA), methods=["GET", "POST"])
        return Starlette(routes=[route])

    # --- towards the remote server

    async def work(self, seen: int) -> Work:
        """Requests after number ``seen``. What was fetched and did not arrive is fetched again."""
        self._polls += 1
        try:
            for number in [n for n in self._unfetched if n <= seen]:
                del self._unfetched[number]
            if not self._unfetched and not self.over:
                self._more.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._more.wait(), HOLD_S)
            return Work(requests=list(self._unfetched.values()), over=self.over)
        finally:
            self._polls -= 1
            self._fetched_at = time.monotonic()

    def answered(self, answer: Answer) -> None:
        """Give the answer to the request, unless it has one or waits no more."""
        future = self._unanswered.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)

    def shard(self, transfer: int, source: int) -> ShardSpool | None:
        """The shard of source rank ``source`` of a transfer; None for one that is over."""
        return self._spools.get(source) if transfer == self._transfer else None

    def lost(self, now: float) -> bool:
        return not self._polls and now - self._fetched_at > LOST_S

    def leave(self) -> None:
        """Hand back what is unanswered. From here on nothing is forwarded: the trainer gets no answer to a ping."""
        self.left.set()
        for number, future in self._unanswered.items():
            if not future.done():
                future.set_result(Answer(number=number, status=503, body=b"this server has left", leaving=True))
        self._leave_groups()

    def end(self) -> None:
        """Let the remote server know that the run is over."""
        self.over = True
        self._more.set()

    async def forward(self, plane: Plane, method: str, path: str, body: bytes, number: int | None = None) -> Answer:
        """Have the remote server answer a request. A caller that is cancelled cancels it there."""
        if self.left.is_set():
            return Answer(number=0, status=503, body=b"this server has left", leaving=True)
        number = next(self._numbers) if number is None else number
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = future
        self._send(Forwarded(number=number, plane=plane, method=method, path=path, body=body))
        try:
            return await future
        finally:
            del self._unanswered[number]
            if future.cancelled():
                self._send(Forwarded(number=next(self._numbers), cancels=number))

    def _send(self, request: Forwarded) -> None:
        self._unfetched[request.number] = request
        self._more.set()

    # --- towards the run

    async def _pass_on(self, plane: Plane, request: Request) -> Response:
        body = await request.body()
        return await unless_disconnected(request, self._response(plane, request.method, request.url.path, body))

    async def _response(self, plane: Plane, method: str, path: str, body: bytes) -> Response:
        answer = await self.forward(plane, method, path, body)
        headers = {LEAVING_HEADER: "1"} if answer.leaving else None
        return Response(answer.body, status_code=answer.status, media_type=answer.media_type, headers=headers)

    async def _join(self, request: Request) -> Response:
        """Join the trainer's groups here, while the remote server forms groups of its own for the same sources."""
        want = msgspec.msgpack.decode(await request.body(), type=wire.JoinRequest)
        self._leave_groups()
        hidden = [msgspec.structs.replace(e, host="", port=0, token="") for e in want.endpoints]
        body = msgspec.msgpack.encode(msgspec.structs.replace(want, endpoints=hidden))
        joins = [
            self._in_thread(join_group, e, want.ranks[0], self._bind, want.timeout_s, self._secret)
            for e in want.endpoints
        ]
        response, *joined = await asyncio.gather(
            self._response(Plane.ADMIN, "POST", wire.JOIN_PATH, body), *joins, return_exceptions=True
        )
        self._groups = {group.source: group for group in joined if isinstance(group, BroadcastGroup)}
        for problem in (response, *joined):
            if isinstance(problem, BaseException):
                self._leave_groups()
                raise problem
        assert isinstance(response, Response)
        return response

    async def _publish(self, request: Request) -> Response:
        """Receive a version while the remote server fetches it; its answer is that of this server."""
        body, came = await request.body(), time.monotonic()
        announced = decode(body)
        digest = announced.manifest.layout
        layout = announced.layout or self._known.get(digest)
        if layout is None or {s.source for s in layout.shards} - self._groups.keys():
            self._leave_groups()  # how the bytes are cut is not known, or nothing of them arrives
            if layout is not None:
                raise PublishError(f"{announced.manifest.ref}: {self.name} is in no group; the trainer must join it")
            text = f"{announced.manifest.ref} uses a layout that {self.name} does not hold"
            raise ManifestError(RefusalReason.UNKNOWN_LAYOUT, text)
        self._known.pop(digest, None)
        while len(self._known) >= self._layouts:
            del self._known[next(iter(self._known))]
        self._known[digest] = layout
        number, deadline, fills = next(self._numbers), came + announced.timeout_s, []
        self._transfer, self._spools = number, {}
        for shard, table in zip(layout.shards, layout.tables, strict=True):
            group = self._groups[shard.source]
            parts = [*((b.start, b.end) for b in table.buckets(group.bucket_bytes)), trailer_part(shard)]
            spool = self._spools[shard.source] = ShardSpool(parts[-1][1])
            fills.append(self._in_thread(spool.fill, group.receive(parts, deadline), parts))
        answer, *filled = await asyncio.gather(
            self.forward(Plane.ADMIN, "POST", wire.PUBLISH_PATH, body, number), *fills, return_exceptions=True
        )
        for problem in (*filled, answer):
            if isinstance(problem, BaseException):
                self._leave_groups()
                raise problem
        assert isinstance(answer, Answer)
        return Response(answer.body, status_code=answer.status, media_type=answer.media_type)

    def _in_thread(self, call: Any, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    def _leave_groups(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ManifestError)
    body = msgspec.msgpack.encode(wire.RefusalReply(reason=error.reason, detail=error.detail))
    return Response(body, status_code=409, media_type=wire.CONTENT_TYPE)


async def _failed(request: Request, error: Exception) -> Response:
    return Response(str(error), status_code=503, media_type="text/plain")


class RemoteGateway:
    """The HTTP plane for remote servers, and a seat for each of them. Call ``app`` once."""

    def __init__(self, config: Config, run_folder: RunFolder) -> None:
        self._config, self._run_folder, self._secret = config, run_folder, read_secret(run_folder)
        self._host = own_place(config.cluster, run_folder).address
        self._closed = has_tenants(config)
        self.seats: dict[str, RemoteSeat] = {}
        self._settings = Settings(
            config=config.model_dump_json().encode(),
            base_digest=base_digest(config.model.folder),
            shard_keys=shard_key_bytes(self._secret),
        )

    def app(self) -> ASGIApp:
        routes = [
            Route("/remote/settings", self._get_settings),
            Route("/remote/servers/{workers:int}", self._admit, methods=["POST"]),
            Route("/remote/{name}/work/{seen:int}", self._get_work),
            Route("/remote/{name}/answer", self._take_answer, methods=["POST"]),
            Route("/remote/{name}/shard/{transfer:int}/{source:int}", self._get_shard),
            Route("/remote/{name}", self._leaves, methods=["DELETE"]),
        ]
        app = Starlette(routes=routes, exception_handlers={KeyError: _unknown, msgspec.MsgspecError: _malformed})
        return BearerAuth(BodyLimit(app, MAX_DATA_BODY_BYTES), self._secret, Plane.REMOTE)

    async def watch(self) -> None:
        """End the stay of servers that fetch no work any more."""
        while True:
            for seat in list(self.seats.values()):
                if seat.lost(time.monotonic()):
                    self._end(seat, "is lost: it fetches no work")
            await asyncio.sleep(LOST_S / 10)

    async def end(self) -> None:
        """Let all servers know that the run is over, and give them a moment to fetch that."""
        for seat in self.seats.values():
            seat.end()
        await asyncio.sleep(min(1.0, len(self.seats)))

    async def _get_settings(self, request: Request) -> Response:
        return _packed(self._settings)

    async def _admit(self, request: Request) -> Response:
        config, folder = self._config, self._run_folder
        [index] = claim_indices(folder, 1, config.rollout.servers)
        seat = RemoteSeat(index, bind=self._host, secret=self._secret, layouts=adapter_capacity(config))
        self.seats[seat.name] = seat
        watched_task(seat.name, partial(self._serve, seat, int(request.path_params["workers"])))
        log.info("%s has joined from %s", seat.name, request.client.host if request.client else "elsewhere")
        return _packed(Admission(name=seat.name))

    async def _serve(self, seat: RemoteSeat, workers: int) -> None:
        """Serve both planes of a seat until its server has left, and a little longer."""
        data_app = guarded(seat.data_app(), self._host, self._secret, closed=self._closed)
        tls = server_tls(self._host, self._run_folder, self._secret, closed=self._closed)
        with bound_sockets(self._host) as (data, admin):
            http = [
                HttpServer(data_app, data, tls.get(Plane.DATA)),
                HttpServer(seat.admin_app(), admin, tls[Plane.ADMIN]),
            ]
            planes = [watched_task("http-plane", server.serve) for server in http]
            ports = {"data": data.getsockname()[1], "admin": admin.getsockname()[1]}
            publish_endpoint(self._run_folder, "server", seat.index, ports, self._host, tls, workers=1)
            set_status(self._run_folder, "server", seat.index, f"serving elsewhere, with {workers} workers")
            await seat.left.wait()
            await asyncio.sleep(LINGER_S)
            for server in http:
                server.should_exit = True
            await asyncio.wait(planes, timeout=CLOSE_S + 1)

    def _end(self, seat: RemoteSeat, why: str) -> None:
        log.info("%s %s", seat.name, why)
        forget_endpoint(self._run_folder, "server", seat.index)
        set_status(self._run_folder, "server", seat.index, "stopped")
        del self.seats[seat.name]
        seat.leave()

    async def _get_work(self, request: Request) -> Response:
        return _packed(await self._seat(request).work(request.path_params["seen"]))

    async def _take_answer(self, request: Request) -> Response:
        self._seat(request).answered(msgspec.msgpack.decode(await request.body(), type=Answer))
        return Response()

    async def _get_shard(self, request: Request) -> Response:
        spool = self._seat(request).shard(request.path_params["transfer"], request.path_params["source"])
        at, size = _start_of(request.headers.get("range", "")), 0 if spool is None else len(spool.memory)
        if spool is None or at >= size:
            return Response("this shard is not sent any more", status_code=410)
        headers = {"Content-Length": str(size - at), "Content-Range": f"bytes {at}-{size - 1}/{size}"}
        media_type = "application/octet-stream"
        return StreamingResponse(spool.chunks(at), 206 if at else 200, headers=headers, media_type=media_type)

    async def _leaves(self, request: Request) -> Response:
        self._end(self._seat(request), "leaves")
        return Response()

    def _seat(self, request: Request) -> RemoteSeat:
        """Raises KeyError."""
        return self.seats[request.path_params["name"]]


def _start_of(header: str) -> int:
    """First byte of a ``Range`` header of the form ``bytes=N-``; 0 for any other."""
    first = header.removeprefix("bytes=").removesuffix("-")
    return int(first) if first.isdecimal() else 0


def _packed(message: msgspec.Struct) -> Response:
    return Response(msgspec.msgpack.encode(message), media_type=wire.CONTENT_TYPE)


async def _unknown(request: Request, error: Exception) -> Response:
    return Response("no such server: it has left, or joined an earlier gateway", status_code=404)


async def _malformed(request: Request, error: Exception) -> Response:
    return Response(str(error), status_code=400)


def bound(remote: RemoteConfig) -> tuple[socket.socket, ssl.SSLContext | None]:
    """The gateway's listening socket and its TLS. Raises ConfigError."""
    tls = None
    try:
        if remote.certificate is not None:
            tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            tls.load_cert_chain(remote.certificate)
    except OSError as error:  # ssl.SSLError is one
        fix = "name a PEM file with the certificate chain and its private key"
        raise ConfigError("rollout.remote.certificate", f"{remote.certificate}: {error}", fix) from None
    family = socket.AF_INET6 if ":" in remote.host else socket.AF_INET
    try:
        return socket.create_server((remote.host, remote.port), family=family, backlog=socket.SOMAXCONN), tls
    except OSError as error:
        reason = f"{remote.host} port {remote.port} cannot be bound: {error.strerror}"
        raise ConfigError("rollout.remote.port", reason, "choose another, or 0") from None


async def serve(config: Config, run_folder: RunFolder) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError for an address or certificate that cannot be used."""
    assert config.rollout.remote is not None
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    sock, tls = bound(config.rollout.remote)
    gateway = RemoteGateway(config, run_folder)
    write_file(run_folder.remote_token, bearer_key(read_secret(run_folder), Plane.REMOTE), mode=0o600)
    http = HttpServer(gateway.app(), sock, tls)
    plane = watched_task("http-plane", http.serve)
    host, port = sock.getsockname()[:2]
    publish_endpoint(run_folder, ROLE, 0, {"remote": port}, config.rollout.remote.host, ["remote"] if tls else ())
    url = f"{'https' if tls else 'http'}://{bracketed(host)}:{port}"
    set_status(run_folder, ROLE, 0, f"serving on {url}")
    log.info(
        "remote servers join with areal-lora serve-remote %s --token-file FILE: a copy of %s",
        url,
        run_folder.remote_token,
    )
    heart = Heart(run_folder, ROLE, 0, {EVENT_LOOP: config.run.stall_s})
    tasks = [watched_task("event-loop-ticks", partial(tick, heart)), watched_task("remote-watch", gateway.watch)]
    await stop.wait()
    await gateway.end()
    http.should_exit = True
    await asyncio.wait([plane], timeout=CLOSE_S + 1)
    for task in tasks:
        task.cancel()
    heart.stop()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="areal_lora.engine.vllm_ext.remote.remote_gateway", description=__doc__)
    parser.add_argument("--run-folder", type=RunFolder.of, required=True)
    run_folder: RunFolder = parser.parse_args(argv).run_folder
    setup_logging(ROLE, 0)
    stacks.install(run_folder.stack_dump(f"{ROLE}-0"))
    die_with_parent(signal.SIGTERM)
    try:
        uvloop.run(serve(read_config(run_folder), run_folder))
    except ArealLoraError as error:
        log.error("%s", error)
        return error.exit_code
    set_status(run_folder, ROLE, 0, "stopped")
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)

"""Let servers on other machines take part in a run: ``python -m areal_lora.engine.vllm_ext.remote.remote_gateway``.

    trainer rank 0 --> admin plane --,               ,<-- fetches work ----,
    controller ------> data plane ---+-- RemoteSeat -+<-- posts answers ---+-- remote server
    source ranks ----> groups -------'               '<-- fetches shards --'

Trainer and controller see one more server for each remote one, here: a seat has planes and an endpoint, is a member of
the groups, and forwards requests. So a remote version is live under the same transaction, digest and probe as others,
and counts as late or lost by the same rules. Shards pass through unread; the remote worker compares the fingerprints.
"""

import asyncio
import sys
import time
from functools import partial
from typing import Any

import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.sections.run import own_place
from areal_lora.config.sizing.slots import adapter_capacity, has_tenants
from areal_lora.engine.vllm_ext.remote import remote_seat as m
from areal_lora.engine.vllm_ext.remote.shards import ShardBases, open_store
from areal_lora.engine.vllm_ext.server.guards import BearerAuth, guarded, refusals
from areal_lora.engine.vllm_ext.server.main import bound_sockets, server_tls
from areal_lora.errors import PublishError
from areal_lora.network.addresses import bracketed
from areal_lora.network.http_server import CLOSE_S, BodyLimit, HttpServer, listening
from areal_lora.network.tls import Plane, bearer_key, certified_context
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.run_folder.rendezvous import claim_indices, forget_endpoint, publish_endpoint, read_secret
from areal_lora.run_folder.status import EVENT_LOOP, Heart, run_role, set_status, signalled
from areal_lora.weight_sync import messages as wire
from areal_lora.weight_sync.manifest import base_digest, shard_key_bytes

ROLE, BYTES = "remote", "application/octet-stream"
BASES = 2
"""Versions kept of each adapter: the newest, and that before it, which servers hold while they fetch the newest."""
ANSWER_BYTES = 1 << 30
"""Most of an answer: routes of a group of long ones are hundreds of megabytes."""
LINGER_S = 30.0
"""Time in which the data plane of a server that has left hands requests back: then the controller knows it."""

log = get_logger("areal_lora.engine.vllm_ext.remote.remote_gateway")  # __name__ is __main__ here


class RemoteGateway:
    """The HTTP plane for remote servers, and a seat for each of them. Call ``app`` once."""

    def __init__(self, config: Config, run_folder: RunFolder) -> None:
        self._config, self._run_folder, self._secret = config, run_folder, read_secret(run_folder)
        self._host = own_place(config.cluster, run_folder).address
        self._closed = has_tenants(config)
        self.seats: dict[str, m.RemoteSeat] = {}
        url = None if config.rollout.remote is None else config.rollout.remote.store
        capacity = adapter_capacity(config)
        self._store, self._bases = open_store(url, capacity), ShardBases(capacity, BASES)
        self._settings = m.RemoteSettings(
            config=config.model_dump_json().encode(),
            base_digest=base_digest(config.model.folder),
            shard_keys=shard_key_bytes(self._secret),
            store=url,
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
        app = Starlette(routes=routes, exception_handlers=refusals({msgspec.MsgspecError: 400, PublishError: 410}))
        return BearerAuth(BodyLimit(app, ANSWER_BYTES), self._secret, Plane.REMOTE)

    async def watch(self) -> None:
        """End the stay of servers that fetch no work any more."""
        while True:
            for seat in list(self.seats.values()):
                if seat.lost(time.monotonic()):
                    self._end(seat, "is lost: it fetches no work")
            await asyncio.sleep(m.LOST_S / 10)

    async def end(self) -> None:
        """Let all servers know that the run is over, and give them a moment to fetch that."""
        for seat in self.seats.values():
            seat.end()
        await asyncio.sleep(min(1.0, len(self.seats)))
        if self._store is not None:
            await self._store.clear()

    async def _get_settings(self, request: Request) -> Response:
        return _packed(self._settings)

    async def _admit(self, request: Request) -> Response:
        config, folder = self._config, self._run_folder
        [index] = claim_indices(folder, 1, config.rollout.servers)
        layouts = adapter_capacity(config)
        how: Any = {"bind": self._host, "secret": self._secret, "bases": self._bases, "store": self._store}
        seat = m.RemoteSeat(index, layouts=layouts, **how)
        self.seats[seat.name] = seat
        watched_task("remote-seat", partial(self._serve, seat, int(request.path_params["workers"])))
        log.info("%s has joined from %s", seat.name, request.client.host if request.client else "elsewhere")
        return _packed(m.RemoteName(name=seat.name))

    async def _serve(self, seat: m.RemoteSeat, workers: int) -> None:
        """Serve both planes of a seat until its server has left, and a little longer."""
        data_app, admin_app = seat.apps()
        data_app = guarded(data_app, self._host, self._secret, closed=self._closed)
        tls = server_tls(self._host, self._run_folder, self._secret, closed=self._closed)
        with bound_sockets(self._host) as (data, admin):
            http = [HttpServer(data_app, data, tls.get(Plane.DATA)), HttpServer(admin_app, admin, tls[Plane.ADMIN])]
            planes = [watched_task("http-plane", server.serve) for server in http]
            ports = {"data": data.getsockname()[1], "admin": admin.getsockname()[1]}
            publish_endpoint(self._run_folder, "server", seat.index, ports, self._host, tls, workers=1)
            set_status(self._run_folder, "server", seat.index, f"serving elsewhere, with {workers} workers")
            await seat.left.wait()
            await asyncio.sleep(LINGER_S)
            for server in http:
                server.should_exit = True
            await asyncio.wait(planes, timeout=CLOSE_S + 1)

    def _end(self, seat: m.RemoteSeat, why: str) -> None:
        log.info("%s %s", seat.name, why)
        forget_endpoint(self._run_folder, "server", seat.index)
        set_status(self._run_folder, "server", seat.index, "stopped")
        del self.seats[seat.name]
        seat.leave()

    async def _get_work(self, request: Request) -> Response:
        return _packed(await self._seat(request).work(request.path_params["seen"]))

    async def _take_answer(self, request: Request) -> Response:
        self._seat(request).answered(msgspec.msgpack.decode(await request.body(), type=m.RemoteAnswer))
        return Response()

    async def _get_shard(self, request: Request) -> Response:
        number, source = request.path_params["transfer"], request.path_params["source"]
        try:
            at, base_of = int(request.query_params["at"]), request.query_params["base"]
        except (KeyError, ValueError) as e:
            raise HTTPException(400, "a shard is requested with the parameters at, a number of bytes, and base") from e
        spool = self._seat(request).spools.get((number, source))
        if spool is None or not 0 <= at < len(spool.memory):
            raise PublishError("this shard is not sent any more")
        if self._store is not None:
            return Response(await spool.stored())
        base = self._bases.find(spool.ref.name, spool.source, len(spool.memory), base_of)
        return StreamingResponse(spool.frames(at, base), 200 if base is None else 226, media_type=BYTES)

    async def _leaves(self, request: Request) -> Response:
        self._end(self._seat(request), "leaves")
        return Response()

    def _seat(self, request: Request) -> m.RemoteSeat:
        if (seat := self.seats.get(request.path_params["name"])) is None:
            raise HTTPException(404, "no such server: it has left, or joined an earlier gateway")
        return seat


def _packed(message: msgspec.Struct) -> Response:
    return Response(msgspec.msgpack.encode(message), media_type=wire.CONTENT_TYPE)


async def serve(config: Config, run_folder: RunFolder) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError for an address or certificate that cannot be used."""
    assert config.rollout.remote is not None
    stop = signalled()
    remote, tls = config.rollout.remote, None
    sock = listening(remote.host, remote.port, "rollout.remote.port")
    if remote.certificate is not None:
        tls = certified_context(remote.certificate, "rollout.remote.certificate")
    gateway = RemoteGateway(config, run_folder)
    write_file(run_folder.remote_token, bearer_key(read_secret(run_folder), Plane.REMOTE), mode=0o600)
    http = HttpServer(gateway.app(), sock, tls)
    plane = watched_task("http-plane", http.serve)
    host, port = sock.getsockname()[:2]
    publish_endpoint(run_folder, ROLE, 0, {"remote": port}, remote.host, ["remote"] if tls else ())
    url = f"{'https' if tls else 'http'}://{bracketed(host)}:{port}"
    set_status(run_folder, ROLE, 0, f"serving on {url}")
    log.info(
        "remote servers join with areal-lora serve-remote %s --token-file FILE: a copy of %s",
        url,
        run_folder.remote_token,
    )
    heart = Heart(run_folder, ROLE, 0, {EVENT_LOOP: config.run.stall_s})
    tasks = [watched_task("event-loop-ticks", heart.tick), watched_task("remote-watch", gateway.watch)]
    await stop.wait()
    await gateway.end()
    http.should_exit = True
    await asyncio.wait([plane], timeout=CLOSE_S + 1)
    for task in tasks:
        task.cancel()
    heart.stop()


if __name__ == "__main__":
    sys.exit(run_role(ROLE, lambda folder: uvloop.run(serve(read_config(folder), folder))))

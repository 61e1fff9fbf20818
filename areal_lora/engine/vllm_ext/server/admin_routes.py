"""Serve the admin plane of a rollout server: msgpack over HTTPS on its own port, with its key.

``weight_sync.messages`` lists the routes.

A server that leaves answers pings so, until the trainer posts ``/admin/dismiss`` (``leaving``).
"""

import asyncio
import time
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_lora.engine.vllm_ext.server.adapters import BASE, ServedAdapters
from areal_lora.engine.vllm_ext.server.generate import BadRequest, Generator
from areal_lora.engine.vllm_ext.server.guards import BearerAuth, refusals
from areal_lora.engine.vllm_ext.server.leaving import Stop
from areal_lora.engine.vllm_ext.server.sampling import all_of
from areal_lora.errors import ManifestError, PublishError, UnknownVersionError
from areal_lora.network.http_server import BodyLimit
from areal_lora.network.tls import Plane
from areal_lora.weight_sync import messages as wire
from areal_lora.weight_sync.admin_client import RequestRelay


def _answer(message: wire.AdminMessage) -> Response:
    return Response(msgspec.msgpack.encode(message), media_type=wire.CONTENT_TYPE)


class AdminPlane:
    """The routes of the admin plane."""

    def __init__(
        self,
        adapters: ServedAdapters,
        generator: Generator,
        info: wire.InfoReply,
        modules: wire.ModulesReply,
        stop: Stop,
    ) -> None:
        self._adapters, self._generator = adapters, generator
        self._info, self._modules, self._stop = info, modules, stop

    def app(self, secret: str) -> ASGIApp:
        routes = [
            Route(wire.INFO_PATH, self.info),
            Route(wire.MODULES_PATH, self.modules),
            Route(wire.PING_PATH, self.ping),
            Route(wire.JOIN_PATH, self.join, methods=["POST"]),
            Route(wire.PUBLISH_PATH, self.publish, methods=["POST"]),
            Route(wire.DROP_PATH, self.drop, methods=["POST"]),
            Route(wire.SCORE_PATH, self.score, methods=["POST"]),
            Route(wire.DISMISS_PATH, self.dismiss, methods=["POST"]),
            Route(wire.RELAY_PATH, partial(self.relay, RequestRelay(secret)), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers=refusals(STATUS))
        return BearerAuth(BodyLimit(app, wire.MAX_BODY_BYTES), secret, Plane.ADMIN)

    async def info(self, request: Request) -> Response:
        refs, stats = [str(r) for r in sorted(self._adapters.versions.active)], self._generator.counters.stats()
        return _answer(msgspec.structs.replace(self._info, refs=refs, stats=stats))

    async def modules(self, request: Request) -> Response:
        return _answer(self._modules)

    async def ping(self, request: Request) -> Response:
        await self._adapters.ping()
        return _answer(wire.PingReply(leaving=self._stop.leaving.is_set(), busy=self._adapters.turn.locked()))

    async def join(self, request: Request) -> Response:
        came = time.monotonic()
        await self._adapters.join(msgspec.msgpack.decode(await request.body(), type=wire.JoinRequest), came)
        return _answer(wire.JoinReply(workers=self._info.workers))

    async def publish(self, request: Request) -> Response:
        came = time.monotonic()
        return _answer(await self._adapters.publish(await request.body(), came))

    async def drop(self, request: Request) -> Response:
        want = msgspec.msgpack.decode(await request.body(), type=wire.DropRequest)
        return _answer(wire.DropReply(running=await self._adapters.drop(want.name)))

    async def score(self, request: Request) -> Response:
        """Return the log-probabilities of given tokens, without cache or sampling, for the probe (contract C6)."""
        want = msgspec.msgpack.decode(await request.body(), type=wire.ScoreRequest)
        if want.model is None and not self._adapters.has_base:
            return _answer(wire.ScoreReply(logprobs=[]))
        await self._adapters.gate.opened()
        with self._adapters.lease(want.model if want.model is not None else BASE) as lease:
            # None runs on after an error of another one: without the lease its version may go.
            scored = await all_of([self._generator.score(ids, lease, want.temperature) for ids in want.token_ids])
        return _answer(wire.ScoreReply(logprobs=scored))

    async def dismiss(self, request: Request) -> Response:
        self._stop.dismissed.set()
        return _answer(wire.PingReply())

    async def relay(self, requests: RequestRelay, request: Request) -> Response:
        came, want = time.monotonic(), msgspec.msgpack.decode(await request.body(), type=wire.RelayRequest)
        return _answer(await asyncio.to_thread(requests.send, want, came))


STATUS = {
    ManifestError: 409,
    UnknownVersionError: 404,
    msgspec.MsgspecError: 400,
    BadRequest: 400,
    ValueError: 409,
    PublishError: 503,
}
"""Of known errors."""

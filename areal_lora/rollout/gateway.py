"""The agents' endpoint: an HTTP server on loopback that knows sessions by their keys."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from aiohttp import web

from areal_lora.rollout.agents import Session, Sessions
from areal_lora.rollout.client import GenerationFault
from areal_lora.rollout.workflows.agent_api import Refused, error_body, parse

HOST = "127.0.0.1"  # agents run in this process, wherever other ports are bound
MAX_BODY_BYTES = 16 << 20


class AgentGateway:
    """``async with AgentGateway() as gateway``; then ``gateway.port``, and ``gateway.sessions`` for workflows."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> AgentGateway:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", partial(self._serve, chat=True))
        app.router.add_post("/v1/completions", partial(self._serve, chat=False))
        # An agent that goes away ends its request, and with it the sequence on the server.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.port = self._runner.addresses[0][1]
        self.sessions.base_url = f"http://{HOST}:{self.port}/v1"
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _serve(self, request: web.Request, *, chat: bool) -> web.Response:
        try:
            session = self._session(request)
            return web.json_response(await self._complete(session, await request.read(), chat))
        except web.HTTPRequestEntityTooLarge:
            return web.json_response(error_body(413, f"the body is longer than {MAX_BODY_BYTES} bytes"), status=413)
        except Refused as error:
            return web.json_response(error_body(error.status, str(error)), status=error.status)
        except GenerationFault as fault:
            return web.json_response(error_body(503, str(fault)), status=503)

    def _session(self, request: web.Request) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self.sessions.of_key(key) if kind == "Bearer" else None
        if session is None:
            raise Refused(401, "the key is not, or no longer, valid")
        return session

    async def _complete(self, session: Session, body: bytes, chat: bool) -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None
        session.requests.add(task)
        try:
            return await session.complete(parse(body, chat=chat))
        except GenerationFault as fault:
            session.fail(fault)
            raise
        finally:
            session.requests.discard(task)

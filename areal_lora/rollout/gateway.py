"""The agents' endpoint: an HTTP server on loopback that knows sessions by their keys.

Routes: ``POST /v1/chat/completions``, ``/v1/responses``, ``/v1/completions``; ``GET /v1/models``. A streamed answer is
sent when it is whole: its events are those of OpenAI, but the first one comes after the last token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from areal_lora.rollout.agent_api.asking import Ask, sse
from areal_lora.rollout.agent_api.chat import parse_chat, parse_text, reply_body, reply_events
from areal_lora.rollout.agent_api.refusals import Refused, error_body
from areal_lora.rollout.agent_api.responses import parse_response, response_body, response_events, response_id
from areal_lora.rollout.agent_api.session import Session, Sessions
from areal_lora.rollout.client import GenerationFault

HOST = "127.0.0.1"  # agents run in this process, wherever other ports are bound
MAX_BODY_BYTES = 16 << 20

Body = dict[str, Any]
_Route = Callable[[Session, web.Request], Awaitable[web.Response]]


class AgentGateway:
    """``async with AgentGateway() as gateway``; then ``gateway.port``, and ``gateway.sessions`` for workflows."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> AgentGateway:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", partial(self._guarded, partial(_completions, parse=parse_chat)))
        app.router.add_post("/v1/completions", partial(self._guarded, partial(_completions, parse=parse_text)))
        app.router.add_post("/v1/responses", partial(self._guarded, _responses))
        app.router.add_get("/v1/models", partial(self._guarded, _models))
        app.router.add_get("/v1/models/{name}", partial(self._guarded, _model))
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

    async def _guarded(self, route: _Route, request: web.Request) -> web.Response:
        """Find the session, and turn known errors into OpenAI's bodies."""
        try:
            return await self._within(self._session(request), route, request)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
        except Refused as error:
            return _error(error.status, str(error), error.param)
        except GenerationFault as fault:
            return _error(503, str(fault))

    def _session(self, request: web.Request) -> Session:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self.sessions.of_key(key) if kind == "Bearer" else None
        if session is None:
            raise Refused(401, "the key is not, or no longer, valid")
        return session

    async def _within(self, session: Session, route: _Route, request: web.Request) -> web.Response:
        task = asyncio.current_task()
        assert task is not None
        session.requests.add(task)
        try:
            return await route(session, request)
        except GenerationFault as fault:
            session.fail(fault)
            raise
        finally:
            session.requests.discard(task)


async def _completions(session: Session, request: web.Request, *, parse: Callable[[Body], Ask]) -> web.Response:
    body = await _checked_body(session, request)
    answered = await session.answer(parse(body))
    if body.get("stream"):
        return _events(sse(reply_events(answered, session.ref.name, body, session.spell)))
    return web.json_response(reply_body(answered, session.ref.name, session.spell))


async def _responses(session: Session, request: web.Request) -> web.Response:
    body = await _checked_body(session, request)
    earlier = {response_id(number): turns for number, turns in session.turns_of().items()}
    answered = await session.answer(parse_response(body, earlier))
    whole = response_body(answered, session.ref.name, body, session.spell)
    return _events(sse(response_events(whole), named=True)) if body.get("stream") else web.json_response(whole)


async def _models(session: Session, request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_described(session)]})


async def _model(session: Session, request: web.Request) -> web.Response:
    if request.match_info["name"] != session.ref.name:
        raise Refused(404, f"there is no model {request.match_info['name']!r} for this key, only {session.ref.name!r}")
    return web.json_response(_described(session))


def _described(session: Session) -> Body:
    return {"id": session.ref.name, "object": "model", "created": 0, "owned_by": "areal_lora"}


async def _checked_body(session: Session, request: web.Request) -> Body:
    try:
        body = msgspec.json.decode(await request.read(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Refused(400, str(error)) from None
    session.check(body)
    return body


def _events(payload: bytes) -> web.Response:
    return web.Response(body=payload, content_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _error(status: int, message: str, param: str | None = None) -> web.Response:
    return web.json_response(error_body(status, message, param), status=status)

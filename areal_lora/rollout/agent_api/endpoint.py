"""The OpenAI-compatible endpoint of agents, and Anthropic's API: HTTP on loopback, for the sessions of one process.

A key belongs to one session (one sample of one group) and ends with it; the run secret stays on this side. What was
sampled is never tokenized again (``known_turns``), so that a conversation stays one trajectory. Tool calls are parsed
by a rollout server, which has vLLM.

Routes: ``POST /v1/chat/completions``, ``/v1/responses``, ``/v1/completions``, ``/v1/messages`` (Anthropic's API),
``/v1/messages/count_tokens``; ``GET /v1/models``. A streamed answer is sent as the server samples it. With tools, what
may be a call is held back until the answer is whole, and thoughts are not.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_lora.network.http_server import BodyLimit, HttpServer, unless_disconnected
from areal_lora.processes.watched import watched_task
from areal_lora.rollout.agent_api.anthropic_messages import message_body, message_events, parse_messages
from areal_lora.rollout.agent_api.chat import parse_chat, parse_text, reply_body, reply_events
from areal_lora.rollout.agent_api.refusals import AgentRequestError, anthropic_error, check_fields, error_body
from areal_lora.rollout.agent_api.replies import CompletedRequest, ReplyStream, SamplingRequest, Spell, event_bytes
from areal_lora.rollout.agent_api.responses import parse_response, response_body, response_events
from areal_lora.rollout.agent_api.session import Session, Sessions
from areal_lora.rollout.completion_client import GenerationFault

HOST = "127.0.0.1"  # agents run on this host, wherever other ports are bound
MAX_BODY_BYTES = 16 << 20
PAUSE_S = 15.0  # of a stream without an event

Body = dict[str, Any]
_Handler = Callable[[Session, Request, Body], Coroutine[Any, Any, Response]]
_ErrorBody = Callable[[int, str, str | None, str | None], Body]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentApi:
    """How the requests of one route are read, and its answers written."""

    parse: Callable[[Body, Session], SamplingRequest]
    whole: Callable[[CompletedRequest, str, Body, Spell], Body]
    events: Callable[[ReplyStream, str, Body, Spell], AsyncIterator[Body]]
    named: bool = True
    error: _ErrorBody = error_body


_CHAT = AgentApi(parse=lambda body, _: parse_chat(body), whole=reply_body, events=reply_events, named=False)
_RESPONSES = AgentApi(
    parse=lambda body, session: parse_response(body, session.earlier), whole=response_body, events=response_events
)
_MESSAGES = AgentApi(
    parse=lambda body, _: parse_messages(body), whole=message_body, events=message_events, error=anthropic_error
)
APIS = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": replace(_CHAT, parse=lambda body, _: parse_text(body)),
    "/v1/responses": _RESPONSES,
    "/v1/messages": _MESSAGES,
}


@contextlib.asynccontextmanager
async def agent_gateway(sessions: Sessions | None = None) -> AsyncIterator[Sessions]:
    """Serve the agents of the sessions, by default new ones, at their ``port``, inside the block."""
    sessions = sessions or Sessions()
    answer = partial(partial, _answer, sessions)
    app = Starlette(
        routes=[
            *(Route(path, answer(partial(_sample, api), api.error), methods=["POST"]) for path, api in APIS.items()),
            Route("/v1/messages/count_tokens", answer(_count_tokens, anthropic_error), methods=["POST"]),
            *(Route(path, answer(_models, error_body)) for path in ("/v1/models", "/v1/models/{name}")),
        ]
    )
    with socket.create_server((HOST, 0)) as sock:
        # Clients keep connections for minutes; a request on one that is being closed is an error of the agent.
        server = HttpServer(BodyLimit(app, MAX_BODY_BYTES, _error), sock, None, keep_alive_s=3600)
        serving = watched_task("agent-endpoint", server.serve)
        sessions.port = sock.getsockname()[1]
        try:
            yield sessions
        finally:
            server.should_exit = True
            await serving


async def _answer(sessions: Sessions, handler: _Handler, error_of: _ErrorBody, request: Request) -> Response:
    """Answer within the session of the request's key, with the API's bodies for known errors.

    An agent that disconnects ends its request, and the sequence on the server.
    """
    kind, _, key = request.headers.get("Authorization", "").partition(" ")
    session = sessions.of_key(key if kind == "Bearer" else request.headers.get("X-Api-Key", ""))
    if session is None:
        return _error(401, "the key is not, or no longer, valid", error_of=error_of)
    try:
        task = asyncio.create_task(handler(session, request, await _checked_body(session, request)))
        session.requests.add(task)
        try:
            return await unless_disconnected(request, task)
        finally:
            session.requests.discard(task)
    except HTTPException as error:
        return _error(error.status_code, error.detail, error_of=error_of)
    except AgentRequestError as error:
        return _error(error.status, str(error), error.param, error_of, error.code)
    except GenerationFault as fault:
        session.fail(fault)
        return _error(503, str(fault), error_of=error_of)


async def _sample(api: AgentApi, session: Session, request: Request, body: Body) -> Response:
    """The texts of the conversation, which may be long, are not kept here until the answer comes."""
    wanted = api.parse(body, session)
    body = {key: value for key, value in body.items() if key not in ("messages", "input", "prompt")}
    if not body.get("stream"):
        whole = session.answer(wanted)
        del wanted
        return JSONResponse(api.whole(await whole, session.ref.name, body, session.spell))
    stream = ReplyStream(partial(session.answer, wanted))
    session.requests.add(stream.whole)
    stream.whole.add_done_callback(session.requests.discard)
    await stream.opened()
    events = _events(api, session, stream, body)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _events(api: AgentApi, session: Session, stream: ReplyStream, body: Body) -> AsyncIterator[bytes]:
    """Closing it, as when the agent disconnects, ends the sequences on the server."""
    events = api.events(stream, session.ref.name, body, session.spell)
    pending = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            if not (await asyncio.wait({pending}, timeout=PAUSE_S))[0]:
                yield b": held back\n\n"  # a comment: clients end a connection that is silent for long
            elif (event := pending.result()) is None:
                break
            else:
                yield event_bytes(event, named=api.named)
                pending = asyncio.ensure_future(anext(events, None))
        if not api.named:
            yield b"data: [DONE]\n\n"
    except GenerationFault as fault:
        session.fail(fault)
        yield event_bytes({"type": "error"} | api.error(503, str(fault), None, None), named=api.named)
    except asyncio.CancelledError:
        if not stream.whole.cancelled():  # else the session has ended
            raise
    finally:
        pending.cancel()
        stream.whole.cancel()


async def _count_tokens(session: Session, request: Request, body: Body) -> Response:
    wanted = parse_messages(body)
    return JSONResponse({"input_tokens": len(session.prompt(wanted).token_ids)})


async def _models(session: Session, request: Request, body: Body) -> Response:
    model = {"id": session.ref.name, "object": "model", "created": 0, "owned_by": "areal_lora"}
    name = request.path_params.get("name")
    if name is None:
        return JSONResponse({"object": "list", "data": [model]})
    if name != session.ref.name:
        raise AgentRequestError(404, f"there is no model {name!r} for this key, only {session.ref.name!r}")
    return JSONResponse(model)


async def _checked_body(session: Session, request: Request) -> Body:
    read = b"".join([part async for part in request.stream()])  # `request.body` would keep it
    if request.method == "GET":
        return {}
    try:
        body = msgspec.json.decode(read, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise AgentRequestError(400, str(error)) from None
    # An evaluation has its own sampling.
    check_fields(body, None if session.context.evaluating else session.context.sampling)
    return body


def _error(
    status: int, message: str, param: str | None = None, error_of: _ErrorBody = error_body, code: str | None = None
) -> Response:
    return JSONResponse(error_of(status, message, param, code), status_code=status)

"""Serve an ASGI app on a bound socket inside the event loop of its process; limit bodies, follow disconnects.

And what rollout servers and the service's gateway have in common: bodies, and a bound of what one request generates.
A body of 256 KiB can hold 65,000 prompts of 16,384 answers each: the list of their sequences alone ends a process.
"""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lora.errors import ConfigError

CLOSE_S = 2  # for running requests at a stop; uvicorn takes whole seconds


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: other parts of the process share its event loop.

    A connection without a request is closed after ``keep_alive_s``.
    """

    def __init__(self, app: ASGIApp, sock: socket.socket, tls: ssl.SSLContext | None, *, keep_alive_s: int = 5) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=keep_alive_s,
                timeout_graceful_shutdown=CLOSE_S,
                ssl_context_factory=None if tls is None else lambda config, default: tls,
            )
        )
        # Connections inherit it; asyncio sets it only where the socket names its protocol. Without it the body of an
        # answer waits 40 ms for the client to acknowledge the headers.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await super().serve([self._sock])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Abort idle TLS connections: otherwise each would wait for its client to close it, too."""
        for connection in list(self.server_state.connections):
            connection.shutdown()
            transport = connection.transport
            if transport is not None and transport.is_closing() and not transport.get_write_buffer_size():
                transport.abort()
        await super().shutdown(sockets)


def listening(host: str, port: int, key: str) -> socket.socket:
    """Bind ``port`` (0: any) of ``host``. Raises ConfigError about ``key`` for one that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        reason = f"port {port} of {host} cannot be bound: {os.strerror(error.errno or 0)}"
        raise ConfigError(key, reason, "choose another, or 0") from None


def header(scope: Scope, name: bytes) -> str:
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value.decode("latin-1")


def refusal(status: int, reason: str) -> Response:
    # The unread rest of a body must not be parsed as the next request.
    return Response(reason, status_code=status, headers={"Connection": "close"}, media_type="text/plain")


class BodyLimit:
    """Answer 413 to a body of more than ``max_bytes``; a body with a longer Content-Length is not read."""

    def __init__(self, app: ASGIApp, max_bytes: int, refuse: Callable[[int, str], Response] = refusal) -> None:
        self._app, self._max_bytes, self._refuse = app, max_bytes, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced, read = header(scope, b"content-length"), 0
        problem = f"the body is longer than {self._max_bytes} bytes"
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse(413, problem)(scope, receive, send)
            return

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise HTTPException(413, problem, {"Connection": "close"})
            return message

        await self._app(scope, limited, send)


async def unless_disconnected(
    request: Request, work: Coroutine[Any, Any, Response] | asyncio.Task[Response]
) -> Response:
    """The result of ``work`` for ``request``, whose body was read; cancel it when the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(request.receive())  # after the body the next message is the disconnect
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled():
            return task.result()
        task.cancel()
        await asyncio.wait({task})
        return Response(status_code=499)
    finally:
        task.cancel()
        disconnect.cancel()


LEAVING_HEADER = "X-Areal-Leaving"
"""Of a 503 of a rollout server's data plane: the server leaves, and has not answered."""


Prompt = str | list[str | int | list[int]]
"""Of a completion: a text, texts, token ids, or lists of token ids."""
DEFAULT_MAX_TOKENS = 16
"""Of a completion without a limit, as OpenAI has it; a chat's is the rest of the context."""
MOST_SEQUENCES = 1024
"""Prompts times answers per prompt."""
MOST_TOKENS = 1 << 24
"""Of all sequences with their prompts, times 1 + the likeliest tokens that come with each: about 5 GB of an answer."""


def too_large(n_prompts: int, n: int, tokens: int, logprobs: int = 0) -> str | None:
    """Why a request for ``n`` answers to ``n_prompts`` prompts is too large, with the limit and the fix.

    ``tokens`` are those of one answer to every prompt, with the prompts. ``logprobs`` count per token.
    """
    if n_prompts * n > MOST_SEQUENCES:
        return f"{n_prompts} prompts x n {n} exceed {MOST_SEQUENCES} sequences; send several requests"
    if n * tokens * (1 + max(0, logprobs)) > MOST_TOKENS:
        return (
            f"{n} x {tokens} tokens x {1 + max(0, logprobs)} log-probabilities exceed {MOST_TOKENS};"
            " lower n or max_tokens, or send several requests"
        )
    return None


def prompts_of(prompt: Prompt) -> list[str] | list[list[int]]:
    """One entry per prompt. Raises msgspec.ValidationError for a mixture."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    texts = [part for part in parts if isinstance(part, str)]
    numbers = [part for part in parts if isinstance(part, int)]
    lists = [part for part in parts if isinstance(part, list)]
    if len(parts) not in (len(texts), len(numbers), len(lists)):
        raise msgspec.ValidationError("prompt mixes texts, token ids and lists of token ids")
    return [numbers] if numbers else texts or lists


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of a completion: its text has to be JSON of the schema ``json``. The name is that of vLLM's servers."""

    json: dict[str, Any]


class ToolCallsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts of answers to requests with these ``tools``, in OpenAI's chat format."""

    parser: str
    tools: list[dict[str, Any]]
    texts: list[str]


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """``arguments`` is JSON."""

    name: str
    arguments: str


class ParsedText(msgspec.Struct, frozen=True, kw_only=True):
    """The tool calls in a text, and its content beside them."""

    content: str
    calls: list[ParsedCall] = []


class ToolCallsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    answers: list[ParsedText]

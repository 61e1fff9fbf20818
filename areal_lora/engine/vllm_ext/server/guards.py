"""Check a request to a rollout server before its route: the plane's key, then the length of the body."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lora.network.keys import Plane, authorized
from areal_lora.network.tls import on_loopback

MAX_DATA_BODY_BYTES = 64 << 20  # 32 prompts of an evaluation with 250,000 tokens each, as text


def guarded(data_app: ASGIApp, bind: str, secret: str, *, closed: bool = False) -> ASGIApp:
    """Guard the data plane for ``bind``: on loopback without a key, elsewhere with the key of the plane."""
    limited = BodyLimit(data_app, MAX_DATA_BODY_BYTES)
    return limited if on_loopback(bind) and not closed else BearerAuth(limited, secret, Plane.DATA)


class BearerAuth:
    """Answer 401 to any request without the key of ``plane``, before any other processing."""

    def __init__(self, app: ASGIApp, secret: str, plane: Plane) -> None:
        self._app, self._secret, self._plane = app, secret, plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not authorized(_header(scope, b"authorization"), self._secret, self._plane):
            await _refuse(401, f"missing or wrong key of the {self._plane} plane")(scope, receive, send)
            return
        await self._app(scope, receive, send)


class BodyLimit:
    """Answer 413 to a body of more than ``max_bytes``; a body with a longer Content-Length is not read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced, read = _header(scope, b"content-length"), 0
        if announced.isdigit() and int(announced) > self._max_bytes:
            await _refuse(413, self._problem)(scope, receive, send)
            return

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise HTTPException(413, self._problem, {"Connection": "close"})
            return message

        await self._app(scope, limited, send)

    @property
    def _problem(self) -> str:
        return f"the body is longer than {self._max_bytes} bytes"


def _header(scope: Scope, name: bytes) -> str:
    value: bytes = dict(scope["headers"]).get(name, b"")
    return value.decode("latin-1")


def _refuse(status: int, reason: str) -> Response:
    # The unread rest of a body must not be parsed as the next request.
    return Response(reason, status_code=status, headers={"Connection": "close"}, media_type="text/plain")

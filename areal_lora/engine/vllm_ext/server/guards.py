"""Check a request to a rollout server before its route: the plane's key, then the length of the body; answer errors."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_lora.errors import ManifestError
from areal_lora.network.addresses import on_loopback
from areal_lora.network.http_server import BodyLimit, header, refusal
from areal_lora.network.tls import Plane, authorized, bearer_key, ca_pem
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.weight_sync.messages import CONTENT_TYPE, RefusalReply

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
        if scope["type"] == "http" and not authorized(header(scope, b"authorization"), self._secret, self._plane):
            await refusal(401, f"missing or wrong key of the {self._plane} plane")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def refusals(statuses: Mapping[type[Exception], int]) -> Any:
    """Exception handlers of an app: the status of a known error with its text, of a ManifestError a `RefusalReply`.

    Any other error is a 500 with a traceback in the log.
    """

    async def refused(request: Request, error: Exception) -> Response:
        status = next(statuses[kind] for kind in type(error).__mro__ if kind in statuses)
        if isinstance(error, ManifestError):
            body = msgspec.msgpack.encode(RefusalReply(reason=error.reason, detail=error.detail))
            return Response(body, status_code=status, media_type=CONTENT_TYPE)
        return Response(str(error), status_code=status, media_type="text/plain")

    return dict.fromkeys(statuses, refused)


def write_client_files(run_folder: RunFolder, secret: str) -> None:
    """Write what a client outside the run needs for the data plane: certificate and bearer key (mode 0600)."""
    write_file(run_folder.ca, ca_pem(secret, Plane.DATA), mode=0o644)
    write_file(run_folder.data_key, bearer_key(secret, Plane.DATA), mode=0o600)

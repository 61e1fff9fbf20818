"""Calls of the SDK that this service does not have: refused by name, at once, with what to use instead.

The status is 422, because clients repeat everything from 500 on.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.service.http import Caller, Guard, Handler, body_of
from areal_lora.service.refused import RequestError
from areal_lora.service.tinker.checkpoints import STATE

_NO_BILLS, _NO_PROJECTS = "this service keeps no accounts", "sessions of this service are in no projects"
_AS_IT_IS = "keys are used as they are"
_CALLS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "publish": (
        f"{STATE}/publish",
        ("POST", "DELETE"),
        "saved states are of one tenant alone",
        "download the weights, and send them",
    ),
    "copy_weights": ("/api/v1/copy_weights", ("POST",), _NO_PROJECTS, "load the state where it is needed"),
    "project": ("/api/v1/sessions/{session}/project", ("PUT",), _NO_PROJECTS, "leave it out"),
    "trace_export": (
        "/api/v1/sessions/{session}/trace_export",
        ("GET",),
        "sessions are not traced",
        "use the records and traces of the run",
    ),
    "search_sessions": ("/api/v1/sessions/search", ("POST",), "sessions are not searched", "use list_sessions"),
    "create_custom_loss": (
        "/api/v1/create_custom_loss",
        ("POST",),
        "custom losses run at the client, as client/config has it",
        "use forward_backward_custom",
    ),
    "join_sampling_session": (
        "/api/v1/join_sampling_session",
        ("POST",),
        "clients choose their own numbers, as client/config has it",
        "leave it out",
    ),
    "retrieve_futures": (
        "/api/v1/retrieve_futures",
        ("POST",),
        "requests are retrieved one at a time, as client/config has it",
        "use retrieve_future",
    ),
    "forward": (
        "/api/v1/forward",
        ("POST",),
        "forward passes come as forward_backward, as client/config has it",
        "use an SDK version that the service page names",
    ),
    "auth_token": ("/api/v1/auth/token", ("POST",), _AS_IT_IS, "send X-API-Key"),
    "apikey": ("/api/v1/auth/apikey/me", ("GET", "DELETE"), _AS_IT_IS, "turn to the operator of the run"),
    "audit": ("/api/v1/audit", ("GET",), "there is no audit log", "use GET /v1/adapters"),
    "billing": ("/api/v1/billing/{what:path}", ("GET",), _NO_BILLS, "use the records of the run"),
}
"""Name: path, methods, reason, fix."""


class UnsupportedRoutes:
    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route(path, guard(_refuses(name, reason, fix)), methods=list(methods))
            for name, (path, methods, reason, fix) in _CALLS.items()
        ]


def _refuses(name: str, reason: str, fix: str) -> Handler:
    async def handle(request: Request, caller: Caller) -> Response:
        await body_of(request, caller, long=True)
        raise RequestError(422, name, reason, fix)

    return handle

"""Errors of the API: every one is typed, with path, reason and fix."""

import msgspec
from starlette.responses import Response

from areal_lora.errors import ArealLoraError


class RequestError(ArealLoraError):
    """A request that gets ``status`` and a body with path, reason and fix, and ``retry_s`` as ``Retry-After``."""

    def __init__(self, path: str, reason: str, fix: str = "", *, status: int = 422, retry_s: int | None = None) -> None:
        self.headers = {} if retry_s is None else {"Retry-After": str(retry_s)}
        self.status, self.path, self.reason, self.fix = status, path, reason, fix
        super().__init__(f"{path}: {reason}" + (f" (fix: {fix})" if fix else ""))

    def response(self) -> Response:
        body = msgspec.json.encode({"error": {"path": self.path, "reason": self.reason, "fix": self.fix}})
        return Response(body, self.status, self.headers, media_type="application/json")


class Unavailable(RequestError):
    """The service cannot read or write its files at present; the same request succeeds once it can."""

    def __init__(self, status: int, reason: str) -> None:
        fix = "repeat the request later; the operator frees or repairs the disk"
        super().__init__("service", reason, fix, status=status)


def internal_error() -> RequestError:
    fix = "repeat the request; the service's log has the traceback"
    return RequestError("service", "an internal error, nothing was changed", fix, status=500)


def unknown_adapter(name: str) -> RequestError:
    """Also for the adapters of others: that they exist is not shown."""
    return RequestError("name", f"there is no adapter {name!r}", "list the adapters with GET /v1/adapters", status=404)

"""Errors of the API: every one is typed, with path, reason and fix."""

from __future__ import annotations

import msgspec

from areal_lora.errors import ArealLoraError, ConfigError


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    reason: str
    fix: str


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    error: ErrorDetail


class Refused(ArealLoraError):
    """A request that gets ``status`` and an `ErrorBody`."""

    def __init__(self, status: int, path: str, reason: str, fix: str = "") -> None:
        self.status, self.path, self.reason, self.fix = status, path, reason, fix
        super().__init__(f"{path}: {reason}" + (f" (fix: {fix})" if fix else ""))

    @classmethod
    def of(cls, error: ConfigError) -> Refused:
        return cls(422, error.path, error.reason, error.fix)

    def body(self) -> bytes:
        return msgspec.json.encode(ErrorBody(error=ErrorDetail(path=self.path, reason=self.reason, fix=self.fix)))


def unknown_adapter(name: str) -> Refused:
    """Also for the adapters of others: that they exist is not said."""
    return Refused(404, "name", f"there is no adapter {name!r}", "list the adapters with GET /v1/adapters")

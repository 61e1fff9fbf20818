"""Read requests: who asks, a body that is not too long, JSON that is an object."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from areal_lora.processes.log import get_logger
from areal_lora.service.refused import Refused, internal_error
from areal_lora.service.rows import Key, Quota, Tables, digest_of

log = get_logger(__name__)

MOST_QUERY = 2048
MOST_KEY = 128
BODY_S = 60.0
"""A client that sends slower than that keeps no connection."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what they may."""

    key: Key
    quota: Quota

    @property
    def tenant(self) -> str:
        return self.key.tenant


Handler = Callable[[Request, Caller], Awaitable[Response]]
Guard = Callable[[Handler], Callable[[Request], Awaitable[Response]]]


def guard(tables: Callable[[], Tables], count: Callable[[str, Quota], None]) -> Guard:
    """Find the caller, ``count`` its request, which may refuse it, and turn refusals into their bodies."""

    def guarded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            who = caller(request, tables())
            count(who.tenant, who.quota)
            return await handler(request, who)

        return unguarded(handle)

    return guarded


def unguarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """For a path that admits its reader by itself; turns refusals and unexpected exceptions into typed bodies."""

    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Refused as refused:
            return Response(refused.body(), refused.status, refused.headers, media_type="application/json")
        except Exception:  # fault boundary: one request
            log.exception("%s %s failed", request.method, request.url.path)
            failed = internal_error()
            return Response(failed.body(), failed.status, media_type="application/json")

    return handle


def caller(request: Request, tables: Tables) -> Caller:
    """Raises Refused (401) for a key that is none. The tinker SDK sends its key as ``X-API-Key``."""
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    text = bearer if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    key = tables.keys.get(digest_of(text.strip()))
    if key is None:
        fix = "send Authorization: Bearer KEY, or X-API-Key: KEY, with a key that is valid"
        raise Refused(401, "Authorization", "the key is missing, or not valid", fix)
    if len(request.url.query) > MOST_QUERY:
        raise Refused(413, "query", f"it is longer than {MOST_QUERY} characters", "shorten it")
    return Caller(key=key, quota=tables.quotas[key.tenant])


async def read_body(request: Request, most: int) -> bytes:
    """The whole body. Raises Refused: 413 as soon as it is longer than ``most`` bytes, 408 if it does not come."""
    too_long = Refused(413, "body", f"it is longer than the quota of {most} bytes", "send less")
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or len(announced) > 15 or int(announced) > most:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > most:
                    raise too_long
    except TimeoutError:
        raise Refused(408, "body", f"it did not come within {BODY_S:g} s", "send it again") from None
    except ClientDisconnect:
        raise Refused(422, "body", "it ended early", "send it whole") from None
    return b"".join(parts)


def as_object(body: bytes) -> dict[str, Any]:
    """Raises Refused (422) for anything but a JSON object."""
    return decoded(body, dict[str, Any])


def decoded(body: bytes, kind: type[T]) -> T:
    try:
        found = msgspec.json.decode(body, type=kind)
        msgspec.json.encode(found)  # what cannot be written again, such as half a surrogate pair, is not kept
        msgspec.msgpack.encode(found)  # as are integers of more than 64 bits
    except (msgspec.MsgspecError, UnicodeError, OverflowError) as error:
        reason = f"it is no JSON of the right form: {str(error)[:200]}"
        raise Refused(422, "body", reason, "send a JSON object as the service page describes it") from None
    except RecursionError:
        raise Refused(422, "body", "it is nested too deeply", "flatten it") from None
    return found


def idempotency_key(request: Request) -> str:
    """The request's ``Idempotency-Key``; empty without one. Raises Refused for one that is too long or not ASCII."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return ""
    if not 0 < len(key) <= MOST_KEY or not key.isascii() or not key.isprintable():
        reason = f"it is not 1 to {MOST_KEY} printable ASCII characters"
        raise Refused(422, "Idempotency-Key", reason, "use a random text, such as a UUID")
    return key


def number(request: Request, name: str, default: int, most: int) -> int:
    """A whole number of the query, from 0 to ``most``. Raises Refused."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= most):
        raise Refused(422, name, f"{text[:32]!r} is no whole number from 0 to {most}", "correct the query")
    return int(text)


def fingerprint(*parts: str | bytes) -> str:
    """What has to be equal for two requests to be one."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8) + data)
    return hashed.hexdigest()

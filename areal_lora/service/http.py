"""HTTP requests and answers: the caller, a body that is not too long, JSON of the right form, streams in time."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from areal_lora.errors import RequestError, internal_error
from areal_lora.processes.log import get_logger
from areal_lora.service.queue.queue_rows import Key, Quota, Tables, digest_of

log = get_logger(__name__)

MAX_QUERY_LENGTH = 2048
MAX_KEY_LENGTH = 128
BODY_S = 60.0  # slower uploads time out
MAX_NOTES_BYTES = 16 << 10
STALL_S, STREAM_S = 60.0, 3600.0
"""A stream ends if its client reads nothing for so long, and at the latest: it holds a version, or files."""
JSON_FIX = "send a JSON object as the service page describes it"
SDK_FIX = "use an SDK version that the service page names"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of a key, its limits, and what its request holds until it is answered.

    ``bodies`` are the bytes of bodies in progress of every tenant, from the start of their arrival on.
    """

    key: Key
    quota: Quota
    bodies: Counter[str]
    held: ExitStack = field(default_factory=ExitStack)

    @property
    def tenant(self) -> str:
        return self.key.tenant


Answered: TypeAlias = Response | dict[str, Any]
"""A mapping is sent as JSON."""
JsonObject: TypeAlias = dict[str, Any]
Handler = Callable[[Request, Caller], Awaitable[Answered]]
Guard = Callable[[str, str, Handler], Route]
"""Method, path and handler."""


def guard(tables: Callable[[], Tables], count: Callable[[str, Quota], None]) -> Guard:
    """Routes that find the caller and ``count`` its request, which may refuse it."""
    bodies = Counter[str]()

    def guarded(method: str, path: str, handler: Handler) -> Route:
        async def handle(request: Request) -> Answered:
            caller = caller_of(request, tables(), bodies)
            count(caller.tenant, caller.quota)
            with caller.held:
                return await handler(request, caller)

        return unguarded(method, path, handle)

    return guarded


def unguarded(method: str, path: str, handler: Callable[[Request], Awaitable[Answered]]) -> Route:
    """For a path that admits its reader by itself; turns refusals and unexpected exceptions into typed bodies."""

    async def handle(request: Request) -> Response:
        try:
            found = await handler(request)
            return found if isinstance(found, Response) else answer(found)
        except RequestError as refused:
            return refusal(refused)
        except Exception:  # fault boundary: one request
            log.exception("%s %s failed", request.method, request.url.path)
            return refusal(internal_error())

    return Route(path, handle, methods=[method])


def answer(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def refusal(refused: RequestError) -> Response:
    body = msgspec.json.encode({"error": {"path": refused.path, "reason": refused.reason, "fix": refused.fix}})
    headers = {} if refused.retry_s is None else {"Retry-After": str(refused.retry_s)}
    return Response(body, refused.status, headers, media_type="application/json")


def caller_of(request: Request, tables: Tables, bodies: Counter[str]) -> Caller:
    """Raises RequestError (401) for a key that is none. The tinker SDK sends its key as ``X-API-Key``."""
    kind, _, bearer = request.headers.get("authorization", "").partition(" ")
    text = bearer if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    key = tables.keys.get(digest_of(text.strip()))
    if key is None:
        fix = "send Authorization: Bearer KEY, or X-API-Key: KEY, with a key that is valid"
        raise RequestError("Authorization", "the key is missing, or not valid", fix, status=401)
    if len(request.url.query) > MAX_QUERY_LENGTH:
        raise RequestError("query", f"it is longer than {MAX_QUERY_LENGTH} characters", "shorten it", status=413)
    return Caller(key=key, quota=tables.quotas[key.tenant], bodies=bodies)


async def body_of(request: Request, caller: Caller, *, long: bool = False, kept: bool = True) -> bytes:
    """The whole body, or b"" unless it is ``kept``; with ``long`` as long as one pass may be.

    Raises RequestError: 413 as soon as it is too long, 408 if it does not come, 429 if too many arrive at once.
    ``client/config`` disables compression: the service is on this machine.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("Content-Encoding", "compressed bodies are not read", "send it as it is")
    limit = (caller.quota.pass_kib if long else caller.quota.body_kib) << 10
    too_long = RequestError("body", f"it is longer than the quota of {limit} bytes", "send less", status=413)
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or len(announced) > 15 or int(announced) > limit:
        raise too_long
    if kept and (n_bytes := limit if "transfer-encoding" in request.headers else int(announced)):
        others, most_mib = caller.bodies[caller.tenant], caller.quota.queued_mib
        if others and others + n_bytes > most_mib << 20:  # the only one may always come
            reason = f"{most_mib} MiB of bodies in progress are the quota"
            raise RequestError("body", reason, "wait for requests in progress", status=429, retry_s=1)
        caller.bodies[caller.tenant] += n_bytes
        caller.held.callback(caller.bodies.subtract, {caller.tenant: n_bytes})
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                parts += [part] * kept
                size += len(part)
                if size > limit:
                    raise too_long
    except TimeoutError:
        raise RequestError("body", f"it did not come within {BODY_S:g} s", "send it again", status=408) from None
    except ClientDisconnect:
        raise RequestError("body", "it ended early", "send it whole") from None
    return b"".join(parts)


def decoded(body: bytes | Mapping[str, Any], kind: type[T], fix: str = JSON_FIX) -> T:
    """``body`` as ``kind``. Raises RequestError (422)."""
    try:
        found = msgspec.json.decode(body, type=kind) if isinstance(body, bytes) else msgspec.convert(body, kind)
        msgspec.json.encode(found)  # what cannot be written again, such as half a surrogate pair, is not kept
        msgspec.msgpack.encode(found)  # as are integers of more than 64 bits
    except (msgspec.MsgspecError, UnicodeError, OverflowError) as error:
        raise RequestError("body", f"it is no JSON of the right form: {str(error)[:200]}", fix) from None
    except RecursionError:
        raise RequestError("body", "it is nested too deeply", "flatten it") from None
    return found


def sdk_decoded(body: bytes | Mapping[str, Any], kind: type[T]) -> T:
    return decoded(body, kind, SDK_FIX)


def idempotency_key(request: Request) -> str:
    """The request's ``Idempotency-Key``; empty without one. Raises RequestError if too long or not ASCII."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return ""
    if not 0 < len(key) <= MAX_KEY_LENGTH or not key.isascii() or not key.isprintable():
        reason = f"it is not 1 to {MAX_KEY_LENGTH} printable ASCII characters"
        raise RequestError("Idempotency-Key", reason, "use a random text, such as a UUID")
    return key


def number(request: Request, name: str, default: int, most: int) -> int:
    """A whole number of the query, from 0 to ``most``. Raises RequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text) <= most):
        raise RequestError(name, f"{text[:32]!r} is no whole number from 0 to {most}", "correct the query")
    return int(text)


def fingerprint(*parts: str | bytes) -> str:
    """What has to be equal for two requests to be one."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hashed.update(len(data).to_bytes(8) + data)
    return hashed.hexdigest()


def notes_of(given: Mapping[str, Any] | None) -> dict[str, str]:
    """``user_metadata`` as texts, which the SDK reads. Raises RequestError for more than `MAX_NOTES_BYTES` bytes."""
    texts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in (given or {}).items()
    }
    if len(msgspec.json.encode(texts)) > MAX_NOTES_BYTES:
        raise RequestError("user_metadata", f"it is longer than {MAX_NOTES_BYTES} bytes", "keep it elsewhere")
    return texts


class Stream(StreamingResponse):
    """``pieces`` within the time limits; closes ``held`` at the end, also where the client has disconnected."""

    def __init__(
        self, pieces: AsyncIterator[bytes], held: ExitStack, media_type: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def in_time(message: Message) -> None:
            async with asyncio.timeout(STALL_S):
                await send(message)

        with self._held:
            try:
                async with asyncio.timeout(STREAM_S):
                    await super().__call__(scope, receive, in_time)
            except TimeoutError:
                log.warning("a stream has ended: its client did not read it in time")


class TenantRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/tenants``: a new tenant, or another quota of one. Keys left out are the defaults."""

    tenant: str
    quota: dict[str, int | float] = {}


class KeyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of ``POST /v1/tenants/TENANT/keys``. A label that exists gets a new key; the former one ends."""

    label: str = "default"

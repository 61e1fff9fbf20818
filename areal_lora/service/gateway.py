"""Inference for tenants: a request for an adapter goes to a server of the run, under the name that the run has for it.

Tenants do not reach the servers themselves: these serve every adapter, to whoever knows its name. Of a tenant's
inference the size of a request, tokens in progress and requests a minute are limited. Training rollouts come first: a
server starts a tenant's request as if it had arrived `generate.BACKGROUND_S` later.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Annotated, Any

import aiohttp
import msgspec
from starlette.responses import Response

from areal_lora.errors import RequestError
from areal_lora.network.addresses import bracketed
from areal_lora.network.http_server import DEFAULT_MAX_TOKENS, Prompt, prompts_of, too_large
from areal_lora.network.tls import Plane, authorization, client_context
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_files, read_endpoint, read_secret
from areal_lora.service.http import Stream
from areal_lora.service.queue.queue_rows import Quota
from areal_lora.types import AdapterRef

log = get_logger(__name__)

CONNECT_S = 5.0
JSON, EVENTS = "application/json", "text/event-stream"
RESERVED = ("pin_version", "background")
"""Fields of the run's own requests: to keep a version on the servers, and to order requests."""
NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
TRY_ANOTHER = (429, 503)  # statuses of a server that has not started the request
FAILED_S = 5.0  # a server comes last so long after a failure: without an engine it is the least busy one
HOMES, START_BYTES = 1 << 16, 256
BEHIND = 16
"""So many sequences more than the least busy server has cost less than computing the start of a prompt again."""


class Gateway:
    """``async with Gateway(run_folder)``. The server that has the start of the prompt in its prefix cache comes first,
    unless it is busy, then the least busy one, then the others, unless one has started.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self._folder = run_folder
        self._busy: Counter[str] = Counter()  # sequences
        self._homes: OrderedDict[int, str] = OrderedDict()  # by `_starts`, the last used at the end
        self._failed: dict[str, float] = {}  # when

    async def __aenter__(self) -> Gateway:
        secret = read_secret(self._folder)
        self._keyed = authorization(secret, Plane.DATA)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ssl=client_context(secret, Plane.DATA))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def forward(self, path: str, body: dict[str, Any], names: Names, held: ExitStack) -> Response:
        """The answer of a server to a tenant's ``body`` at ``path``. A stream closes ``held``. Raises RequestError."""
        if field := next((field for field in RESERVED if field in body), None):
            raise RequestError(field, "this field is for the run's own requests", "leave it out")
        found = await self._send(path, body, names)
        if isinstance(found, bytes):
            return Response(names.outward(found), media_type=JSON)
        url, response = found
        held.callback(self._leave, url, body.get("n", 1))
        held.callback(response.close)
        return Stream(_events(response, names), held.pop_all(), EVENTS)

    async def answer(self, path: str, body: dict[str, Any], names: Names) -> bytes:
        """The answer of a server to a ``body`` of the service itself, which requests no stream. Raises RequestError."""
        found = await self._send(path, body, names)
        if not isinstance(found, bytes):
            raise RequestError("model", "a server sent a stream", "try again", status=503)
        return found

    async def _send(self, path: str, body: dict[str, Any], names: Names) -> bytes | tuple[str, aiohttp.ClientResponse]:
        """What the first server that can answers: a whole body, or the server and its stream."""
        data = msgspec.json.encode(body | {"model": names.inner, "background": True})
        missing, n, starts = False, body.get("n", 1), _starts(names.inner, body)
        for url in self._servers(starts):
            self._busy[url] += n
            self._settle(starts, url)
            streams = False
            try:
                response, payload = await self._exchange(url, path, data)
                if streams := payload is None:
                    return url, response
            except NOT_SENT:
                continue
            finally:
                if not streams:
                    self._leave(url, n)
            if response.status == 200:
                return payload
            if response.status == 404:
                missing = True
            elif response.status not in TRY_ANOTHER:
                if response.status >= 500:
                    raise self._broken(url)
                raise RequestError("body", names.reason(payload), "correct the request")
        if missing:
            reason = f"no server holds {names.outer!r}: there is no version yet, or it is no longer served"
            fix = "request the newest version by the adapter's name, or download it"
            raise RequestError("model", reason, fix, status=404)
        raise RequestError("model", "no server of the run can answer now", "try again", status=503)

    async def _exchange(self, url: str, path: str, data: bytes) -> tuple[aiohttp.ClientResponse, bytes | None]:
        """The answer of the server at ``url`` with its body, or a stream with None.

        A request whose connection breaks may have ended its server, and would end the next one: it is repeated once,
        on the same server, if that is up, and on no other. Raises one of NOT_SENT if nothing was sent; RequestError.
        """
        keyed = self._keyed if url.startswith("https:") else {}
        for repeats in (False, True):
            try:
                response = await self._session.post(f"{url}{path}", data=data, headers={"Content-Type": JSON} | keyed)
                if response.status == 200 and response.content_type == EVENTS:
                    return response, None
                async with response:
                    return response, await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                if isinstance(error, NOT_SENT) and not repeats:
                    raise
                if not await self._is_up(url, keyed):
                    break
        raise self._broken(url)

    async def _is_up(self, url: str, keyed: dict[str, str]) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=CONNECT_S)
            async with self._session.get(f"{url}/health", headers=keyed, timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _servers(self, starts: list[int]) -> list[str]:
        urls = []
        for index in published_files(self._folder, "server"):
            if (endpoint := read_endpoint(self._folder, "server", index)) is not None and "data" in endpoint.ports:
                scheme = "https" if Plane.DATA in endpoint.tls else "http"
                urls.append(f"{scheme}://{bracketed(endpoint.host)}:{endpoint.ports['data']}")
        since = time.monotonic() - FAILED_S
        failed = {url for url in urls if self._failed.get(url, since) > since}
        urls.sort(key=lambda url: (url in failed, self._busy[url]))
        home = next((self._homes[start] for start in starts if start in self._homes), None)
        if home in urls and home not in failed and self._busy[home] - self._busy[urls[0]] <= BEHIND:
            urls.sort(key=lambda url: url != home)
        return urls

    def _broken(self, url: str) -> RequestError:
        self._failed[url] = time.monotonic()
        reason = "the server failed during this request"
        return RequestError("model", reason, "try again", status=502)

    def _settle(self, starts: list[int], url: str) -> None:
        for start in starts:
            self._homes[start] = url
            self._homes.move_to_end(start)
        while len(self._homes) > HOMES:
            self._homes.popitem(last=False)

    def _leave(self, url: str, n: int) -> None:
        self._busy[url] -= n
        if not self._busy[url]:
            del self._busy[url]


def _starts(model: str, body: dict[str, Any]) -> list[int]:
    """Digests of the prompt's start, at the two longest powers of two: what continues a prompt has one in common with
    it, up to twice its length; prompts that share less than a quarter have none. Prefix caches are of one version.
    """
    text = msgspec.json.encode(body.get("prompt", body.get("messages")))
    longest = 1 << len(text).bit_length() - 1
    return [hash((model, text[:n])) for n in (longest, longest // 2) if n >= START_BYTES]


async def _events(response: aiohttp.ClientResponse, names: Names) -> AsyncIterator[bytes]:
    parts = list[bytes]()
    async for data in response.content.iter_any():  # aiohttp's own lines have a largest length
        whole, end, rest = data.rpartition(b"\n")
        parts.append(whole if end else rest)
        if not end:
            continue  # of a long event: its parts are joined once
        lines, parts = b"".join(parts).split(b"\n"), [rest]
        for line in lines:
            before, _, rest = line.partition(b"data: ")
            yield (line if before or not rest.startswith(b"{") else b"data: " + names.outward(rest)) + b"\n"


class Names:
    """The name of one adapter outside, ``math`` or ``math@v3``, and the one that the run has for it."""

    def __init__(self, outer: str, name: str, key: str) -> None:
        self.outer, self._name, self._key = outer, name, key
        self.inner = key + outer.removeprefix(name)

    def outward(self, payload: bytes) -> bytes:
        """A JSON answer with the tenant's name of the model."""
        body = msgspec.json.decode(payload, type=dict[str, Any])
        if isinstance(model := body.get("model"), str):
            body["model"] = model.replace(self._key, self._name)
        return msgspec.json.encode(body)

    def reason(self, payload: bytes) -> str:
        try:
            body = msgspec.json.decode(payload, type=dict[str, Any])
            text = str(body["error"]["message"])
        except (msgspec.DecodeError, KeyError, TypeError):
            text = "the server refuses the request"
        return text.replace(self._key, self._name)


def split(model: str) -> str:
    """The adapter's name in ``model``, with or without a version."""
    try:
        return AdapterRef.parse(model).name
    except ValueError:
        return model


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _Size(msgspec.Struct, frozen=True, kw_only=True):
    """What the size of a body for the data plane is made of."""

    prompt: Prompt | None = None
    n: _Count = 1
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    logprobs: bool | _Count | None = None
    top_logprobs: _Count = 0


def n_tokens(body: dict[str, Any], context: int) -> int:
    """Tokens that ``body`` requests, prompts included, times 1 + their log-probabilities.

    ``context`` is what a sequence may have; an answer without a limit counts as long, and so does a text with as many
    bytes. Raises RequestError.
    """
    try:
        size = msgspec.convert(body, _Size)
        prompts = [] if size.prompt is None else prompts_of(size.prompt)
    except msgspec.ValidationError as error:
        raise RequestError("body", str(error), "correct the request") from None
    if size.prompt is None:  # a chat, where the data plane takes 0 for no limit
        n_prompts, n_read = 1, min(context, len(msgspec.json.encode(body.get("messages"))))
        n_new = size.max_completion_tokens or size.max_tokens or context
    else:
        n_prompts = len(prompts)
        n_read = sum(min(context, len(each.encode())) if isinstance(each, str) else len(each) for each in prompts)
        n_new = DEFAULT_MAX_TOKENS if size.max_tokens is None else size.max_tokens
    top = size.top_logprobs if isinstance(size.logprobs, bool) else size.logprobs or 0
    tokens = n_read + n_prompts * n_new
    if reason := too_large(n_prompts, size.n, tokens, top):
        reason, _, fix = reason.partition("; ")
        raise RequestError("n", reason, fix)
    return size.n * tokens * (1 + top)


class Meter:
    """Tokens in progress and requests of every tenant."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: Counter[str] = Counter()
        self._spent: dict[str, tuple[float, float]] = {}

    def request(self, tenant: str, quota: Quota) -> None:
        """Count one request. Raises RequestError (429) above ``quota.requests`` a minute, which may come at once."""
        now, rate = self._clock(), quota.requests / 60
        at, spent = self._spent.get(tenant, (now, 0.0))
        spent = max(0.0, spent - (now - at) * rate) + 1
        if spent > quota.requests:
            reason = f"{quota.requests} requests a minute are the quota"
            fix = "send fewer"
            raise RequestError("requests", reason, fix, status=429, retry_s=math.ceil((spent - quota.requests) / rate))
        self._spent[tenant] = now, spent

    def start(self, tenant: str, tokens: int, quota: Quota | None = None) -> None:
        """Count ``tokens`` as in progress until `end`. Raises RequestError where they exceed ``quota``."""
        if quota is not None and tokens > quota.tokens:
            reason = f"{tokens} tokens are above the quota of {quota.tokens}"
            raise RequestError("tokens", reason, "lower n or max_tokens, or send several requests")
        if quota is not None and self._tokens[tenant] + tokens > quota.tokens:
            reason = f"{quota.tokens} tokens in progress are the quota"
            raise RequestError("tokens", reason, "wait for requests in progress", status=429, retry_s=1)
        self._tokens[tenant] += tokens

    def end(self, tenant: str, tokens: int) -> None:
        self._tokens[tenant] -= tokens
        if not self._tokens[tenant]:
            del self._tokens[tenant]

"""Inference for tenants: a request for an adapter goes to a server of the run, under the name that the run has for it.

Tenants do not reach the servers themselves: these serve every adapter, to whoever knows its name.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
from starlette.responses import Response, StreamingResponse

from areal_lora.network.keys import Plane, authorization
from areal_lora.network.tls import client_context
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import published_indices, read_endpoint, read_secret
from areal_lora.service.refused import Refused
from areal_lora.types import AdapterRef

CONNECT_S = 5.0
JSON, EVENTS = "application/json", "text/event-stream"
RESERVED = ("pin_version",)
"""Fields that keep a version on the servers; they belong to the run's evaluations."""


class Gateway:
    """``async with Gateway(run_folder)``. The least busy server is asked first, the others if it cannot answer."""

    def __init__(self, run_folder: RunFolder) -> None:
        self._folder = run_folder
        self._busy: Counter[str] = Counter()

    async def __aenter__(self) -> Gateway:
        secret = read_secret(self._folder)
        self._keyed = authorization(secret, Plane.DATA)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ssl=client_context(secret, Plane.DATA))
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._session.close()

    async def forward(self, path: str, body: dict[str, Any], names: Names) -> Response:
        """The answer of a server to a tenant's ``body`` at ``path``. Raises Refused."""
        if field := next((field for field in RESERVED if field in body), None):
            raise Refused(422, field, "this field is for the run's own requests", "leave it out")
        found = await self._asked(path, body, names)
        if isinstance(found, bytes):
            return Response(names.outward(found), media_type=JSON)
        return StreamingResponse(self._events(*found, names), media_type=EVENTS)

    async def answer(self, path: str, body: dict[str, Any], names: Names) -> bytes:
        """The answer of a server to a ``body`` of the service's own, which asks for no stream. Raises Refused."""
        found = await self._asked(path, body, names)
        if isinstance(found, bytes):
            return found
        raise Refused(503, "model", "a server sent a stream", "try again")

    async def _asked(self, path: str, body: dict[str, Any], names: Names) -> bytes | tuple[str, aiohttp.ClientResponse]:
        """What the first server that can answers: a whole body, or the server and its stream."""
        data = msgspec.json.encode(body | {"model": names.inner})
        missing = False
        for url in self._servers():
            self._busy[url] += 1
            try:
                response = await self._session.post(
                    f"{url}{path}",
                    data=data,
                    headers={"Content-Type": JSON} | (self._keyed if url.startswith("https:") else {}),
                )
            except (aiohttp.ClientError, TimeoutError):
                self._leave(url)
                continue
            except asyncio.CancelledError:
                self._leave(url)
                raise
            if response.status == 200 and response.content_type == EVENTS:
                return url, response
            try:
                async with response:
                    payload = await response.read()
            except (aiohttp.ClientError, TimeoutError):
                continue
            finally:
                self._leave(url)
            if response.status == 200:
                return payload
            if response.status == 404:
                missing = True
            elif response.status < 500 and response.status != 429:
                raise Refused(422, "body", names.reason(payload), "correct the request")
        if missing:
            reason = f"no server holds {names.asked!r}: there is no version yet, or it is no longer served"
            raise Refused(404, "model", reason, "ask for the newest version by the adapter's name, or download it")
        raise Refused(503, "model", "no server of the run can answer now", "try again")

    async def _events(self, url: str, response: aiohttp.ClientResponse, names: Names) -> AsyncIterator[bytes]:
        """The lines of a stream; a client that goes away ends the request at the server."""
        try:
            async with response:
                async for line in response.content:
                    begin, _, rest = line.partition(b"data: ")
                    yield line if begin or not rest.startswith(b"{") else b"data: " + names.outward(rest) + b"\n"
        finally:
            self._leave(url)

    def _servers(self) -> list[str]:
        urls = []
        for index in published_indices(self._folder, "server"):
            if (endpoint := read_endpoint(self._folder, "server", index)) is not None and "data" in endpoint.ports:
                scheme = "https" if Plane.DATA in endpoint.tls else "http"
                host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
                urls.append(f"{scheme}://{host}:{endpoint.ports['data']}")
        return sorted(urls, key=lambda url: self._busy[url])

    def _leave(self, url: str) -> None:
        self._busy[url] -= 1
        if not self._busy[url]:
            del self._busy[url]


class Names:
    """The name of one adapter outside, ``math`` or ``math@v3``, and the one that the run has for it."""

    def __init__(self, asked: str, name: str, key: str) -> None:
        self.asked, self._name, self._key = asked, name, key
        self.inner = key + asked.removeprefix(name)

    def outward(self, payload: bytes) -> bytes:
        """A JSON answer with the tenant's name of the model."""
        body = msgspec.json.decode(payload, type=dict[str, Any])
        if isinstance(model := body.get("model"), str):
            body["model"] = model.replace(self._key, self._name)
        return msgspec.json.encode(body)

    def reason(self, payload: bytes) -> str:
        """What a server says is wrong."""
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

"""Saved states as archives: a request with a key returns an address, which anyone may read for a while.

    GET .../checkpoints/KIND/NAME/archive                with the tenant's key  --> {"url", "expires"}
    GET .../checkpoints/KIND/NAME/external_weights_urls  with the tenant's key  --> {"urls": {FILE: url}, "expires"}
    GET /api/v1/archives/TOKEN                           without a key          --> a tar: PEFT files, no pickle; or one

The SDK's programs open the address with other tools, which have no key. It is signed with a key of this run, so it
names what may be read, and until when; a state that was dropped or replaced meanwhile is not sent.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.network.keys import derived_key
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.service.age import SUFFIX
from areal_lora.service.download import FILES, Downloads, downloaded, open_archive
from areal_lora.service.http import Caller, Guard, unguarded
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_rows import SavedState
from areal_lora.service.refused import RequestError
from areal_lora.service.tinker.checkpoints import STATE, path_of_request
from areal_lora.service.tinker.exports import keys_in, seen_through
from areal_lora.service.tinker.sdk_answers import answered

OPEN_S = 900.0
AT_ONCE = 2
MAX_TOKEN = 2048


class Permission(msgspec.Struct, frozen=True, array_like=True):
    """What an address may read; ``label`` changes when the name is used again.

    With ``file`` that one alone, encrypted to ``keys`` if there are any.
    """

    tenant: str
    path: str
    label: str
    until_s: float
    file: str = ""
    keys: tuple[str, ...] = ()


class Archives:
    def __init__(self, queue: RequestQueue, config: Config, run_folder: RunFolder) -> None:
        self._queue, self._config, self._folder = queue, config, run_folder
        self._key = derived_key(read_secret(run_folder), "archive addresses")
        self._heavy = asyncio.Semaphore(AT_ONCE)
        self._downloads = Downloads()

    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route(f"{STATE}/archive", guard(self.address), methods=["GET"]),
            Route(f"{STATE}/external_weights_urls", guard(self.addresses), methods=["GET"]),
            Route("/api/v1/archives/{token}", unguarded(self.send), methods=["GET"]),
        ]

    async def address(self, request: Request, caller: Caller) -> Response:
        path, until_s = path_of_request(request), time.time() + OPEN_S
        state = await self._queue.change(lambda tx: tx.state(caller.tenant, path))
        url = self._url(request, Permission(caller.tenant, state.path, state.label, until_s))
        return answered({"url": url, "expires": _time(until_s)})

    async def addresses(self, request: Request, caller: Caller) -> Response:
        path, keys = seen_through(**request.path_params)
        state, until_s = await self._queue.change(lambda tx: tx.state(caller.tenant, path)), time.time() + OPEN_S
        keys = keys or keys_in(state.notes)
        may = Permission(caller.tenant, state.path, state.label, until_s, keys=keys)
        urls = {
            f"{file}{SUFFIX if keys else ''}": self._url(request, msgspec.structs.replace(may, file=file))
            for file in FILES
        }
        return answered({"urls": urls, "expires": _time(until_s)})

    async def send(self, request: Request) -> Response:
        may = self._permitted(request.path_params["token"])
        state = await self._still(may)
        with self._downloads.hold(may.tenant) as held:
            async with self._heavy:
                opened = await asyncio.to_thread(open_archive, self._folder, self._config, state.adapter, state.label)
            held.callback(opened.close)
            if may.file:
                return downloaded(opened.one(may.file, may.keys), held.pop_all(), "application/octet-stream")
            headers = {"Content-Disposition": 'attachment; filename="checkpoint.tar"'}
            return downloaded(opened.chunks(), held.pop_all(), "application/x-tar", headers)

    def _url(self, request: Request, permission: Permission) -> str:
        return f"{request.base_url}api/v1/archives/{self.signed(permission)}"

    def signed(self, permission: Permission) -> str:
        data = msgspec.msgpack.encode(permission)
        return base64.urlsafe_b64encode(self._mac(data) + data).decode().rstrip("=")

    def _permitted(self, token: str) -> Permission:
        """Raises RequestError: 404 for an address that this run has not given, 410 for one whose time is over."""
        unknown = RequestError(404, "token", "there is no such archive", "request its address again")
        if len(token) > MAX_TOKEN or not token.isascii():
            raise unknown
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True)
        except ValueError:
            raise unknown from None
        mac, data = raw[:32], raw[32:]
        if not hmac.compare_digest(mac, self._mac(data)):
            raise unknown
        may = msgspec.msgpack.decode(data, type=Permission)
        if may.until_s < time.time():
            raise RequestError(410, "token", "the time of this address is over", "request it again")
        return may

    async def _still(self, may: Permission) -> SavedState:
        state = await self._queue.change(lambda tx: tx.state(may.tenant, may.path))
        if state.label != may.label:
            raise RequestError(
                410, "token", "another state was saved under this name since", "request its address again"
            )
        return state

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()

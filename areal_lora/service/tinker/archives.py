"""Saved states as archives: an address with a key asks for one, and whoever has that address may read it for a while.

    GET .../checkpoints/KIND/NAME/archive   with the tenant's key  --> {"url", "expires"}
    GET /api/v1/archives/TOKEN              without a key          --> a tar: PEFT files, no pickle

The SDK's programs open the address with other tools, which have no key. It is signed with a key of this run, so it
says what may be read, and until when; a state that was dropped or replaced meanwhile is not sent.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from datetime import UTC, datetime

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.network.keys import derived_key
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.service.desk.desk import Desk
from areal_lora.service.desk.rows import Saved
from areal_lora.service.download import open_archive, sent
from areal_lora.service.refused import Refused
from areal_lora.service.requests import Caller, Guard, unguarded
from areal_lora.service.tinker.answers import answered
from areal_lora.service.tinker.checkpoints import STATE, path_of_request

OPEN_S = 900.0
AT_ONCE = 2
MOST_TOKEN = 2048


class Permission(msgspec.Struct, frozen=True, array_like=True):
    """What an address may read; ``label`` changes when the name is used again."""

    tenant: str
    path: str
    label: str
    until_s: float


class Archives:
    def __init__(self, desk: Desk, config: Config, run_folder: RunFolder) -> None:
        self._desk, self._config, self._folder = desk, config, run_folder
        self._key = derived_key(read_secret(run_folder), "archive addresses")
        self._heavy = asyncio.Semaphore(AT_ONCE)

    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route(f"{STATE}/archive", guard(self.address), methods=["GET"]),
            Route("/api/v1/archives/{token}", unguarded(self.send), methods=["GET"]),
        ]

    async def address(self, request: Request, who: Caller) -> Response:
        state, until_s = await self._desk.saved_at(who.tenant, path_of_request(request)), time.time() + OPEN_S
        token = self.signed(Permission(who.tenant, state.path, state.label, until_s))
        url = f"{request.base_url}api/v1/archives/{token}"
        return answered({"url": url, "expires": datetime.fromtimestamp(until_s, UTC).isoformat()})

    async def send(self, request: Request) -> Response:
        may = self._permitted(request.path_params["token"])
        state = await self._still(may)
        async with self._heavy:
            opened = await asyncio.to_thread(open_archive, self._folder, self._config, state.adapter, state.label)
        headers = {"Content-Disposition": 'attachment; filename="checkpoint.tar"'}
        return StreamingResponse(sent(opened), media_type="application/x-tar", headers=headers)

    def signed(self, permission: Permission) -> str:
        data = msgspec.msgpack.encode(permission)
        return base64.urlsafe_b64encode(self._mac(data) + data).decode().rstrip("=")

    def _permitted(self, token: str) -> Permission:
        """Raises Refused: 404 for an address that this run has not given, 410 for one whose time is over."""
        unknown = Refused(404, "token", "there is no such archive", "ask for its address again")
        if len(token) > MOST_TOKEN or not token.isascii():
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
            raise Refused(410, "token", "the time of this address is over", "ask for it again")
        return may

    async def _still(self, may: Permission) -> Saved:
        state = await self._desk.saved_at(may.tenant, may.path)
        if state.label != may.label:
            raise Refused(410, "token", "another state was saved under this name since", "ask for its address again")
        return state

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")

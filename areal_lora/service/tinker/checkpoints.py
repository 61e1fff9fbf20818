"""Sessions, models and saved states, as the SDK's REST client lists and deletes them; saved states as downloads.

    load_weights of a download         --> its new model is another name of the state; no adapter is made
    save_weights_external of that one  --> MODEL/external_weights/NAME~KEY~..., another name of the state and its keys
    save_weights_external of a model   --> a saved state like any other; its notes have the keys

The SDK's downloads (since 0.38) load a state into a new model only to save it in another form. Here that needs neither
a place nor the trainer: nothing is made, and so there is nothing to delete or to expire.

    GET .../checkpoints/KIND/NAME/archive                with the tenant's key  --> {"url", "expires"}
    GET .../checkpoints/KIND/NAME/external_weights_urls  with the tenant's key  --> {"urls": {FILE: url}, "expires"}
    GET /api/v1/archives/TOKEN                           without a key          --> a tar: PEFT files, no pickle; or one

The SDK's programs open an address with other tools, which have no key. It is signed with a key of this run, so it names
what may be read, and until when; a state that was dropped or replaced meanwhile is not sent.
"""

import base64
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from cryptography.fernet import Fernet, InvalidToken
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.errors import RequestError
from areal_lora.network.tls import derived_key
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.service import download
from areal_lora.service.http import Answered, Caller, Guard, body_of, notes_of, number, sdk_decoded, unguarded
from areal_lora.service.queue import client_sessions
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_rows import SCHEME, Kind, Model, SavedState, model_id
from areal_lora.service.queue.queue_store import SAMPLERS, SESSIONS
from areal_lora.service.queue.requests import ActionResult
from areal_lora.service.tinker import sdk_bodies
from areal_lora.service.tinker.sample_tasks import Base, of_attention

EXTERNAL = "external_weights"
KEYS = "age_encryption_recipients"  # of the notes of a state whose files are to be encrypted
BETWEEN = "~"  # in no name of a state, and in no key
MAX_DOWNLOADS = 64  # downloads of a tenant that are remembered


class Exports:
    """Models of downloads. They are in memory: after a restart of the service a download starts again."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], SavedState] = {}

    def start(self, tenant: str, session: str, seq: int, state: SavedState) -> str:
        """The id of a request that is answered."""
        mine = [key for key in self._states if key[0] == tenant]
        for key in mine[: len(mine) - MAX_DOWNLOADS + 1]:
            del self._states[key]
        self._states[tenant, model := model_id(session, seq)] = state
        return f"{model}:export"

    def state(self, tenant: str, model: str) -> SavedState | None:
        return self._states.get((tenant, model))

    def save(self, tenant: str, model: str, keys: Sequence[str] | None) -> str | None:
        """As `start`; None for a model that is none of a download. Raises RequestError for keys that are none."""
        if (state := self.state(tenant, model)) is None:
            return None
        return f"{SCHEME}{state.model}/{EXTERNAL}/{BETWEEN.join((state.name, *keys_of(keys)))}"

    def answer(self, tenant: str, request: str) -> ActionResult | None:
        """None for a request that is not one of these."""
        model = request.removesuffix(":export")
        if (tenant, model) in self._states:
            return ActionResult(model=model)
        return ActionResult(path=request) if request.startswith(SCHEME) else None


def keys_of(given: Sequence[str] | None) -> tuple[str, ...]:
    """Raises RequestError for what is no key of age."""
    keys = tuple(given or ())
    if len(keys) > download.MAX_RECIPIENTS:
        raise RequestError(KEYS, f"there are {len(keys)}", f"give up to {download.MAX_RECIPIENTS}")
    for key in keys:
        download.recipient_key(key)
    return keys


def seen_through(model: str, kind: str, name: str) -> tuple[str, tuple[str, ...]]:
    """The path of the saved state that a name of external weights stands for, and its keys. Raises RequestError."""
    kept, *keys = name.split(BETWEEN)
    return f"{SCHEME}{model}/{Kind.WEIGHTS if kind == EXTERNAL else kind}/{kept}", keys_of(keys)


MAX_OFFSET = 10**6
PAGE = 100
RUNS = "/api/v1/training_runs"
STATE: str = f"{RUNS}/{{model}}/checkpoints/{{kind}}/{{name}}"


class Checkpoints:
    def __init__(self, queue: RequestQueue, base: Base) -> None:
        self._queue, self._base = queue, base

    def routes(self, guard: Guard) -> list[Route]:
        return [
            guard("GET", "/api/v1/sessions", self.list_sessions),
            guard("GET", "/api/v1/sessions/{session}", self.session),
            guard("GET", RUNS, self.runs),
            guard("GET", f"{RUNS}/{{model}}", self.run),
            guard("GET", f"{RUNS}/{{model}}/checkpoints", self.of_run),
            guard("DELETE", STATE, self.delete),
            guard("PUT", f"{STATE}/ttl", self.expire),
            guard("GET", "/api/v1/checkpoints", self.all),
            guard("POST", "/api/v1/weights_info", self.weights_info),
        ]

    async def list_sessions(self, request: Request, caller: Caller) -> Answered:
        """Newest first."""
        found = await self._queue.change(lambda tx: SESSIONS.select(tx.db, "tenant = ?", caller.tenant))
        page, _ = _page(request, found[::-1])
        return {"sessions": [each.session for each in page]}

    async def session(self, request: Request, caller: Caller) -> Answered:
        """Also one that has ended."""
        name = request.path_params["session"]
        session = await self._queue.change(lambda tx: tx.session(caller.tenant, name, ended=True))
        models = await self._queue.change(lambda tx: tx.models("session = ? AND of_state IS NULL", name))
        samplers = await self._queue.change(lambda tx: SAMPLERS.select(tx.db, "session = ?", name))
        about = msgspec.json.decode(session.about or b"{}", type=sdk_bodies.CreateSession)
        return {
            "training_run_ids": [each.model for each in models],
            "sampler_ids": [each.sampler for each in samplers],
            "user_metadata": notes_of(about.user_metadata),
            "display_name": about.display_name,
        }

    async def runs(self, request: Request, caller: Caller) -> Answered:
        """Newest first; also those that have left, for as long as the queue has them."""
        found = await self._queue.change(lambda tx: tx.models("tenant = ? AND of_state IS NULL", caller.tenant))
        saved = await self._saved(caller)
        page, cursor = _page(request, found[::-1])
        return {"training_runs": [self._run(caller, model, saved) for model in page], "cursor": cursor}

    async def run(self, request: Request, caller: Caller) -> Answered:
        name = request.path_params["model"]
        model = await self._queue.change(lambda tx: tx.model(caller.tenant, name, removed=True))
        return self._run(caller, model, await self._saved(caller, model.model))

    async def of_run(self, request: Request, caller: Caller) -> Answered:
        """Also of a model that has left."""
        saved = await self._saved(caller, request.path_params["model"])
        return {"checkpoints": [_checkpoint(each) for each in saved]}

    async def all(self, request: Request, caller: Caller) -> Answered:
        """Newest first."""
        page, cursor = _page(request, (await self._saved(caller))[::-1])
        return {"checkpoints": [_checkpoint(each) for each in page], "cursor": cursor}

    async def delete(self, request: Request, caller: Caller) -> Answered:
        if not await self._external(request, caller):
            path = path_of_request(request)
            await self._queue.change(lambda tx: client_sessions.expire(tx, tx.state(caller.tenant, path)))
        return Response(status_code=204)

    async def expire(self, request: Request, caller: Caller) -> Answered:
        body = sdk_decoded(await body_of(request, caller), sdk_bodies.Ttl)
        if not await self._external(request, caller):
            path = path_of_request(request)
            await self._queue.change(lambda tx: client_sessions.set_ttl(tx, caller.tenant, path, body.ttl_seconds))
        return Response(status_code=204)

    async def _external(self, request: Request, caller: Caller) -> bool:
        """Whether the URL names external weights, which are nothing but another name of a state: that one stays."""
        if request.path_params["kind"] != EXTERNAL:
            return False
        path, _ = seen_through(**request.path_params)
        await self._queue.change(lambda tx: tx.state(caller.tenant, path))
        return True

    async def weights_info(self, request: Request, caller: Caller) -> Answered:
        body = sdk_decoded(await body_of(request, caller), sdk_bodies.Path)
        lora = await self._queue.change(lambda tx: tx.state(caller.tenant, body.tinker_path).lora)
        attention = [of_attention(target) for target in lora.target_modules]
        trained = {"train_unembed": False, "train_attn": any(attention), "train_mlp": not all(attention)}
        return self._base.about(lora) | trained

    async def _saved(self, caller: Caller, model: str | None = None) -> list[SavedState]:
        return await self._queue.change(lambda tx: client_sessions.saved(tx, caller.tenant, model))

    def _run(self, caller: Caller, model: Model, saved: Sequence[SavedState]) -> dict[str, Any]:
        mine = [each for each in saved if each.model == model.model]
        newest = {each.kind: _checkpoint(each) for each in sorted(mine, key=lambda state: state.created_s)}
        return {
            **self._base.about(model.lora),
            "training_run_id": model.model,
            "model_owner": caller.tenant,
            "last_request_time": _time(max([model.created_s, *(state.created_s for state in mine)])),
            "last_checkpoint": newest.get(Kind.WEIGHTS),
            "last_sampler_checkpoint": newest.get(Kind.SAMPLER),
            "user_metadata": model.notes,
        }


def _checkpoint(saved: SavedState) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": "training" if saved.kind is Kind.WEIGHTS else "sampler",
        "time": _time(saved.created_s),
        "tinker_path": saved.path,
        "size_bytes": saved.n_bytes,
        "public": False,
        "user_metadata": saved.notes,
        "expires_at": None if saved.expires_s is None else _time(saved.expires_s),
    }


def _page(request: Request, found: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    limit, offset = number(request, "limit", PAGE, MAX_OFFSET), number(request, "offset", 0, MAX_OFFSET)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def path_of_request(request: Request) -> str:
    """The path of the saved state that the URL names."""
    return SCHEME + "{model}/{kind}/{name}".format(**request.path_params)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


OPEN_S = 900.0


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
        key = derived_key(read_secret(run_folder), "archive addresses")
        self._sealed = Fernet(base64.urlsafe_b64encode(key))
        self._downloads = download.Downloads()

    def routes(self, guard: Guard) -> list[Route]:
        return [
            guard("GET", f"{STATE}/archive", self.address),
            guard("GET", f"{STATE}/external_weights_urls", self.addresses),
            unguarded("GET", "/api/v1/archives/{token}", self.send),
        ]

    async def address(self, request: Request, caller: Caller) -> Answered:
        path, until_s = path_of_request(request), time.time() + OPEN_S
        state = await self._queue.change(lambda tx: tx.state(caller.tenant, path))
        url = self._url(request, Permission(caller.tenant, state.path, state.label, until_s))
        return {"url": url, "expires": _time(until_s)}

    async def addresses(self, request: Request, caller: Caller) -> Answered:
        path, keys = seen_through(**request.path_params)
        state, until_s = await self._queue.change(lambda tx: tx.state(caller.tenant, path)), time.time() + OPEN_S
        keys = keys or (tuple(state.notes[KEYS].split(BETWEEN)) if KEYS in state.notes else ())
        may = Permission(caller.tenant, state.path, state.label, until_s, keys=keys)
        urls = {
            f"{file}{download.SUFFIX if keys else ''}": self._url(request, msgspec.structs.replace(may, file=file))
            for file in download.FILES
        }
        return {"urls": urls, "expires": _time(until_s)}

    async def send(self, request: Request) -> Answered:
        may = self.permitted(request.path_params["token"])
        state = await self._queue.change(lambda tx: tx.state(may.tenant, may.path))
        if state.label != may.label:
            reason = "another state was saved under this name since"
            raise RequestError("token", reason, "request its address again", status=410)
        work = partial(download.open_archive, self._folder, self._config, state.adapter, state.label)
        async with self._downloads.opened(may.tenant, work) as (opened, held):
            if may.file:
                return download.downloaded(opened.one(may.file, may.keys), held.pop_all(), "application/octet-stream")
            headers = {"Content-Disposition": 'attachment; filename="checkpoint.tar"'}
            return download.downloaded(opened.chunks(), held.pop_all(), "application/x-tar", headers)

    def _url(self, request: Request, permission: Permission) -> str:
        return f"{request.base_url}api/v1/archives/{self.signed(permission)}"

    def signed(self, permission: Permission) -> str:
        return self._sealed.encrypt(msgspec.msgpack.encode(permission)).decode().rstrip("=")

    def permitted(self, token: str) -> Permission:
        """Raises RequestError: 404 for an address that this run has not given, 410 for one whose time is over."""
        padded = token.encode(errors="replace") + b"=" * (-len(token) % 4)
        try:
            may = msgspec.msgpack.decode(self._sealed.decrypt(padded), type=Permission)
        except InvalidToken:
            raise RequestError("token", "there is no such archive", "request its address again", status=404) from None
        if may.until_s < time.time():
            raise RequestError("token", "the time of this address is over", "request it again", status=410)
        return may

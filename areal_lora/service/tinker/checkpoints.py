"""Sessions, models and saved states, as the SDK's REST client lists and deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.service.http import Caller, Guard, body_of, notes_of, number, sdk_decoded
from areal_lora.service.queue import client_sessions
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_rows import SCHEME, Kind, Model, SavedState
from areal_lora.service.queue.sequencer import set_ttl
from areal_lora.service.tinker import sdk_bodies
from areal_lora.service.tinker.base_model import Base
from areal_lora.service.tinker.exports import EXTERNAL, seen_through
from areal_lora.service.tinker.sdk_answers import answered

MAX_OFFSET = 10**6
PAGE = 100
RUNS = "/api/v1/training_runs"
STATE = f"{RUNS}/{{model}}/checkpoints/{{kind}}/{{name}}"


class Checkpoints:
    def __init__(self, queue: RequestQueue, base: Base) -> None:
        self._queue, self._base = queue, base

    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route("/api/v1/sessions", guard(self.list_sessions), methods=["GET"]),
            Route("/api/v1/sessions/{session}", guard(self.session), methods=["GET"]),
            Route(RUNS, guard(self.runs), methods=["GET"]),
            Route(f"{RUNS}/{{model}}", guard(self.run), methods=["GET"]),
            Route(f"{RUNS}/{{model}}/checkpoints", guard(self.of_run), methods=["GET"]),
            Route(STATE, guard(self.delete), methods=["DELETE"]),
            Route(f"{STATE}/ttl", guard(self.expire), methods=["PUT"]),
            Route("/api/v1/checkpoints", guard(self.all), methods=["GET"]),
            Route("/api/v1/weights_info", guard(self.weights_info), methods=["POST"]),
        ]

    async def list_sessions(self, request: Request, caller: Caller) -> Response:
        page, _ = _page(request, await self._queue.change(lambda tx: client_sessions.sessions(tx, caller.tenant)))
        return answered({"sessions": page})

    async def session(self, request: Request, caller: Caller) -> Response:
        """Also one that has ended."""
        name = request.path_params["session"]
        found = await self._queue.change(lambda tx: client_sessions.session_view(tx, caller.tenant, name))
        about = msgspec.json.decode(found.session.about or b"{}", type=sdk_bodies.CreateSession)
        return answered(
            {
                "training_run_ids": found.models,
                "sampler_ids": found.samplers,
                "user_metadata": notes_of(about.user_metadata),
                "display_name": about.display_name,
            }
        )

    async def runs(self, request: Request, caller: Caller) -> Response:
        """Also those that have left, for as long as the queue has them."""
        found = await self._queue.change(lambda tx: client_sessions.models(tx, caller.tenant))
        saved = await self._saved(caller)
        page, cursor = _page(request, found)
        return answered({"training_runs": [self._run(caller, model, saved) for model in page], "cursor": cursor})

    async def run(self, request: Request, caller: Caller) -> Response:
        name = request.path_params["model"]
        model = await self._queue.change(lambda tx: tx.model(caller.tenant, name, removed=True))
        return answered(self._run(caller, model, await self._saved(caller, model.model)))

    async def of_run(self, request: Request, caller: Caller) -> Response:
        """Also of a model that has left."""
        saved = await self._saved(caller, request.path_params["model"])
        return answered({"checkpoints": [_checkpoint(each) for each in saved]})

    async def all(self, request: Request, caller: Caller) -> Response:
        """Newest first."""
        page, cursor = _page(request, (await self._saved(caller))[::-1])
        return answered({"checkpoints": [_checkpoint(each) for each in page], "cursor": cursor})

    async def delete(self, request: Request, caller: Caller) -> Response:
        if not await self._external(request, caller):
            path = path_of_request(request)
            await self._queue.change(lambda tx: client_sessions.expire(tx, tx.state(caller.tenant, path)))
        return Response(status_code=204)

    async def expire(self, request: Request, caller: Caller) -> Response:
        body = sdk_decoded(await body_of(request, caller), sdk_bodies.Ttl)
        if not await self._external(request, caller):
            path = path_of_request(request)
            await self._queue.change(lambda tx: set_ttl(tx, caller.tenant, path, body.ttl_seconds))
        return Response(status_code=204)

    async def _external(self, request: Request, caller: Caller) -> bool:
        """Whether the URL names external weights, which are nothing but another name of a state: that one stays."""
        if request.path_params["kind"] != EXTERNAL:
            return False
        await self._state(caller, seen_through(**request.path_params)[0])
        return True

    async def weights_info(self, request: Request, caller: Caller) -> Response:
        body = sdk_decoded(await body_of(request, caller), sdk_bodies.Path)
        lora = (await self._state(caller, body.tinker_path)).lora
        attention, mlp = self._base.shown(lora)
        return answered(
            {
                "base_model": self._base.name,
                "is_lora": True,
                "lora_rank": lora.rank,
                "train_unembed": False,
                "train_attn": attention,
                "train_mlp": mlp,
            }
        )

    async def _saved(self, caller: Caller, model: str | None = None) -> list[SavedState]:
        return await self._queue.change(lambda tx: client_sessions.saved(tx, caller.tenant, model))

    async def _state(self, caller: Caller, path: str) -> SavedState:
        return await self._queue.change(lambda tx: tx.state(caller.tenant, path))

    def _run(self, caller: Caller, model: Model, saved: Sequence[SavedState]) -> dict[str, Any]:
        mine = [each for each in saved if each.model == model.model]
        newest = {kind: _checkpoint(max(of, key=_age)) for kind in Kind if (of := [s for s in mine if s.kind is kind])}
        return {
            "training_run_id": model.model,
            "base_model": self._base.name,
            "model_owner": caller.tenant,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "last_request_time": _time(max([model.created_s, *map(_age, mine)])),
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
    parts = request.path_params
    return f"{SCHEME}{parts['model']}/{parts['kind']}/{parts['name']}"


def _age(saved: SavedState) -> float:
    return saved.created_s


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()

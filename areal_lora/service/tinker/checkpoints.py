"""Sessions, models and saved states, as the SDK's REST client lists and deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.service.desk import listing
from areal_lora.service.desk.desk import Desk
from areal_lora.service.desk.rows import SCHEME, Kind, Model, Saved
from areal_lora.service.requests import Caller, Guard, number
from areal_lora.service.tinker import bodies
from areal_lora.service.tinker.answers import answered
from areal_lora.service.tinker.base import Base
from areal_lora.service.tinker.exports import EXTERNAL, seen_through
from areal_lora.service.tinker.wire import body_of, decoded, notes_of

MOST = 10**6
PAGE = 100
RUNS = "/api/v1/training_runs"
STATE = f"{RUNS}/{{model}}/checkpoints/{{kind}}/{{name}}"


class Checkpoints:
    def __init__(self, desk: Desk, base: Base) -> None:
        self._desk, self._base = desk, base

    def routes(self, guard: Guard) -> list[Route]:
        return [
            Route("/api/v1/sessions", guard(self.sessions), methods=["GET"]),
            Route("/api/v1/sessions/{session}", guard(self.session), methods=["GET"]),
            Route(RUNS, guard(self.runs), methods=["GET"]),
            Route(f"{RUNS}/{{model}}", guard(self.run), methods=["GET"]),
            Route(f"{RUNS}/{{model}}/checkpoints", guard(self.of_run), methods=["GET"]),
            Route(STATE, guard(self.delete), methods=["DELETE"]),
            Route(f"{STATE}/ttl", guard(self.expire), methods=["PUT"]),
            Route("/api/v1/checkpoints", guard(self.all), methods=["GET"]),
            Route("/api/v1/weights_info", guard(self.weights_info), methods=["POST"]),
        ]

    async def sessions(self, request: Request, who: Caller) -> Response:
        page, _ = _page(request, await self._desk.look_up(partial(listing.sessions, tenant=who.tenant)))
        return answered({"sessions": page})

    async def session(self, request: Request, who: Caller) -> Response:
        """Also one that has ended."""
        name = request.path_params["session"]
        found = await self._desk.look_up(partial(listing.session, tenant=who.tenant, name=name))
        about = msgspec.json.decode(found.session.about or b"{}", type=bodies.CreateSession)
        return answered(
            {
                "training_run_ids": found.models,
                "sampler_ids": found.samplers,
                "user_metadata": notes_of(about.user_metadata),
                "display_name": about.display_name,
            }
        )

    async def runs(self, request: Request, who: Caller) -> Response:
        """Also those that are gone, for as long as the desk has them."""
        found = await self._desk.look_up(partial(listing.models, tenant=who.tenant))
        saved = await self._desk.saved(who.tenant)
        page, cursor = _page(request, found)
        return answered({"training_runs": [self._run(who, model, saved) for model in page], "cursor": cursor})

    async def run(self, request: Request, who: Caller) -> Response:
        name = request.path_params["model"]
        model = await self._desk.look_up(partial(listing.model, tenant=who.tenant, name=name))
        return answered(self._run(who, model, await self._desk.saved(who.tenant, model.model)))

    async def of_run(self, request: Request, who: Caller) -> Response:
        """Also of a model that is gone."""
        saved = await self._desk.saved(who.tenant, request.path_params["model"])
        return answered({"checkpoints": [_checkpoint(each) for each in saved]})

    async def all(self, request: Request, who: Caller) -> Response:
        """Newest first."""
        page, cursor = _page(request, (await self._desk.saved(who.tenant))[::-1])
        return answered({"checkpoints": [_checkpoint(each) for each in page], "cursor": cursor})

    async def delete(self, request: Request, who: Caller) -> Response:
        if not await self._external(request, who):
            await self._desk.drop(who.tenant, path_of_request(request))
        return Response(status_code=204)

    async def expire(self, request: Request, who: Caller) -> Response:
        asked = decoded(await body_of(request, who), bodies.Ttl)
        if not await self._external(request, who):
            await self._desk.set_ttl(who.tenant, path_of_request(request), asked.ttl_seconds)
        return Response(status_code=204)

    async def _external(self, request: Request, who: Caller) -> bool:
        """Whether the URL names external weights, which are nothing but another name of a state: that one stays."""
        if request.path_params["kind"] != EXTERNAL:
            return False
        await self._desk.saved_at(who.tenant, seen_through(**request.path_params)[0])
        return True

    async def weights_info(self, request: Request, who: Caller) -> Response:
        asked = decoded(await body_of(request, who), bodies.Path)
        lora = (await self._desk.saved_at(who.tenant, asked.tinker_path)).lora
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

    def _run(self, who: Caller, model: Model, saved: Sequence[Saved]) -> dict[str, Any]:
        mine = [each for each in saved if each.model == model.model]
        newest = {kind: _checkpoint(max(of, key=_age)) for kind in Kind if (of := [s for s in mine if s.kind is kind])}
        return {
            "training_run_id": model.model,
            "base_model": self._base.name,
            "model_owner": who.tenant,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "last_request_time": _time(max([model.created_s, *map(_age, mine)])),
            "last_checkpoint": newest.get(Kind.WEIGHTS),
            "last_sampler_checkpoint": newest.get(Kind.SAMPLER),
            "user_metadata": model.notes,
        }


def _checkpoint(saved: Saved) -> dict[str, Any]:
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
    limit, offset = number(request, "limit", PAGE, MOST), number(request, "offset", 0, MOST)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def path_of_request(request: Request) -> str:
    """The path of the saved state that the URL names."""
    parts = request.path_params
    return f"{SCHEME}{parts['model']}/{parts['kind']}/{parts['name']}"


def _age(saved: Saved) -> float:
    return saved.created_s


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()

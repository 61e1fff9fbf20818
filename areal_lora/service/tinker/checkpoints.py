"""Saved states and the models that made them, as the SDK's REST client lists and deletes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.service.desk.desk import Desk
from areal_lora.service.desk.rows import SCHEME, Kind, Model, Saved
from areal_lora.service.requests import Caller, Guard, number
from areal_lora.service.tinker import bodies
from areal_lora.service.tinker.answers import answered
from areal_lora.service.tinker.base import Base
from areal_lora.service.tinker.wire import body_of, decoded

MOST = 10**6
PAGE = 100


class Checkpoints:
    def __init__(self, desk: Desk, base: Base) -> None:
        self._desk, self._base = desk, base

    def routes(self, guard: Guard) -> list[Route]:
        runs = "/api/v1/training_runs"
        one = f"{runs}/{{model}}/checkpoints/{{kind}}/{{name}}"
        return [
            Route(runs, guard(self.runs), methods=["GET"]),
            Route(f"{runs}/{{model}}", guard(self.run), methods=["GET"]),
            Route(f"{runs}/{{model}}/checkpoints", guard(self.of_run), methods=["GET"]),
            Route(one, guard(self.delete), methods=["DELETE"]),
            Route(f"{one}/ttl", guard(self.expire), methods=["PUT"]),
            Route("/api/v1/checkpoints", guard(self.all), methods=["GET"]),
            Route("/api/v1/weights_info", guard(self.weights_info), methods=["POST"]),
        ]

    async def runs(self, request: Request, who: Caller) -> Response:
        found = list(reversed(await self._desk.models(who.tenant)))
        saved = await self._desk.saved(who.tenant)
        page, cursor = _page(request, found)
        return answered({"training_runs": [self._run(who, model, saved) for model in page], "cursor": cursor})

    async def run(self, request: Request, who: Caller) -> Response:
        model = await self._desk.model(who.tenant, request.path_params["model"])
        return answered(self._run(who, model, await self._desk.saved(who.tenant, model.model)))

    async def of_run(self, request: Request, who: Caller) -> Response:
        """Also of a model that is gone."""
        saved = await self._desk.saved(who.tenant, request.path_params["model"])
        return answered({"checkpoints": [_checkpoint(each) for each in saved]})

    async def all(self, request: Request, who: Caller) -> Response:
        page, cursor = _page(request, await self._desk.saved(who.tenant))
        return answered({"checkpoints": [_checkpoint(each) for each in page], "cursor": cursor})

    async def delete(self, request: Request, who: Caller) -> Response:
        await self._desk.drop(who.tenant, _path(request))
        return Response(status_code=204)

    async def expire(self, request: Request, who: Caller) -> Response:
        asked = decoded(await body_of(request, who), bodies.Ttl)
        await self._desk.set_ttl(who.tenant, _path(request), asked.ttl_seconds)
        return Response(status_code=204)

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
        }


def _checkpoint(saved: Saved) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": "training" if saved.kind is Kind.WEIGHTS else "sampler",
        "time": _time(saved.created_s),
        "tinker_path": saved.path,
        "size_bytes": saved.n_bytes,
        "public": False,
        "expires_at": None if saved.expires_s is None else _time(saved.expires_s),
    }


def _page(request: Request, found: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    limit, offset = number(request, "limit", PAGE, MOST), number(request, "offset", 0, MOST)
    return found[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(found)}


def _path(request: Request) -> str:
    parts = request.path_params
    return f"{SCHEME}{parts['model']}/{parts['kind']}/{parts['name']}"


def _age(saved: Saved) -> float:
    return saved.created_s


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()

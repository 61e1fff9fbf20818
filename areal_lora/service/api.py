"""The HTTP API of the service: adapters of tenants, records and files, inference, tenants, keys, the tinker SDK.

Every request has a bearer key, whose tenant sees its own adapters and nothing of others. Every answer is typed
(`http`), every error an `ErrorBody`.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.processes.startup import get_logger
from areal_lora.processes.watched import reached
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service import http
from areal_lora.service.acceptance import Acceptance, api_of
from areal_lora.service.download import Downloads, downloaded, open_download
from areal_lora.service.gateway import Gateway, Meter, Names, n_tokens, split
from areal_lora.service.http import (
    Caller,
    Handler,
    as_object,
    decoded,
    fingerprint,
    guard,
    idempotency_key,
    number,
    read_body,
)
from areal_lora.service.observed import PAGE, RunObserver
from areal_lora.service.queue.client_sessions import change, create
from areal_lora.service.queue.queue_rows import TENANT, AdapterRow, Key, Quota, Verb, digest_of, new_key
from areal_lora.service.queue.queue_writer import AdapterChange, Writer
from areal_lora.service.refused import RequestError, unknown_adapter
from areal_lora.service.tinker.sdk import Sdk

JSON = "application/json"
CHECKS = 2
"""Adapters whose rows are read, and versions that are exported, at a time."""

log = get_logger(__name__)


class Api:
    """The routes."""

    def __init__(
        self,
        *,
        config: Config,
        run_folder: RunFolder,
        writer: Writer,
        observed: RunObserver,
        acceptance: Acceptance,
        gateway: Gateway,
        meter: Meter,
        sdk: Sdk,
    ) -> None:
        self._config, self._folder, self._writer, self._observed = config, run_folder, writer, observed
        self._acceptance, self._gateway, self._meter, self._sdk = acceptance, gateway, meter, sdk
        self._quota = Quota.of(api_of(config).quota)
        self._heavy = asyncio.Semaphore(CHECKS)
        self._downloads = Downloads()

    def app(self) -> Starlette:
        one, guarded = "/v1/adapters/{name}", guard(lambda: self._writer.tables, self._meter.request)
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/v1/adapters", guarded(self.create), methods=["POST"]),
            Route("/v1/adapters", guarded(self.overview), methods=["GET"]),
            Route(one, guarded(self.show), methods=["GET"]),
            Route(one, guarded(self._changes(Verb.DELETE)), methods=["DELETE"]),
            Route(f"{one}/pause", guarded(self._changes(Verb.PAUSE)), methods=["POST"]),
            Route(f"{one}/resume", guarded(self._changes(Verb.RESUME)), methods=["POST"]),
            Route(f"{one}/logs", guarded(self.logs), methods=["GET"]),
            Route(f"{one}/metrics", guarded(self.metrics), methods=["GET"]),
            Route(f"{one}/download", guarded(self.download), methods=["GET"]),
            Route("/v1/models", guarded(self.models), methods=["GET"]),
            Route("/v1/completions", guarded(self.complete), methods=["POST"]),
            Route("/v1/chat/completions", guarded(self.complete), methods=["POST"]),
            Route("/v1/tenants", guarded(self.tenants), methods=["GET"]),
            Route("/v1/tenants", guarded(self.put_tenant), methods=["POST"]),
            Route("/v1/tenants/{tenant}/keys", guarded(self.put_key), methods=["POST"]),
            Route("/v1/tenants/{tenant}/keys/{label}", guarded(self.drop_key), methods=["DELETE"]),
            *self._sdk.routes(guarded),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route, Exception: _unexpected})
        app.router.redirect_slashes = False  # a redirect is no typed answer
        return app

    async def health(self, request: Request) -> Response:
        return _answer(http.Health(run=self._config.run.name))

    async def create(self, request: Request, caller: Caller) -> Response:
        """``POST /v1/adapters``: the body is an entry of ``adapters``."""
        section = as_object(await read_body(request, caller.quota.body_bytes))
        answer = await self.take_in(section, caller.tenant, idempotency_key(request), caller.quota)
        reached("service.answering")
        return Response(answer, 201, media_type=JSON)

    async def take_in(self, section: dict[str, Any], tenant: str, request: str, quota: Quota | None) -> bytes:
        """Check and create an adapter. Without ``quota`` it is the operator's own, caller may name any code and file.

        A repeated request is not checked again: its answer is the first one. Raises RequestError.
        """
        mark = fingerprint(Verb.CREATE, msgspec.json.encode(section, order="sorted"))
        if request and (answer := await self._writer.answered(tenant, request, mark)) is not None:
            return answer
        async with self._heavy:
            if quota is None:
                adapter = await asyncio.to_thread(self._acceptance.of_operator, section)
            else:
                adapter = await asyncio.to_thread(self._acceptance.of_tenant, section, tenant, quota)
        return await self._writer.operate(
            AdapterChange(
                tenant=tenant,
                verb=Verb.CREATE,
                fingerprint=mark,
                request=request,
                decide=lambda tables, phases: create(tables, tenant, adapter, now_s=time.time()),
                answer=lambda row: _acknowledged(row, Verb.CREATE),
            )
        )

    async def overview(self, request: Request, caller: Caller) -> Response:
        rows = self._writer.tables.of(caller.tenant)
        return _answer(http.Adapters(adapters=[http.shown(row, self._observed.of(row.key)) for row in rows]))

    async def show(self, request: Request, caller: Caller) -> Response:
        row = self._row(request, caller)
        return _answer(http.shown(row, self._observed.of(row.key)))

    async def logs(self, request: Request, caller: Caller) -> Response:
        return _answer(http.Logs(states=self._observed.states(self._row(request, caller).key)))

    async def metrics(self, request: Request, caller: Caller) -> Response:
        """``?after=N&limit=M``: the records from the N-th on."""
        row, after = self._row(request, caller), number(request, "after", 0, 10**15 - 1)
        records = self._observed.records(row.key, after, number(request, "limit", PAGE, PAGE))
        return _answer(http.Records(records=records, next=after + len(records)))

    async def download(self, request: Request, caller: Caller) -> Response:
        """``?version=N``, ``newest`` or ``best``: a tar of the PEFT folder."""
        row, version = self._row(request, caller), request.query_params.get("version", "newest")
        headers = {"Content-Disposition": f'attachment; filename="{row.name}.tar"'}
        with self._downloads.hold(caller.tenant) as held:
            async with self._heavy:
                opened = await asyncio.to_thread(
                    open_download, self._folder, self._config, row.desired, row.name, version
                )
            held.callback(opened.close)
            return downloaded(opened.chunks(), held.pop_all(), "application/x-tar", headers)

    async def models(self, request: Request, caller: Caller) -> Response:
        rows = self._writer.tables.of(caller.tenant)
        served = [row.name for row in rows if self._observed.of(row.key).version is not None]
        return _answer(http.Models(data=[http.ModelBody(id=name) for name in served]))

    async def complete(self, request: Request, caller: Caller) -> Response:
        """``POST /v1/completions`` and ``/v1/chat/completions``, as the data plane of a server has them."""
        body = as_object(await read_body(request, caller.quota.body_bytes))
        model = body.get("model")
        if not isinstance(model, str):
            raise RequestError(422, "model", "it names no adapter", "set model to the name of one of your adapters")
        row = self._writer.tables.adapters.get((caller.tenant, split(model)))
        if row is None:
            raise RequestError(404, "model", f"there is no adapter {model[:64]!r}", "name one of your adapters")
        tokens = n_tokens(body, self._config.rollout.max_model_len)
        with ExitStack() as held:
            held.enter_context(self._meter.running(caller.tenant, tokens, caller.quota))
            return await self._gateway.forward(request.url.path, body, Names(model, row.name, row.key), held)

    async def tenants(self, request: Request, caller: Caller) -> Response:
        _check_operator(caller)
        tables = self._writer.tables
        return _answer(
            http.Tenants(
                tenants=[
                    http.Tenant(
                        tenant=tenant, quota=quota, keys=[k.label for k in tables.keys.values() if k.tenant == tenant]
                    )
                    for tenant, quota in tables.quotas.items()
                ]
            )
        )

    async def put_tenant(self, request: Request, caller: Caller) -> Response:
        _check_operator(caller)
        body = decoded(await read_body(request, caller.quota.body_bytes), http.TenantRequest)
        if not TENANT.fullmatch(body.tenant):
            reason = f"{body.tenant[:64]!r} is not a valid tenant name"
            raise RequestError(422, "tenant", reason, "use up to 16 of a-z and 0-9, the first a letter")
        before = self._writer.tables.quotas.get(body.tenant, self._quota)
        try:
            quota = msgspec.convert(msgspec.to_builtins(before) | body.quota, Quota)
        except msgspec.ValidationError as error:
            raise RequestError(422, "quota", str(error), "name limits of a tenant, with numbers above 0") from None
        if any(value <= 0 for value in msgspec.structs.astuple(quota)):
            raise RequestError(422, "quota", "a limit is not above 0", "give numbers above 0")
        await self._writer.put_tenant(body.tenant, quota)
        keys = [key.label for key in self._writer.tables.keys.values() if key.tenant == body.tenant]
        return _answer(http.Tenant(tenant=body.tenant, quota=quota, keys=keys), 201)

    async def put_key(self, request: Request, caller: Caller) -> Response:
        _check_operator(caller)
        tenant = self._tenant(request)
        raw = await read_body(request, caller.quota.body_bytes)
        label = decoded(raw or b"{}", http.KeyRequest).label
        if not TENANT.fullmatch(label):
            raise RequestError(
                422, "label", f"{label[:64]!r} is no label", "use up to 16 of a-z and 0-9, the first a letter"
            )
        key = new_key()
        await self._writer.put_key(Key(digest=digest_of(key), tenant=tenant, label=label))
        return _answer(http.NewKey(tenant=tenant, label=label, key=key), 201)

    async def drop_key(self, request: Request, caller: Caller) -> Response:
        _check_operator(caller)
        tenant, label = self._tenant(request), request.path_params["label"]
        mine = (key for key in self._writer.tables.keys.values() if (key.tenant, key.label) == (tenant, label))
        if (key := next(mine, None)) is None or key.operator:
            raise RequestError(404, "label", "there is no such key", "list the keys with GET /v1/tenants")
        await self._writer.drop_key(tenant, label)
        return _answer(http.KeyRemoval(tenant=tenant, label=label))

    def _changes(self, verb: Verb) -> Handler:
        async def handle(request: Request, caller: Caller) -> Response:
            name = request.path_params["name"]
            await read_body(request, caller.quota.body_bytes)
            order = AdapterChange(
                tenant=caller.tenant,
                verb=verb,
                fingerprint=fingerprint(verb, name),
                request=idempotency_key(request),
                decide=lambda tables, phases: change(tables, phases, caller.tenant, name, verb),
                answer=lambda row: _acknowledged(row, verb),
            )
            answer = await self._writer.operate(order)
            reached("service.answering")
            return Response(answer, media_type=JSON)

        return handle

    def _row(self, request: Request, caller: Caller) -> AdapterRow:
        name = request.path_params["name"]
        if (row := self._writer.tables.adapters.get((caller.tenant, name))) is None:
            raise unknown_adapter(name[:64])
        return row

    def _tenant(self, request: Request) -> str:
        tenant: str = request.path_params["tenant"]
        if tenant not in self._writer.tables.quotas:
            raise RequestError(404, "tenant", f"there is no tenant {tenant[:64]!r}", "make it with POST /v1/tenants")
        return tenant


def _check_operator(caller: Caller) -> None:
    if not caller.key.operator:
        raise RequestError(404, "path", "there is no such path", "see the service page for the paths")


def _acknowledged(row: AdapterRow, verb: Verb) -> bytes:
    body = http.AcceptedOperation(name=row.name, incarnation=row.incarnation, verb=verb.value, wanted=row.wanted.value)
    return msgspec.json.encode(body)


def _answer(body: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type=JSON)


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    reason = "this path does not take the method" if status == 405 else "there is no such path"
    return Response(
        RequestError(status, "path", reason, "see the service page for the paths").body(), status, media_type=JSON
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    """Fault boundary: a request that nothing foresaw must not end the service."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return Response(
        RequestError(500, "service", "an unexpected error; the service's log has it", "try again").body(),
        500,
        media_type=JSON,
    )

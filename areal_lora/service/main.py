"""The service of a run: ``python -m areal_lora.service.main --run-folder DIR``.

    HTTP, inbox --> check --> decide, commit --> desired.json --> trainer rank 0
                                                                       |
    answers  <------------------- metrics.jsonl <----------------------'

    SDK clients --> queue --> commit --> operations --> trainer rank 0 --> outcomes --> commit --> answers

It can be killed at any moment: what was acknowledged is in its file, and a start writes the desired state again.

Every HTTP request has a bearer key, whose tenant sees its own adapters and nothing of others. Every answer is JSON, an
error has path, reason and fix.
"""

import asyncio
import logging
import os
import shutil
import sys
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config
from areal_lora.config.sizing.slots import adapter_capacity
from areal_lora.errors import RequestError
from areal_lora.network.http_server import CLOSE_S, HttpServer, listening, unless_disconnected
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached, watched_task
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint
from areal_lora.run_folder.status import EVENT_LOOP, Heart, run_role, set_status, signalled
from areal_lora.service import http
from areal_lora.service.acceptance import EVERY_S, Acceptance, FolderInbox, admit_operator, api_of
from areal_lora.service.download import Downloads, downloaded, open_download
from areal_lora.service.gateway import Gateway, Meter, Names, n_tokens, split
from areal_lora.service.queue.client_sessions import changed, operate, unknown_adapter
from areal_lora.service.queue.placement import PAGE, ObservedAdapter, RunObserver
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_rows import LOCAL, TENANT, AdapterRow, Key, Quota, Tables, Verb, digest_of, new_key
from areal_lora.service.queue.queue_store import Store, drop_key, put_key, put_tenant
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.service.tinker.routes import Sdk

JSON = "application/json"


@dataclass(frozen=True)
class Api:
    """Adapters of tenants, records and files, inference, tenants, keys, the tinker SDK."""

    config: Config
    run_folder: RunFolder
    writer: Writer
    observed: RunObserver
    acceptance: Acceptance
    gateway: Gateway
    meter: Meter
    sdk: Sdk
    downloads: Downloads = field(default_factory=Downloads)

    def app(self) -> Starlette:
        async def health(request: Request) -> http.Answered:
            return {"run": self.config.run.name}

        one, guarded = "/v1/adapters/{name}", http.guard(lambda: self.writer.tables, self.meter.request)
        routes = [
            http.unguarded("GET", "/health", health),
            guarded("POST", "/v1/adapters", self.create),
            guarded("GET", "/v1/adapters", self.overview),
            guarded("GET", one, self.show),
            guarded("DELETE", one, partial(self.change, Verb.DELETE)),
            guarded("POST", f"{one}/pause", partial(self.change, Verb.PAUSE)),
            guarded("POST", f"{one}/resume", partial(self.change, Verb.RESUME)),
            guarded("GET", f"{one}/logs", self.logs),
            guarded("GET", f"{one}/metrics", self.metrics),
            guarded("GET", f"{one}/download", self.download),
            guarded("GET", "/v1/models", self.models),
            guarded("POST", "/v1/completions", self.complete),
            guarded("POST", "/v1/chat/completions", self.complete),
            guarded("GET", "/v1/tenants", self.tenants),
            guarded("POST", "/v1/tenants", self.put_tenant),
            guarded("POST", "/v1/tenants/{tenant}/keys", self.put_key),
            guarded("DELETE", "/v1/tenants/{tenant}/keys/{label}", self.drop_key),
            *self.sdk.routes(guarded),
        ]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route})
        app.router.redirect_slashes = False  # a redirect is no typed answer
        return app

    async def create(self, request: Request, caller: http.Caller) -> http.Answered:
        """``POST /v1/adapters``: the body is an entry of ``adapters``."""
        section = http.decoded(await http.body_of(request, caller), http.JsonObject)
        key = http.idempotency_key(request)
        acknowledged = await self.acceptance.take_in(section, caller.tenant, key, caller.quota)
        reached("service.answering")
        return Response(acknowledged, 201, media_type=JSON)

    async def overview(self, request: Request, caller: http.Caller) -> http.Answered:
        rows = self.writer.tables.of(caller.tenant)
        return {"adapters": [_shown(row, self.observed.of(row.key)) for row in rows]}

    async def show(self, request: Request, caller: http.Caller) -> http.Answered:
        row = _row(self.writer.tables, request, caller)
        return _shown(row, self.observed.of(row.key))

    async def logs(self, request: Request, caller: http.Caller) -> http.Answered:
        return {"states": self.observed.states(_row(self.writer.tables, request, caller).key)}

    async def metrics(self, request: Request, caller: http.Caller) -> http.Answered:
        """``?after=N&limit=M``: the records from the N-th on; ``next`` is the ``after`` of the next request."""
        row, after = _row(self.writer.tables, request, caller), http.number(request, "after", 0, 10**15 - 1)
        records = self.observed.records(row.key, after, http.number(request, "limit", PAGE, PAGE))
        return {"records": records, "next": after + len(records)}

    async def download(self, request: Request, caller: http.Caller) -> http.Answered:
        """``?version=N``, ``newest`` or ``best``: a tar of the PEFT folder."""
        row, version = _row(self.writer.tables, request, caller), request.query_params.get("version", "newest")
        headers = {"Content-Disposition": f'attachment; filename="{row.name}.tar"'}
        work = partial(open_download, self.run_folder, self.config, row.desired, row.name, version)
        async with self.downloads.opened(caller.tenant, work) as (opened, held):
            return downloaded(opened.chunks(), held.pop_all(), "application/x-tar", headers)

    async def models(self, request: Request, caller: http.Caller) -> http.Answered:
        rows = self.writer.tables.of(caller.tenant)
        served = [row.name for row in rows if self.observed.of(row.key).version is not None]
        about = {"object": "model", "owned_by": "areal_lora"}
        return {"data": [{"id": name, **about} for name in served], "object": "list"}

    async def complete(self, request: Request, caller: http.Caller) -> http.Answered:
        """``POST /v1/completions`` and ``/v1/chat/completions``, as the data plane of a server has them."""
        body = http.decoded(await http.body_of(request, caller), http.JsonObject)
        model = body.get("model")
        if not isinstance(model, str):
            raise RequestError("model", "it names no adapter", "set model to the name of one of your adapters")
        row = self.writer.tables.adapters.get((caller.tenant, split(model)))
        if row is None:
            raise RequestError("model", f"there is no adapter {model[:64]!r}", "name one of your adapters", status=404)
        tokens = n_tokens(body, self.config.rollout.max_model_len)
        with ExitStack() as held:
            self.meter.start(caller.tenant, tokens, caller.quota)
            held.callback(self.meter.end, caller.tenant, tokens)
            work = self.gateway.forward(request.url.path, body, Names(model, row.name, row.key), held)
            return await unless_disconnected(request, work)

    async def tenants(self, request: Request, caller: http.Caller) -> http.Answered:
        _check_operator(caller)
        tables = self.writer.tables
        return {"tenants": [_tenant_body(tables, tenant) for tenant in tables.quotas]}

    async def put_tenant(self, request: Request, caller: http.Caller) -> http.Answered:
        _check_operator(caller)
        body = http.decoded(await http.body_of(request, caller), http.TenantRequest)
        _check_name("tenant", body.tenant)
        before = self.writer.tables.quotas.get(body.tenant, Quota())
        try:
            quota = msgspec.convert(msgspec.to_builtins(before) | body.quota, Quota)
        except msgspec.ValidationError as error:
            raise RequestError("quota", str(error), "name limits of a tenant, with numbers above 0") from None
        await self.writer.change(lambda tx: put_tenant(tx, body.tenant, quota))
        return http.answer(_tenant_body(self.writer.tables, body.tenant), 201)

    async def put_key(self, request: Request, caller: http.Caller) -> http.Answered:
        _check_operator(caller)
        tenant = _tenant(self.writer.tables, request)
        label = http.decoded(await http.body_of(request, caller) or b"{}", http.KeyRequest).label
        _check_name("label", label)
        key = new_key()
        row = Key(digest=digest_of(key), tenant=tenant, label=label)
        await self.writer.change(lambda tx: put_key(tx, row))
        return http.answer({"tenant": tenant, "label": label, "key": key}, 201)  # only its hash is kept

    async def drop_key(self, request: Request, caller: http.Caller) -> http.Answered:
        _check_operator(caller)
        tenant, label = _tenant(self.writer.tables, request), request.path_params["label"]
        mine = (key for key in self.writer.tables.keys.values() if (key.tenant, key.label) == (tenant, label))
        if (key := next(mine, None)) is None or key.operator:
            raise RequestError("label", "there is no such key", "list the keys with GET /v1/tenants", status=404)
        await self.writer.change(lambda tx: drop_key(tx, tenant, label))
        return {"tenant": tenant, "label": label}

    async def change(self, verb: Verb, request: Request, caller: http.Caller) -> http.Answered:
        name = request.path_params["name"]
        await http.body_of(request, caller)
        mark, key, phases = http.fingerprint(verb, name), http.idempotency_key(request), self.observed.phases()

        def decide(tables: Tables) -> AdapterRow:
            return changed(tables, phases, caller.tenant, name, verb)

        acknowledged, _ = await self.writer.change(lambda tx: operate(tx, caller.tenant, verb, decide, key, mark))
        reached("service.answering")
        return Response(acknowledged, media_type=JSON)


def _check_name(key: str, name: str) -> None:
    if not TENANT.fullmatch(name):
        raise RequestError(key, f"{name[:64]!r} is no {key}", "use up to 16 of a-z and 0-9, the first a letter")


def _row(tables: Tables, request: Request, caller: http.Caller) -> AdapterRow:
    name = request.path_params["name"]
    if (row := tables.adapters.get((caller.tenant, name))) is None:
        raise unknown_adapter(name[:64])
    return row


def _tenant(tables: Tables, request: Request) -> str:
    tenant: str = request.path_params["tenant"]
    if tenant not in tables.quotas:
        raise RequestError("tenant", f"there is no tenant {tenant[:64]!r}", "make it with POST /v1/tenants", status=404)
    return tenant


def _tenant_body(tables: Tables, tenant: str) -> dict[str, Any]:
    keys = [key.label for key in tables.keys.values() if key.tenant == tenant]
    return {"tenant": tenant, "quota": tables.quotas[tenant], "keys": keys}


def _check_operator(caller: http.Caller) -> None:
    if not caller.key.operator:
        raise RequestError("path", "there is no such path", "see the service page for the paths", status=404)


def _shown(row: AdapterRow, seen: ObservedAdapter) -> dict[str, Any]:
    """One adapter. ``wanted`` is the desired phase, ``phase`` that of the run: null until it has seen the adapter.

    ``step`` counts the steps made, ``reward`` and ``lag`` are those of the newest one; ``version`` is the newest one
    that servers answer with, ``checkpoint`` the newest one that can be downloaded.
    """
    step = seen.step
    return {
        "name": row.name,
        "incarnation": row.incarnation,
        "wanted": row.wanted,
        "phase": seen.phase,
        "reason": seen.reason,
        "step": 0 if step is None else step.step + step.taken,
        "reward": None if step is None else step.reward_mean,
        "lag": None if step is None else step.mean_lag,
        "version": seen.version,
        "checkpoint": seen.checkpoint,
        "created_s": row.created_s,
        "settings": row.settings,
    }


async def _no_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    reason = "this path does not take the method" if status == 405 else "there is no such path"
    return http.refusal(RequestError("path", reason, "see the service page for the paths", status=status))


ROLE = "service"
HOST = "127.0.0.1"

log = get_logger("areal_lora.service.main")  # __name__ is __main__ here


async def serve(config: Config, run_folder: RunFolder) -> None:
    """Serve until SIGTERM or SIGINT."""
    api_config = api_of(config)
    stop = signalled()
    sock = listening(HOST, api_config.port, "service.api.port")
    async with AsyncExitStack() as stack:
        shutil.rmtree(run_folder.service_exports, ignore_errors=True)  # of downloads of an earlier process
        configured = [adapter.name for adapter in config.adapters]
        observed = RunObserver(run_folder, configured, adapter_capacity(config))
        while observed.look():
            pass
        store = Store(run_folder.service_tables, config.run.name)
        admit_operator(store, run_folder.service_key, Quota())
        writer = Writer(store, run_folder, observed.phases)
        stack.callback(writer.close)
        acceptance = Acceptance(config, writer)
        queue = await stack.enter_async_context(RequestQueue(writer, run_folder, acceptance.of_client, observed))
        gateway, meter = await stack.enter_async_context(Gateway(run_folder)), Meter()
        sdk = await stack.enter_async_context(Sdk(config, run_folder, queue, gateway, meter))
        api = Api(config, run_folder, writer, observed, acceptance, gateway, meter, sdk)
        server = HttpServer(api.app(), sock, None)
        plane = watched_task("http-plane", server.serve)
        port = sock.getsockname()[1]
        publish_endpoint(run_folder, ROLE, 0, {"api": port}, host=HOST)
        set_status(run_folder, ROLE, 0, f"serving on http://{HOST}:{port}")
        log.info("serving on http://%s:%d", HOST, port)
        heart = Heart(run_folder, ROLE, 0, {EVENT_LOOP: config.run.stall_s})
        take_in = partial(acceptance.take_in, tenant=LOCAL, quota=None)
        inbox = FolderInbox(run_folder.inbox, lambda section, request: take_in(section, request=request))
        tasks = [
            watched_task("event-loop-ticks", heart.tick),
            watched_task("metrics-tail", partial(_follow, observed, writer)),
            watched_task("inbox", inbox.watch),
        ]
        await stop.wait()
        server.should_exit = True
        await asyncio.wait([plane], timeout=CLOSE_S + 1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        heart.stop()


async def _follow(observed: RunObserver, writer: Writer) -> None:
    """Read the run's records as they come, and note which operations it has carried out, and what has left it."""
    while True:
        more = observed.look()
        await writer.settle()
        observed.forget(but=observed.configured | {row.key for row in writer.tables.adapters.values()})
        await asyncio.sleep(0 if more else EVERY_S)


if __name__ == "__main__":
    code = run_role(ROLE, lambda folder: asyncio.run(serve(read_config(folder), folder)))
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)

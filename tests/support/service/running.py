"""The service's real parts inside one process: file, writer, checks and the ASGI app, without a port."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml
from aiohttp import web

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.rules.findings import resolve_targets
from areal_lora.config.sizing.slots import adapter_capacity
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret, publish_endpoint
from areal_lora.service.acceptance import Acceptance, admit_operator
from areal_lora.service.gateway import Gateway, Meter
from areal_lora.service.main import Api
from areal_lora.service.queue.placement import RunObserver
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.queue.queue_rows import Key, Quota, digest_of, new_key
from areal_lora.service.queue.queue_store import Store, Transaction, put_key, put_tenant
from areal_lora.service.queue.queue_writer import Writer
from areal_lora.service.tinker.routes import Sdk
from tests.support.paths import EXAMPLES


def service_config(root: Path, **service: Any) -> Config:
    """The shipped base of a service, below ``root``."""
    data = {"run": {"name": "served", "root": str(root)}, "model": {"path": str(EXAMPLES / "tiny_model")}}
    config = load_config([EXAMPLES / "service.yaml", {**data, "service": {"api": service}}])
    return resolve_targets(config, gather_facts(config, runs_here=False))  # as a run folder records it


def section(**changes: Any) -> dict[str, Any]:
    """The shipped adapter, small."""
    entry: dict[str, Any] = yaml.safe_load((EXAMPLES / "adapters" / "sums.yaml").read_text())
    return entry | {"task": {"kind": "word_problems", "n_train": 64, "n_eval": 4}} | changes


@dataclass(slots=True)
class Running:
    """``keys`` are those of the operator and of two tenants; ``http`` has no key of its own."""

    folder: RunFolder
    api: Api
    writer: Writer
    observed: RunObserver
    queue: RequestQueue
    http: httpx.AsyncClient
    keys: dict[str, str]

    async def call(self, caller: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.keys[caller]}"} | more.pop("headers", {})
        return await self.http.request(method, path, headers=headers, **more)

    def record(self, kind: str, key: str, **values: Any) -> None:
        """What the trainer would write about an adapter of the run."""
        with self.folder.metrics.open("a") as file:
            file.write(json.dumps({"kind": kind, "adapter": key} | values) + "\n")
        self.observed.look()


@asynccontextmanager
async def running(config: Config, *, raises: bool = True, **limits: float) -> AsyncIterator[Running]:
    """A service of ``config`` with the tenants ``acme`` and ``bolt``, whose quota has these ``limits``.

    With ``raises`` an unforeseen error is raised.
    """
    folder = config.run_folder
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.secret.exists():
        create_secret(folder)
    quota = msgspec.structs.replace(Quota(adapters=2, rank=8), **limits)
    names = [adapter.name for adapter in config.adapters]
    store, observed = (
        Store(folder.service_tables, config.run.name),
        RunObserver(folder, names, adapter_capacity(config)),
    )
    observed.look()
    admit_operator(store, folder.service_key, quota)
    keys = {"operator": folder.service_key.read_text().strip()}
    keys |= {tenant: new_key() for tenant in ("acme", "bolt")}

    def admit(tx: Transaction) -> None:
        for tenant in ("acme", "bolt"):
            put_tenant(tx, tenant, quota)
            put_key(tx, Key(digest=digest_of(keys[tenant]), tenant=tenant, label="test"))

    store.change(admit, 0.0)
    writer = Writer(store, folder, observed.phases)
    acceptance = Acceptance(config, writer)
    queue = RequestQueue(writer, folder, acceptance.of_client, observed)
    try:
        meter = Meter()
        async with queue, Gateway(folder) as gateway, Sdk(config, folder, queue, gateway, meter) as sdk:
            api = Api(config, folder, writer, observed, acceptance, gateway, meter, sdk)
            transport = httpx.ASGITransport(app=api.app(), raise_app_exceptions=raises)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
                yield Running(folder, api, writer, observed, queue, http, keys)
    finally:
        writer.close()


@asynccontextmanager
async def data_plane(
    it: Running, index: int, answer: Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]
) -> AsyncIterator[list[dict[str, Any]]]:
    """A server of the run that answers completions as told; the bodies that it got."""
    asked: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return await answer(asked[-1])

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    publish_endpoint(it.folder, "server", index, {"data": runner.addresses[0][1]})
    try:
        yield asked
    finally:
        await runner.cleanup()

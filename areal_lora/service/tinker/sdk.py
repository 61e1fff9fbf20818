"""All routes of the SDK, to be served beside the API's own."""

from __future__ import annotations

from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.run_folder.paths import RunFolder
from areal_lora.service.gateway import Gateway, Meter
from areal_lora.service.http import Guard
from areal_lora.service.queue.queue import RequestQueue
from areal_lora.service.tinker.checkpoints import Archives, Checkpoints
from areal_lora.service.tinker.routes import Routes, UnsupportedRoutes
from areal_lora.service.tinker.sample_tasks import Base, Sampling


class Sdk:
    """``async with Sdk(...)``; inside it samples that an earlier process has acknowledged are in progress."""

    def __init__(
        self, config: Config, run_folder: RunFolder, queue: RequestQueue, gateway: Gateway, meter: Meter
    ) -> None:
        base = Base.of(config)
        self._sampling = Sampling(queue, base, gateway, meter)
        self._parts = (
            Routes(queue, base, self._sampling),
            self._sampling,
            Checkpoints(queue, base),
            Archives(queue, config, run_folder),
            UnsupportedRoutes(),
        )

    async def __aenter__(self) -> Sdk:
        await self._sampling.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._sampling.close()

    def routes(self, guard: Guard) -> list[Route]:
        return [route for part in self._parts for route in part.routes(guard)]

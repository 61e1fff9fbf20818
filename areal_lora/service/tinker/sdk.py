"""All routes of the SDK, to be served beside the API's own."""

from __future__ import annotations

from starlette.routing import Route

from areal_lora.config.models import Config
from areal_lora.service.desk.desk import Desk
from areal_lora.service.gateway import Gateway
from areal_lora.service.requests import Guard
from areal_lora.service.tinker.base import Base
from areal_lora.service.tinker.checkpoints import Checkpoints
from areal_lora.service.tinker.face import Face
from areal_lora.service.tinker.sampling import Sampling


class Sdk:
    """``async with Sdk(...)``; leaving it ends samples that are in progress."""

    def __init__(self, config: Config, desk: Desk, gateway: Gateway) -> None:
        base = Base.of(config)
        self._sampling = Sampling(desk, base, gateway)
        self._parts = (Face(desk, base, self._sampling), self._sampling, Checkpoints(desk, base))

    async def __aenter__(self) -> Sdk:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._sampling.close()

    def routes(self, guard: Guard) -> list[Route]:
        return [route for part in self._parts for route in part.routes(guard)]

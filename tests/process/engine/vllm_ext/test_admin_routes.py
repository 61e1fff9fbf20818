"""Routes of the admin plane, with adapters and an engine that note what is asked of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_lora.engine.vllm_ext.server.admin_routes import AdminPlane
from areal_lora.engine.vllm_ext.server.generate import BadRequest
from areal_lora.weight_sync.messages import ScoreRequest


def test_no_score_runs_on_when_the_request_has_given_back_its_version() -> None:
    """One sequence is refused while another one is scored: its slot must not be freed under the other."""
    log: list[str] = []

    @contextmanager
    def lease(model: str) -> Iterator[str]:
        try:
            yield model
        finally:
            log.append("given back")

    async def score(ids: list[int], lease: str, temperature: float) -> list[float]:
        if ids == [2]:
            raise BadRequest("too long")
        try:
            await asyncio.Event().wait()
        finally:
            log.append("score has ended")
        return []

    async def opened() -> None: ...

    async def body() -> bytes:
        return msgspec.msgpack.encode(ScoreRequest(model="math@v1", token_ids=[[1], [2]], temperature=1.0))

    async def ask() -> None:
        adapters: Any = SimpleNamespace(has_base=True, gate=SimpleNamespace(opened=opened), lease=lease)
        generator: Any = SimpleNamespace(score=score)
        unused: Any = None
        request: Any = SimpleNamespace(body=body)
        with pytest.raises(BadRequest, match="too long"):
            await AdminPlane(adapters, generator, unused, unused, unused).score(request)

    asyncio.run(ask())
    assert log == ["score has ended", "given back"]

"""A client that stops reading."""

from __future__ import annotations

import asyncio
import threading
from io import BytesIO

import pytest
from starlette.types import Message

from areal_lora.service import streams
from areal_lora.service.download import Download, downloaded


def test_the_files_of_a_download_are_closed_once_its_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "STALL_S", 0.05)
    file, sent = BytesIO(b"x" * 99), []

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if len(sent) > 2:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        opened = Download(files=(("a", file),))
        response = downloaded(opened, opened.chunks(), "application/x-tar")
        async with asyncio.timeout(30.0):
            await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(run())
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]
    assert file.closed


def test_a_client_that_leaves_during_a_read_is_no_error() -> None:
    class Slow(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            reads.set()
            release.wait(30.0)
            return super().read(size)

    reads, release, file = threading.Event(), threading.Event(), Slow(b"x" * 99)

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        await asyncio.to_thread(reads.wait, 30.0)
        return {"type": "http.disconnect"}

    async def run() -> None:
        opened = Download(files=(("a", file),))
        response = downloaded(opened, opened.chunks(), "application/x-tar")
        try:
            await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        finally:
            release.set()

    asyncio.run(run())
    assert file.closed

"""A client that stops reading."""

from __future__ import annotations

import asyncio
import threading
from io import BytesIO

import pytest
from starlette.types import Message

from areal_lora.errors import RequestError
from areal_lora.service import http
from areal_lora.service.download import MAX_DOWNLOADS, Download, Downloads, downloaded


def test_the_files_of_a_download_are_closed_once_its_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "STALL_S", 0.05)
    downloads = Downloads()
    file, sent = BytesIO(b"x" * 99), []

    async def send(message: Message) -> None:
        sent.append(message["type"])
        if len(sent) > 2:
            await asyncio.Event().wait()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        opened, held = Download(files=(("a", file),)), downloads.hold("acme")
        held.callback(opened.close)
        response = downloaded(opened.chunks(), held, "application/x-tar")
        async with asyncio.timeout(120.0):
            await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

    asyncio.run(run())
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]
    assert file.closed


def test_a_client_that_leaves_during_a_read_is_no_error() -> None:
    downloads = Downloads()

    class Slow(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            reads.set()
            release.wait(120.0)
            return super().read(size)

    reads, release, file = threading.Event(), threading.Event(), Slow(b"x" * 99)

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        await asyncio.to_thread(reads.wait, 120.0)
        return {"type": "http.disconnect"}

    async def run() -> None:
        opened, held = Download(files=(("a", file),)), downloads.hold("acme")
        held.callback(opened.close)
        response = downloaded(opened.chunks(), held, "application/x-tar")
        try:
            await response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        finally:
            release.set()

    asyncio.run(run())
    assert file.closed
    assert not +downloads._open, "the place is free"


def test_downloads_of_one_tenant_are_bounded_and_anothers_are_not() -> None:
    downloads = Downloads()
    held = [downloads.hold("acme") for _ in range(MAX_DOWNLOADS)]
    with pytest.raises(RequestError, match="downloads are in progress"):
        downloads.hold("acme")
    downloads.hold("bolt").close()
    held[0].close()
    downloads.hold("acme").close()

"""Serve the page of runs in progress on this machine: ``areal-lora page``.

    browser --GET /TOKEN/ (page), /TOKEN/data (PageData; 304 if nothing changed)--> this process --reads--> run folders

The token in the path keeps other users of the machine, and other pages of the browser, out.
"""

import hashlib
import secrets
import socket
from collections.abc import Callable, Sequence

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from areal_lora.obs.metrics.reader import MetricsTail, iter_metrics
from areal_lora.obs.metrics.records import ResumeRecord
from areal_lora.obs.report.page import PageData, RunPage, page_text
from areal_lora.obs.report.side_by_side import pages_of
from areal_lora.run_folder.paths import RunFolder


class LiveRun:
    """A run whose page follows its records: a refresh reads the new ones alone, unless a resume made old ones void."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._tail, self.page = MetricsTail(folder), self._empty()

    def _empty(self) -> RunPage:
        return RunPage(self._folder, lambda config: config.model_dump_json(indent=2))

    def refresh(self) -> RunPage:
        """Read new records. Raises OSError, and ConfigError for a line that is not a record."""
        void = False
        while records := self._tail.read_new():
            for record in records:
                self.page.add(record)
                void |= isinstance(record, ResumeRecord)
        if void:
            self.page = self._empty()
            for record in iter_metrics(self._folder):
                self.page.add(record)
        return self.page


def application(folders: Sequence[RunFolder], token: str) -> Starlette:
    """The routes below ``/token/``; all requests share the runs and are answered one after the other."""
    runs = [LiveRun(folder) for folder in folders]

    def newest() -> PageData:
        return pages_of([run.refresh() for run in runs])

    async def page(request: Request) -> Response:
        return HTMLResponse(page_text(newest(), live=True), headers={"Referrer-Policy": "no-referrer"})

    async def data(request: Request) -> Response:
        body = msgspec.json.encode(newest())
        tag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        return Response(body, media_type="application/json", headers={"ETag": tag, "Cache-Control": "no-store"})

    return Starlette(routes=[Route(f"/{token}/", page), Route(f"/{token}/data", data)])


def serve_pages(folders: Sequence[RunFolder], port: int, announce: Callable[[str], None]) -> None:
    """Serve until an interrupt; ``announce`` the address first. Port 0: a free one."""
    import uvicorn

    token = secrets.token_urlsafe(16)
    with socket.create_server(("127.0.0.1", port)) as listener:
        announce(f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/")
        config = uvicorn.Config(application(folders, token), log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run([listener])

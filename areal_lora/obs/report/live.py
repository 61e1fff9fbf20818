"""Serve the page of runs in progress on this machine: ``areal-lora page``, or a process beside the run (`run.page`).

    browser --GET /TOKEN/ (page), /TOKEN/data (PageData; 304 if nothing changed)--> this process --reads--> run folders
              with ``open``, the places of charts that are not closed, as often as there are some
              /TOKEN/rollouts, /TOKEN/group (of inspector), /TOKEN/rollouts.parquet, with the run's number as ``run``

The token in the path keeps other users of the machine, and other pages of the browser, out.
"""

from __future__ import annotations

import hashlib
import io
import secrets
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from areal_lora.network.http_server import listening
from areal_lora.obs.metrics.reader import MetricsTail, iter_metrics
from areal_lora.obs.metrics.records import ResumeRecord
from areal_lora.obs.report.inspector import GroupPlace, RolloutFilter, RolloutIndex
from areal_lora.obs.report.page import PageData, RunPage, page_text
from areal_lora.obs.report.side_by_side import pages_of
from areal_lora.processes.startup import raise_open_files
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.run_folder.status import run_role, set_status

if TYPE_CHECKING:
    import pyarrow as pa

ROLE = "page"
NOT_STORED = {"Cache-Control": "no-store"}
T = TypeVar("T")


class LiveRun:
    """A run whose page follows its records: a refresh reads the new ones alone.

    It reads all where a resume made old ones void, or an adapter has joined; one that has left stays.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._tail, self.page = folder, MetricsTail(folder), RunPage(folder)

    def refresh(self) -> RunPage:
        """Read new records. Raises OSError, and ConfigError for a line that is not a record."""
        void, names = False, {""}
        while records := self._tail.read_new():
            void = void or any(isinstance(record, ResumeRecord) for record in records)
            names.update(record.adapter for record in records)
            for record in () if void else records:
                self.page.add(record)
        if not void and names <= self.page.runs.keys() | {""}:
            return self.page
        newer = RunPage(self._folder, known=self.page.runs)
        if void or newer.runs.keys() != self.page.runs.keys():
            self.page = newer
            for record in iter_metrics(self._folder, self._tail.offset):  # later ones come with the next refresh
                self.page.add(record)
        return self.page


def application(folders: Sequence[RunFolder], token: str) -> Starlette:
    """The routes below ``/token/``; all requests share the runs and are answered one after the other.

    The records so far are read here, so that the first page does not wait for them.
    """
    runs = [LiveRun(folder) for folder in folders]

    def newest(opened: Collection[str] = ()) -> PageData:
        return pages_of([run.refresh() for run in runs], opened)

    newest()

    async def page(request: Request) -> Response:
        return HTMLResponse(page_text(newest(), live=True), headers={"Referrer-Policy": "no-referrer"})

    async def data(request: Request) -> Response:
        body = msgspec.json.encode(newest(request.query_params.getlist("open")))
        tag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304)
        return Response(body, media_type="application/json", headers=NOT_STORED | {"ETag": tag})

    def query_of(request: Request, kind: type[T]) -> tuple[RolloutIndex, T]:
        """The run and the query of an address. Raises HTTPException for one that is not understood."""
        values = dict(request.query_params)
        try:
            index = runs[int(values.pop("run", "0"))].page.rollouts
            return index, msgspec.convert(values, kind, strict=False)
        except (ValueError, IndexError) as error:
            raise HTTPException(400, str(error)) from error

    async def rollouts(request: Request) -> Response:
        index, chosen = query_of(request, RolloutFilter)
        return Response(msgspec.json.encode(index.page(chosen)), media_type="application/json", headers=NOT_STORED)

    async def group(request: Request) -> Response:
        index, place = query_of(request, GroupPlace)
        return Response(msgspec.json.encode(index.group(place)), media_type="application/json", headers=NOT_STORED)

    async def parquet(request: Request) -> Response:
        index, chosen = query_of(request, RolloutFilter)
        disposition = {"Content-Disposition": 'attachment; filename="rollouts.parquet"'}
        return StreamingResponse(parquet_bytes(index.tables(chosen)), headers=NOT_STORED | disposition)

    found = {"": page, "data": data, "rollouts": rollouts, "group": group, "rollouts.parquet": parquet}
    return Starlette(routes=[Route(f"/{token}/{path}", endpoint) for path, endpoint in found.items()])


def parquet_bytes(tables: Iterator[pa.Table]) -> Iterator[bytes]:
    """One Parquet file of all ``tables``; nothing without any."""
    import pyarrow.parquet as pq

    sink, writer = io.BytesIO(), None
    for table in tables:
        writer = writer or pq.ParquetWriter(sink, table.schema, compression="zstd")
        writer.write_table(table)
        yield sink.getvalue()
        sink.seek(0)
        sink.truncate()
    if writer:
        writer.close()
        yield sink.getvalue()


def serve_pages(folders: Sequence[RunFolder], port: int, announce: Callable[[str], None]) -> None:
    """Serve until an interrupt; ``announce`` the address first. Port 0: a free one. Raises ConfigError."""
    import uvicorn

    raise_open_files()  # of rollouts
    token = secrets.token_urlsafe(16)
    app = application(folders, token)
    with listening("127.0.0.1", port, "--port") as listener:
        announce(f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/")
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        uvicorn.Server(config).run([listener])


def _serve(folder: RunFolder) -> None:
    def announce(address: str) -> None:
        write_file(folder.page, f"{address}\n", mode=0o600)
        set_status(folder, ROLE, 0, "serving the page")

    serve_pages([folder], 0, announce)


if __name__ == "__main__":
    sys.exit(run_role(ROLE, _serve))

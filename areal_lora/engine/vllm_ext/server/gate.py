"""Hold requests back while a server's weights change (merged rollouts).

    open     requests enter and leave; each is on the one version that the weights are
    closing  none enters; those inside end: rollouts are cut, pinned requests fail with the reason
    closed   none is inside: the weights may change

What waits at the gate starts on the next version. So no step of the model, and no cached block, mixes two versions.

End of a server: at once, or in order.

A server that leaves in order (SIGTERM with ``--grace-s``) does not let its run notice it as a failure::

    door closed         new requests are handed back: a 503 that names the reason, for another server
    pings tell it       the trainer releases the server before its next publish; until then it takes part in publishes
    dismissed           the controller routes nothing to it any more, and the trainer counts on it no more
    grace over          what still runs is handed back, too; a publish in progress is awaited
    endpoint withdrawn  the server ends
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lora.errors import PublishError, UnknownVersionError
from areal_lora.network.http_server import LEAVING_HEADER, BodyLimit, header, refusal
from areal_lora.network.tls import Plane, authorized, bearer_key, ca_pem, on_loopback
from areal_lora.processes.startup import get_logger
from areal_lora.run_folder.atomic import write_file
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import Endpoint, forget_endpoint, read_endpoint
from areal_lora.run_folder.status import set_status
from areal_lora.weight_sync.messages import RESTART_EXIT


@dataclass(slots=True, eq=False)
class _Inside:
    task: asyncio.Task[Any] | None
    pinned: bool
    ended: str = ""  # why the request was ended from outside


class Gate:
    """Open unless `closed` is in progress. Call it from one event loop only."""

    def __init__(self) -> None:
        self._open, self._left = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._inside: set[_Inside] = set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    async def opened(self) -> None:
        """Wait until requests may enter. Enter before the next ``await``."""
        await self._open.wait()

    @contextmanager
    def inside(self, *, pinned: bool) -> Iterator[None]:
        """Count a request in. Raises PublishError where the caller did not wait, UnknownVersionError if it is ended."""
        if not self.is_open:
            raise PublishError("the weights of this server are being replaced; try again")
        request = _Inside(asyncio.current_task() if pinned else None, pinned)
        self._inside.add(request)
        try:
            yield
        except asyncio.CancelledError:
            if not request.ended or request.task is None:
                raise
            request.task.uncancel()
            raise UnknownVersionError(request.ended) from None
        finally:
            self._inside.discard(request)
            self._left.set()

    @property
    def holds_pinned(self) -> bool:
        return any(request.pinned for request in self._inside)

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Let no request enter meanwhile."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def end_pinned(self, reason: str) -> int:
        """End the pinned requests inside, and return how many."""
        ended = [request for request in self._inside if request.pinned and request.task is not None]
        for request in ended:
            request.ended = reason
            assert request.task is not None
            request.task.cancel()
        return len(ended)

    async def empty(self, timeout_s: float) -> bool:
        """Wait until no request is inside; False if one is, after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._inside:
                    self._left.clear()
                    await self._left.wait()
        return not self._inside


LOOK_S = 0.05

log = get_logger(__name__)


class Stop:
    """A requested end of the server, and its exit code. Create it in the server's event loop.

    ``grace_s``: the first signal lets the server leave in order, for at most so long; the second one ends it at once.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        self.grace_s, self.code = grace_s, 0
        self.event, self.leaving, self.dismissed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signals(self) -> None:
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, self.request)

    def request(self) -> None:
        if self.grace_s and not self.leaving.is_set():
            self.leaving.set()
        else:
            self.event.set()

    def restart(self) -> None:
        """End the server so that the launcher starts a new one in its place."""
        self.code = RESTART_EXIT
        self.event.set()


class Door:
    """ASGI app before the data plane: counts the requests in progress, and turns requests away once closed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.in_flight = 0
        self._closed, self._cut = False, asyncio.Event()

    def close(self) -> None:
        """Hand back new requests."""
        self._closed = True

    def cut(self) -> None:
        """Hand back the requests in progress; an answer that has started is cut off."""
        self._cut.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._closed:
            await _handed_back()(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.in_flight += 1
        work = asyncio.ensure_future(self._app(scope, receive, noted))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({work, cut}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
                return
            work.cancel()
            await asyncio.wait({work})
            if not started:
                await _handed_back()(scope, receive, send)
        finally:
            work.cancel()
            cut.cancel()
            self.in_flight -= 1


def _handed_back() -> Response:
    headers = {LEAVING_HEADER: "1", "Connection": "close"}
    return Response("this server is leaving the run", status_code=503, headers=headers, media_type="text/plain")


async def leave_in_order(
    stop: Stop, door: Door, *, busy: Callable[[], bool], publish_s: float, run_folder: RunFolder, index: int
) -> None:
    """Wait for a requested leave, carry it out, then set ``stop.event``.

    ``busy``: whether a publish or a join is in progress, for at most ``publish_s``. The endpoint of server ``index``
    is withdrawn if it is still that of this process.
    """
    await stop.leaving.wait()
    door.close()
    set_status(run_folder, "server", index, f"leaving: {door.in_flight} requests in progress")
    log.info("leaving; %d requests are in progress", door.in_flight)
    await _until(lambda: stop.dismissed.is_set() and not door.in_flight, stop.grace_s)
    if door.in_flight:
        log.info("%d requests are handed back after %g s", door.in_flight, stop.grace_s)
    door.cut()
    await _until(lambda: not busy(), publish_s)
    withdraw(run_folder, index, os.getpid())
    stop.event.set()


def withdraw(run_folder: RunFolder, index: int, pid: int) -> None:
    """Remove the endpoint of process ``pid``, if no later session of server ``index`` has published another one."""
    endpoint: Endpoint | None = read_endpoint(run_folder, "server", index)
    if endpoint is not None and endpoint.pid == pid:
        forget_endpoint(run_folder, "server", index)


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition() and loop.time() < deadline:
        await asyncio.sleep(LOOK_S)


MAX_DATA_BODY_BYTES = 64 << 20  # 32 prompts of an evaluation with 250,000 tokens each, as text


def guarded(data_app: ASGIApp, bind: str, secret: str, *, closed: bool = False) -> ASGIApp:
    """Guard the data plane for ``bind``: on loopback without a key, elsewhere with the key of the plane."""
    limited = BodyLimit(data_app, MAX_DATA_BODY_BYTES)
    return limited if on_loopback(bind) and not closed else BearerAuth(limited, secret, Plane.DATA)


class BearerAuth:
    """Answer 401 to any request without the key of ``plane``, before any other processing."""

    def __init__(self, app: ASGIApp, secret: str, plane: Plane) -> None:
        self._app, self._secret, self._plane = app, secret, plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not authorized(header(scope, b"authorization"), self._secret, self._plane):
            await refusal(401, f"missing or wrong key of the {self._plane} plane")(scope, receive, send)
            return
        await self._app(scope, receive, send)


def write_client_files(run_folder: RunFolder, secret: str) -> None:
    """Write what a client outside the run needs for the data plane: certificate and bearer key (mode 0600)."""
    write_file(run_folder.ca, ca_pem(secret, Plane.DATA), mode=0o644)
    write_file(run_folder.data_key, bearer_key(secret, Plane.DATA), mode=0o600)

"""End of a server: at once, or in order.

A server that leaves in order does not let its run notice it as a failure. SIGTERM with ``--grace-s`` requests it, or
its process id in ``RunFolder.leaves``::

    door closed         new requests are handed back: a 503 that names the reason, for another server
    pings tell it       the trainer releases the server before its next publish; until then it takes part in publishes
    dismissed           the controller routes nothing to it any more, and the trainer counts on it no more
    grace over          what still runs is handed back, too; a publish in progress is awaited
    endpoint withdrawn  the server ends
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from areal_lora.network.http_server import LEAVING_HEADER
from areal_lora.processes.log import get_logger
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import Endpoint, forget_endpoint, read_endpoint
from areal_lora.run_folder.status import set_status

LOOK_S, REQUEST_S = 0.05, 5.0
GRACE_S = 20.0
"""Of a server without ``--grace-s``."""

log = get_logger(__name__)


class Stop:
    """A requested end of the server. Create it in the server's event loop.

    ``grace_s``: the first signal lets the server leave in order, for at most so long; the second one ends it at once.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        self.grace_s = grace_s
        self.event, self.leaving, self.dismissed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signals(self) -> None:
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, self.request)

    def request(self) -> None:
        if self.grace_s and not self.leaving.is_set():
            self.leaving.set()
        else:
            self.event.set()


class Door:
    """ASGI app before the data plane: counts the requests in progress, and turns requests away once closed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.in_flight = 0
        self.closed = False
        """Whether new requests are handed back."""
        self.cut = asyncio.Event()
        """Set it to hand back the requests in progress; an answer that has started is cut off."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self.closed:
            await _handed_back()(scope, receive, send)
            return
        started = False

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.in_flight += 1
        work = asyncio.ensure_future(self._app(scope, receive, noted))
        cut = asyncio.ensure_future(self.cut.wait())
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
    while not stop.leaving.is_set():
        try:
            await asyncio.wait_for(stop.leaving.wait(), REQUEST_S)
        except TimeoutError:
            if await asyncio.to_thread(_is_to_leave, run_folder, index):
                stop.leaving.set()
    grace_s = stop.grace_s or GRACE_S
    door.closed = True
    set_status(run_folder, "server", index, f"leaving: {door.in_flight} requests in progress")
    log.info("leaving; %d requests are in progress", door.in_flight)
    await _until(lambda: stop.dismissed.is_set() and not door.in_flight, grace_s)
    if door.in_flight:
        log.info("%d requests are handed back after %g s", door.in_flight, grace_s)
    door.cut.set()
    await _until(lambda: not busy(), publish_s)
    withdraw(run_folder, index, os.getpid())
    stop.event.set()


def _is_to_leave(run_folder: RunFolder, index: int) -> bool:
    """Whether the request is for this process: its launcher may have removed it for the next one meanwhile."""
    with contextlib.suppress(OSError):
        return (run_folder.leaves / f"server-{index}").read_text(encoding="ascii").strip() == str(os.getpid())
    return False


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

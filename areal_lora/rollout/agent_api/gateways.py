"""The sessions of agents in processes beside the controller, on machines that have the cores.

    agent --HTTP--> gateway process: `Session`, `CompletionClient` --HTTP--> rollout server
                       |  sessions to open and close; a lease, and its end, for each request
                    controller: `Router`, the workflow of the session

A turn of a long conversation takes milliseconds of CPU, and the controller's event loop has a thousand of them a
second. A session is in one process from its first request to its last one. What must be in one place stays in the
controller: which server has a request, under which version, and how servers fare.

A frame is a 4-byte big-endian length and a list of messages in msgpack, those of one turn of the event loop; the first
of a process is its port. What a lost process had is no sample of the policy: its samples are repeated one by one, as
those of a lost worker.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias

import msgspec

from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task
from areal_lora.rollout.agent_api.ended_sessions import EndedSession, OpenSession
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.custom_child import ContextFields, fields_of
from areal_lora.rollout.routing import Home, LeaseOutcome, Router, Server, ServerLease, VersionRetired
from areal_lora.rollout.workflow import WorkerLost, WorkflowContext
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef

CORES_EACH = 8  # the others are the servers', the trainer's and the environments'
MOST_PROCESSES = 16  # of 0.4 GiB each
PAUSE_S = 60.0  # between two starts of one
BEAT_S, SILENT_BEATS = 1.0, 60  # a process without a frame for so many is killed
FRAME_BYTES = 1 << 20  # that are read at a time

log = get_logger(__name__)


class OpenCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    session: int
    context: ContextFields
    ref: AdapterRef
    seed: int
    tool_parser: str | None


class CloseCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A session is ``wanted``, or has been cancelled: then there is no answer."""

    session: int
    wanted: bool


class Grant(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `LeaseCall`; with ``retired`` no server holds the version."""

    lease: int
    ref: AdapterRef
    url: str = ""
    retired: str = ""


class ServerChange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Of the server that has had leases at ``url`` until now."""

    url: str
    leaving: bool
    lost: bool


class SessionChange(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A session has its key, or has ended; else a request of it has failed."""

    session: int
    key: str = ""
    ended: EndedSession | None = None


class LeaseCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Arguments of `Router.lease`; the home is that of the session."""

    lease: int
    session: int
    ref: AdapterRef
    sequences: int
    exactly: bool


class LeaseEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    lease: int
    outcome: LeaseOutcome


ToGateway: TypeAlias = OpenCall | CloseCall | Grant | ServerChange
FromGateway: TypeAlias = SessionChange | LeaseCall | LeaseEnd


class Link:
    """Messages with the process at the other end of a connected socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._waiting = reader, writer, list[msgspec.Raw]()

    @classmethod
    async def over(cls, sock: socket.socket) -> Self:
        return cls(*await asyncio.open_connection(sock=sock, limit=FRAME_BYTES))

    def send(self, message: ToGateway | FromGateway | int) -> None:
        encoded = msgspec.Raw(msgspec.msgpack.encode(message))
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(encoded)

    def flush(self) -> None:
        """Send what waits; an empty frame is a beat."""
        body = msgspec.msgpack.encode(self._waiting)
        self._waiting.clear()
        if not self._writer.is_closing():
            self._writer.write(len(body).to_bytes(4, "big") + body)

    async def received(self) -> bytes:
        """The next frame. Raises IncompleteReadError or OSError at the end of the other process."""
        size = int.from_bytes(await self._reader.readexactly(4), "big")
        return await self._reader.readexactly(size)

    def close(self) -> None:
        self._writer.close()


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, kw_only=True)
class _Remote:
    """A session in a process."""

    home: Home | None
    key: asyncio.Future[str] = field(default_factory=_future)
    fault: asyncio.Future[None] = field(default_factory=_future)
    ended: asyncio.Future[EndedSession] = field(default_factory=_future)

    def lose(self, error: WorkerLost) -> None:
        _answer(self.fault, None)
        for future in (self.key, self.ended):
            if not future.done():
                future.set_exception(error)
                future.exception()  # a workflow that is being cancelled does not look at it


@dataclass(slots=True, kw_only=True)
class _Gateway:
    """One process that is ready: its sessions, the leases of their requests, and those that wait for a server."""

    link: Link
    process: Process
    router: Router
    port: int
    sessions: dict[int, _Remote] = field(default_factory=dict)
    held: dict[int, ServerLease] = field(default_factory=dict)
    waiting: dict[int, asyncio.TimerHandle] = field(default_factory=dict)
    silent: int = 0

    async def watch(self) -> None:
        """Kill the process if it hangs. ``silent`` counts beats in which this process has run."""
        while self.silent < SILENT_BEATS:
            await asyncio.sleep(BEAT_S)
            self.silent += bool(self.port)
        log.warning("a gateway has sent nothing for %g s: it is killed", SILENT_BEATS * BEAT_S)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    def take(self, message: FromGateway) -> None:
        if isinstance(message, LeaseCall):
            self._lease(message)
        elif isinstance(message, LeaseEnd):
            self._end(message)
        elif (session := self.sessions.get(message.session)) is None:
            pass  # it has been cancelled
        elif message.key:
            _answer(session.key, message.key)
        elif message.ended is not None:
            _answer(session.ended, message.ended)
        else:
            _answer(session.fault, None)

    def _lease(self, call: LeaseCall) -> None:
        self.waiting.pop(call.lease, None)
        if (session := self.sessions.get(call.session)) is None:
            return  # its requests are being cancelled
        try:
            found = self.router.take(call.ref, call.sequences, session.home, exactly=call.exactly)
        except VersionRetired as error:
            self.link.send(Grant(lease=call.lease, ref=call.ref, retired=str(error)))
            return
        if isinstance(found, float):
            self.waiting[call.lease] = asyncio.get_running_loop().call_later(found, self._lease, call)
            return
        found.server.watchers.add(self.changed)
        self.held[call.lease] = found
        self.link.send(Grant(lease=call.lease, url=found.server.url, ref=found.ref))

    def _end(self, end: LeaseEnd) -> None:
        if (timer := self.waiting.pop(end.lease, None)) is not None:
            timer.cancel()
        if (held := self.held.pop(end.lease, None)) is not None:
            held.outcome = end.outcome
            self.router.end(held)

    def changed(self, server: Server) -> None:
        self.link.send(ServerChange(url=server.url, leaving=server.leaving, lost=server.lost))

    def lose(self) -> None:
        """Of a process that has ended: its leases, and its sessions."""
        for lease in [*self.waiting, *self.held]:
            self._end(LeaseEnd(lease=lease, outcome=""))
        error = WorkerLost(f"its gateway process ended with status {self.process.returncode}")
        for session in self.sessions.values():
            session.lose(error)


def _answer(future: asyncio.Future[Any], value: object) -> None:
    if not future.done():
        future.set_result(value)


class Gateways(Sessions):
    """Sessions in ``most`` processes, used with ``async with``; in this one while none is ready.

    The first session starts them. ``model`` is the folder of the tokenizer.
    """

    def __init__(self, model: str, run_folder: RunFolder, router: Router, most: int) -> None:
        super().__init__()
        self._model, self._run_folder, self._router = model, run_folder, router
        self._most, self._numbers = most, itertools.count()
        self._ready, self._tasks = list[_Gateway](), list[asyncio.Task[None]]()

    @contextlib.asynccontextmanager
    async def opened(
        self, context: WorkflowContext, ref: AdapterRef, seed: int, tool_parser: str | None = None
    ) -> AsyncIterator[OpenSession]:
        self.start()
        gateway = min(self._ready, key=lambda each: len(each.sessions), default=None)
        if gateway is None:
            async with super().opened(context, ref, seed, tool_parser) as here:
                yield here
            return
        client, number, wanted = context.client, next(self._numbers), False
        assert isinstance(client, CompletionClient)
        gateway.sessions[number] = session = _Remote(home=client.home)
        fields = fields_of(context, self._model)
        gateway.link.send(OpenCall(session=number, context=fields, ref=ref, seed=seed, tool_parser=tool_parser))
        try:
            opened = OpenSession(port=gateway.port, key=await session.key, fault=session.fault)
            yield opened
            wanted = True
        finally:
            gateway.link.send(CloseCall(session=number, wanted=wanted))
            if not wanted:
                del gateway.sessions[number]
        try:
            opened.ended = await session.ended
        finally:
            del gateway.sessions[number]
        self.count(ref.name, opened.ended.n_untrained)

    def start(self) -> None:
        if not self._tasks:
            self._tasks += [watched_task("agent-gateway", partial(self._serve, i)) for i in range(self._most)]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, number: int) -> None:
        """Start process ``number``, pass on what it writes, and start it again after its end."""
        while True:
            started_s = time.monotonic()
            try:
                await self._served(number)
            except OSError as error:
                log.warning("gateway %d cannot be started: %s", number, error)
            await asyncio.sleep(max(0.0, started_s + PAUSE_S - time.monotonic()))

    async def _served(self, number: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd, argv = theirs.fileno(), (sys.executable, "-I", "-m", "areal_lora.rollout.agent_api.gateway_process")
            words = str(fd), str(number), self._model, str(self._run_folder.path)
            process = await asyncio.create_subprocess_exec(*argv, *words, pass_fds=[fd], start_new_session=True)
        link = await Link.over(ours)
        gateway = _Gateway(link=link, process=process, router=self._router, port=0)
        watch = watched_task("gateway-watch", gateway.watch)
        try:
            (gateway.port,) = msgspec.msgpack.decode(await link.received(), type=list[int])
            self._ready.append(gateway)
            log.info("agents' sessions have gateway %d", number)
            while True:
                for message in _decoded(await link.received()):
                    gateway.take(message)
                gateway.silent = 0
        except (asyncio.IncompleteReadError, OSError):
            log.warning("gateway %d has ended; samples of its sessions are repeated", number)
        finally:
            watch.cancel()
            if gateway in self._ready:
                self._ready.remove(gateway)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            link.close()
            gateway.lose()


_decoded = msgspec.msgpack.Decoder(list[FromGateway]).decode


def processes_of_this_machine() -> int:
    return min(MOST_PROCESSES, len(os.sched_getaffinity(0)) // CORES_EACH)

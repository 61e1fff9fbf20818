"""A process with sessions of agents, which `gateways` starts: ``gateway_process FD NUMBER MODEL RUN_FOLDER``.

It talks to its parent over socket FD, and ends with it. MODEL is the folder of the tokenizer.
"""

import asyncio
import contextlib
import copy
import itertools
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

from areal_lora.config.sections.task import PromptFormat
from areal_lora.data.prompts import Formatter, TextTokenizer, load_tokenizer
from areal_lora.processes.log import setup_logging
from areal_lora.processes.startup import collector_paused, rare_full_collections
from areal_lora.processes.watched import watched_task
from areal_lora.rollout.agent_api import gateways as m
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.agent_api.session import Session, Sessions
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.custom_child import context_of
from areal_lora.rollout.routing import Home, Router, Server, ServerLease, VersionRetired
from areal_lora.rollout.workflow import WorkflowContext
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef


@dataclass(slots=True)
class _Leases:
    """Those of all sessions by number: requested ones, and the servers of those that are granted."""

    link: m.Link
    numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    requested: dict[int, asyncio.Future[ServerLease]] = field(default_factory=dict)
    servers: dict[int, Server] = field(default_factory=dict)

    def take(self, grant: m.Grant) -> None:
        requested = self.requested.get(grant.lease)
        if requested is None or requested.done():
            return  # it has been cancelled
        if grant.retired:
            requested.set_exception(VersionRetired(grant.retired))
        else:
            self.servers[grant.lease] = server = Server(grant.url)
            requested.set_result(ServerLease(server=server, ref=grant.ref, sequences=0))

    def change(self, change: m.ServerChange) -> None:
        for server in self.servers.values():
            if server.url == change.url:
                server.leaving = change.leaving
                if change.lost:
                    server.lose()


class _SessionRouter(Router):
    """The controller's, for the requests of one session."""

    def __init__(self, leases: _Leases, session: int) -> None:
        super().__init__()
        self._leases, self._session = leases, session

    @contextlib.asynccontextmanager
    async def lease(
        self, ref: AdapterRef, sequences: int, clock: asyncio.Timeout, home: Home | None = None, *, exactly: bool = True
    ) -> AsyncIterator[ServerLease]:
        number, leases, lease = next(self._leases.numbers), self._leases, None
        leases.requested[number] = asyncio.get_running_loop().create_future()
        leases.link.send(
            m.LeaseCall(lease=number, session=self._session, ref=ref, sequences=sequences, exactly=exactly)
        )
        try:
            lease = await leases.requested[number]
            lease.server.clocks.add(clock)
            if lease.server.lost:  # since the grant
                lease.server.lose()
            yield lease
        finally:
            del leases.requested[number]
            leases.servers.pop(number, None)
            leases.link.send(m.LeaseEnd(lease=number, outcome=lease.outcome if lease else ""))


@dataclass(slots=True, kw_only=True)
class _Process:
    """What it has: ``contexts`` by their fields as JSON, ``running`` sessions by number."""

    link: m.Link
    leases: _Leases
    client: CompletionClient
    tokenizer: TextTokenizer
    sessions: Sessions
    contexts: dict[bytes, WorkflowContext] = field(default_factory=dict)
    running: dict[int, Session] = field(default_factory=dict)

    def take(self, message: m.ToGateway) -> None:
        match message:
            case m.Grant():
                self.leases.take(message)
            case m.ServerChange():
                self.leases.change(message)
            case m.OpenCall():
                self._open(message)
            case m.CloseCall():
                session = self.running.pop(message.session)
                self.sessions.close(session)
                if message.wanted:
                    self.link.send(m.SessionChange(session=message.session, ended=session.ended()))

    def _open(self, call: m.OpenCall) -> None:
        key, client = msgspec.json.encode(call.context), copy.copy(self.client)
        client.router, client.home = _SessionRouter(self.leases, call.session), Home()
        client.pins = call.context.evaluating
        if (context := self.contexts.get(key)) is None:
            formatter = Formatter(tokenizer=self.tokenizer, how=PromptFormat.model_validate(call.context.format))
            self.contexts[key] = context = context_of(call.context, client, formatter)
        context = replace(context, client=client)
        session = Session(context=context, ref=call.ref, seed=call.seed, tool_parser=call.tool_parser)
        session.fault.add_done_callback(lambda _: self.link.send(m.SessionChange(session=call.session)))
        self.running[call.session] = session
        self.link.send(m.SessionChange(session=call.session, key=self.sessions.open(session)))


async def serve(sock: socket.socket, model: str, run_folder: RunFolder) -> None:
    """Serve until the parent has ended."""
    with collector_paused():
        tokenizer = load_tokenizer(model)
    leases = _Leases(link := await m.Link.over(sock))
    client = CompletionClient(_SessionRouter(leases, 0), read_secret(run_folder))
    async with client, agent_gateway() as sessions:
        process = _Process(link=link, leases=leases, client=client, tokenizer=tokenizer, sessions=sessions)
        link.send(sessions.port)
        beats = watched_task("gateway-beats", partial(_beat, link))
        with contextlib.suppress(asyncio.IncompleteReadError, OSError), rare_full_collections() as collect:
            while True:
                for message in _decoded(await link.received()):
                    process.take(message)
                collect()
        beats.cancel()


async def _beat(link: m.Link) -> None:
    while True:
        await asyncio.sleep(m.BEAT_S)
        link.flush()


_decoded = msgspec.msgpack.Decoder(list[m.ToGateway]).decode


if __name__ == "__main__":
    setup_logging("agent-gateway", int(sys.argv[2]))
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[3], RunFolder.of(sys.argv[4])))

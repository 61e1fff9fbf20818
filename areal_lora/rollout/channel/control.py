"""The control socket: a zmq ROUTER behind CURVE, keys derived from the run secret."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from areal_lora.errors import ArealLoraError
from areal_lora.network.addresses import bracketed
from areal_lora.network.curve import OnlyKeyOf, serve_curve
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched_zmq import WatchedAuthenticator
from areal_lora.rollout.channel.messages import Failed, Reply, Request, decode_request, encode
from areal_lora.rollout.ledger.file import LedgerError

SERVER_ROLE = "controller"
CLIENT_ROLE = "trainer"
MAX_REQUEST_BYTES = 64 << 20  # the longest is a greeting with the ledger's snapshots
MAX_REPLY_BYTES = 8 << 30  # a batch: 4,096 sequences of 32,768 tokens take about 3 GiB

log = get_logger(__name__)
Handler = Callable[[Request], Awaitable[Reply]]


class ControlSocket:
    """Answers each request in its own task, so that a long poll delays no other request."""

    def __init__(self, host: str, secret: str) -> None:
        self._context = zmq.asyncio.Context()
        self._authenticator = WatchedAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=OnlyKeyOf(secret, CLIENT_ROLE))
        self._socket = self._context.socket(zmq.ROUTER)
        serve_curve(self._socket, secret, SERVER_ROLE, MAX_REQUEST_BYTES)
        self._socket.linger = 500  # ms
        self._socket.ipv6 = ":" in host
        self.port = self._socket.bind_to_random_port(f"tcp://{bracketed(host)}")

    async def serve(self, handler: Handler, tasks: asyncio.TaskGroup) -> None:
        """Receive until cancelled. ArealLoraError becomes a Failed reply; LedgerError and others end the task group."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 3:
                tasks.create_task(self._answer(handler, *frames))

    async def _answer(self, handler: Handler, client: bytes, request_id: bytes, payload: bytes) -> None:
        reply: Reply
        try:
            reply = await handler(decode_request(payload))
        except msgspec.DecodeError as error:
            reply = Failed(reason=f"request is not understood: {error}")
        except LedgerError:
            raise  # no request may be answered from an inconsistent ledger
        except ArealLoraError as error:
            log.error("request refused: %s", error)
            reply = Failed(reason=str(error))
        await self._socket.send_multipart([client, request_id, encode(reply)])

    def close(self) -> None:
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

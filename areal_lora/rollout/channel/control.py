"""The control socket: answers the trainer's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from areal_lora.errors import ArealLoraError
from areal_lora.network.rpc import Listener, Wire
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.channel_messages import ErrorReply, Reply, Request, decode_request, encode
from areal_lora.rollout.ledger.file import LedgerError

WIRE = Wire(
    server="controller",
    client="trainer",
    max_request_bytes=64 << 20,  # the longest is a greeting with the ledger's snapshots
    max_reply_bytes=8 << 30,  # a batch: 4,096 sequences of 32,768 tokens take about 3 GiB
)

log = get_logger(__name__)
Handler = Callable[[Request], Awaitable[Reply]]


class ControlSocket:
    """Answers each request in its own task, so that a long poll delays no other request."""

    def __init__(self, host: str, secret: str) -> None:
        self._listener = Listener(host, secret, WIRE)
        self.port = self._listener.port

    async def serve(self, handler: Handler, tasks: asyncio.TaskGroup) -> None:
        """Receive until cancelled. ArealLoraError becomes an ErrorReply; LedgerError and others end the task group."""
        while True:
            frames = await self._listener.socket.recv_multipart()
            if len(frames) == 3:
                tasks.create_task(self._answer(handler, *frames))

    async def _answer(self, handler: Handler, client: bytes, request_id: bytes, payload: bytes) -> None:
        reply: Reply
        try:
            reply = await handler(decode_request(payload))
        except msgspec.DecodeError as error:
            reply = ErrorReply(reason=f"request is not understood: {error}")
        except LedgerError:
            raise  # no request may be answered from an inconsistent ledger
        except ArealLoraError as error:
            log.error("request refused: %s", error)
            reply = ErrorReply(reason=str(error))
        await self._listener.socket.send_multipart([client, request_id, encode(reply)])

    def close(self) -> None:
        self._listener.close(linger_s=0.5)

"""Client of the authenticated store for torch.distributed (``store_server``).

torch calls a ``CurveStore`` from C++ through its virtual methods and takes the GIL for each call. Every wait in this
module releases the GIL, so the server may be a thread of the same process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Self

import msgspec
import torch.distributed as dist
import zmq
from zmq.utils.monitor import recv_monitor_message

from areal_lora.distributed.store_server import (
    CLIENT_ROLE,
    MAX_MESSAGE_BYTES,
    SERVER_ROLE,
    Add,
    Append,
    Await,
    Count,
    Delete,
    Has,
    Put,
    StoreReply,
    StoreRequest,
    Swap,
)
from areal_lora.network.addresses import bracketed
from areal_lora.network.curve import HANDSHAKE_REFUSED, connect_curve


class _Connection:
    """A connection for one thread at a time. Never reconnects. Raises DistNetworkError, DistStoreError."""

    _LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, secret: str, deadline: float
    ) -> None:
        self._at = f"{host}:{port}"
        self._numbers = itertools.count(1)
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.reconnect_ivl = -1
        self._socket.ipv6 = ":" in host
        connect_curve(self._socket, secret, CLIENT_ROLE, SERVER_ROLE, MAX_MESSAGE_BYTES)
        self._monitor = self._socket.get_monitor_socket(self._LOST | HANDSHAKE_REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            self._socket.connect(f"tcp://{bracketed(host)}:{port}")
            if not self._wait(self._monitor, deadline):
                raise dist.DistNetworkError(f"{self._at} does not answer")
        except BaseException:
            self.close()
            raise

    def usable(self) -> bool:
        """Whether the idle connection still stands: after the handshake every event reports its end."""
        return not self._monitor.poll(0)

    def exchange(self, request: StoreRequest, deadline: float) -> StoreReply | None:
        """Return the reply, or None at ``deadline``; the connection is unusable after that."""
        number = next(self._numbers).to_bytes(8, "little")
        try:
            self._socket.send_multipart([number, msgspec.msgpack.encode(request)], zmq.NOBLOCK)
        except zmq.Again:
            raise dist.DistNetworkError(f"{self._at} has closed the connection") from None
        if not self._wait(self._socket, deadline):
            return None
        answered, payload = self._socket.recv_multipart()
        assert answered == number, "a connection with an open request is not used again"
        return msgspec.msgpack.decode(payload, type=StoreReply)

    def _wait(self, wanted: zmq.Socket[bytes], deadline: float) -> bool:
        """Whether a message on ``wanted``, or the end of the handshake, arrived in time."""
        while True:
            left_ms = max(0, int((deadline - time.monotonic()) * 1000) + 1)
            ready = dict(self._poller.poll(left_ms))
            if self._socket in ready and wanted is self._socket:
                return True
            if self._monitor in ready:
                event = recv_monitor_message(self._monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    if wanted is self._monitor:
                        return True
                elif event & HANDSHAKE_REFUSED:
                    raise dist.DistNetworkError(f"{self._at} refused the handshake: it belongs to another run")
                else:
                    what = "refused the connection" if wanted is self._monitor else "has closed the connection"
                    raise dist.DistNetworkError(f"{self._at} {what}")
            elif time.monotonic() >= deadline:
                return False

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


class CurveStore(dist.Store):  # type: ignore[misc]  # torch carries no types here
    """Client of a ``StoreServer`` for any number of threads. The constructor connects.

    Methods and errors are those of ``torch.distributed.TCPStore``: DistStoreError if a key is not set in time,
    DistNetworkError if the server has ended. Queues and ``list_keys`` are missing, because torch's base class does
    not forward them to Python. A server that ends wakes all waiting threads. The store keeps itself alive until
    ``close``: process groups hold only its C++ half, which cannot work alone.
    """

    # More than 15 methods: torch's Store prescribes the names below.

    _open: ClassVar[set[CurveStore]] = set()

    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        super().__init__()
        self.set_timeout(timedelta(seconds=timeout_s))
        self._where, self._secret = (host, port), secret
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy, self._closed = 0, False
        self._open.add(self)
        try:
            self.num_keys()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Refuse further calls. Calls in progress continue up to their deadline."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()
            over = self._busy == 0
        if over:
            self._context.term()
        self._open.discard(self)

    # ------------------------------------------------------------ the names that torch calls

    def set(self, key: str, value: str | bytes) -> None:
        self._call(Put([key], [_raw(value)]))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._call(Put(list(keys), [_raw(v) for v in values]))

    def append(self, key: str, value: str | bytes) -> None:
        self._call(Append(key, _raw(value)))

    def add(self, key: str, amount: int) -> int:
        return self._call(Add(key, amount)).number

    def get(self, key: str) -> bytes:
        return self._await([key], None, fetch=True)[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._await(keys, None, fetch=True)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout, fetch=False)

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call(Has(list(keys))).number)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._call(Swap(key, _raw(expected_value), _raw(desired_value))).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._call(Delete(key)).number)

    def num_keys(self) -> int:
        return self._call(Count()).number

    deleteKey, getNumKeys = delete_key, num_keys  # the names that C++ looks for

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> Self:
        """Return this store: calls of several threads do not wait for each other."""
        return self

    # ------------------------------------------------------------ requests

    def _await(self, keys: Sequence[str], timeout: timedelta | None, *, fetch: bool) -> list[bytes]:
        timeout_s = (self.timeout if timeout is None else timeout).total_seconds()
        return self._call(Await(list(keys), timeout_s, fetch), timeout_s).values

    def _call(self, request: StoreRequest, timeout_s: float | None = None) -> StoreReply:
        timeout_s = self.timeout.total_seconds() if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        connection = self._borrow(deadline)
        reply = None
        try:
            reply = connection.exchange(request, deadline)
        finally:
            self._give_back(connection, usable=reply is not None)
        if reply is None:
            host, port = self._where
            waited = f", keys: {', '.join(request.keys)}" if isinstance(request, Await) else ""
            raise dist.DistStoreError(f"store at {host}:{port}: wait timeout after {timeout_s:.3g} s{waited}")
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply

    def _borrow(self, deadline: float) -> _Connection:
        with self._lock:
            if self._closed:
                raise dist.DistStoreError("the store is closed")
            self._busy += 1
            while self._idle:
                connection = self._idle.pop()
                if connection.usable():
                    return connection
                connection.close()
        try:
            return _Connection(self._context, *self._where, self._secret, deadline)
        except BaseException:
            self._give_back(None, usable=False)
            raise

    def _give_back(self, connection: _Connection | None, *, usable: bool) -> None:
        with self._lock:
            self._busy -= 1
            if connection is not None and usable and not self._closed:
                self._idle.append(connection)
            elif connection is not None:
                connection.close()
            over = self._closed and self._busy == 0
        if over:
            self._context.term()


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

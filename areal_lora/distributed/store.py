"""Client of the authenticated store for torch.distributed (``store_server``).

torch calls a ``CurveStore`` from C++ through its virtual methods and takes the GIL for each call. Every wait in this
module releases the GIL, so the server may be a thread of the same process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar, Self

import msgspec
import torch.distributed as dist
import zmq

from areal_lora.distributed.store_server import (
    WIRE,
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
from areal_lora.network.rpc import Connection, ConnectionLost


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
        self._idle: list[Connection] = []
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
        connection = self._borrow()
        usable = False
        try:
            reply = msgspec.msgpack.decode(
                connection.exchange(msgspec.msgpack.encode(request), timeout_s), type=StoreReply
            )
            usable = True
        except ConnectionLost as lost:
            if not lost.late or not connection.ready:
                another = ": it belongs to another run" if lost.refused else ""
                raise dist.DistNetworkError(f"{lost}{another}") from None
            host, port = self._where
            waited = f", keys: {', '.join(request.keys)}" if isinstance(request, Await) else ""
            raise dist.DistStoreError(f"store at {host}:{port}: wait timeout after {timeout_s:.3g} s{waited}") from None
        finally:
            self._give_back(connection, usable=usable)
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply

    def _borrow(self) -> Connection:
        with self._lock:
            if self._closed:
                raise dist.DistStoreError("the store is closed")
            while self._idle and not self._idle[-1].usable():
                self._idle.pop().close()
            connection = self._idle.pop() if self._idle else Connection(self._context, *self._where, self._secret, WIRE)
            self._busy += 1
            return connection

    def _give_back(self, connection: Connection, *, usable: bool) -> None:
        with self._lock:
            self._busy -= 1
            if usable and not self._closed:
                self._idle.append(connection)
            else:
                connection.close()
            over = self._closed and self._busy == 0
        if over:
            self._context.term()


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)

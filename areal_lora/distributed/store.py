"""The authenticated store for torch.distributed, and messages between trainer ranks outside of the groups that train.

torch's ``TCPStore`` has no authentication: every process that reaches its port can read and overwrite every key.
This store has the same operations behind zmq CURVE, with keys derived from the run secret::

    StoreServer (rank 0, one thread)  <-- ROUTER, CURVE, exactly one address --  CurveStore (every rank, ``store``)

Traffic is encrypted. Both sides prove that they know the secret before the server reads a byte of a request.

torch calls a ``CurveStore`` from C++ through its virtual methods and takes the GIL for each call. Every wait in this
module releases the GIL, so the server may be a thread of the same process.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Literal, Self

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import zmq
from torch.distributed.distributed_c10d import AllgatherOptions

from areal_lora.errors import EnvironmentError_, PublishError, undo_on_error
from areal_lora.network.rpc import Connection, ConnectionLost, RpcServer, Wire
from areal_lora.processes.watched import watched_thread

ENDED = "ended"
"""Once this key is set, waits for keys that are not set fail: DistStoreError with the value, the reason."""
MAX_MESSAGE_BYTES = 16 << 20  # torch keeps addresses, ids and counters here
WIRE = Wire(
    server="torch-store",
    client="torch-store-client",
    max_request_bytes=MAX_MESSAGE_BYTES,
    max_reply_bytes=MAX_MESSAGE_BYTES,
)


class StoreCall(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A method of ``dist.Store`` that returns at once."""

    method: Literal["set", "add", "compare_set", "delete_key", "check", "num_keys"]
    arguments: tuple[Any, ...] = ()


class Await(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered when all keys are set, with their values if ``fetch``."""

    keys: list[str]
    fetch: bool


class StoreReply(msgspec.Struct, frozen=True, array_like=True):
    """Reply to any request: the method's result, or the values; ``error`` is empty on success."""

    result: Any = None
    error: str = ""


# Made once: threads that decode a type for the first time, all at once, end the process.
_decode_request = msgspec.msgpack.Decoder(StoreCall | Await).decode
_decode_reply = msgspec.msgpack.Decoder(StoreReply).decode


class KeyTable:
    """Keys, values, and the senders that wait for missing keys. Does no I/O: ``answer`` sends a reply to a sender.

    A sender that no longer waits ignores the reply.
    """

    def __init__(self, answer: Callable[[list[bytes], StoreReply], None]) -> None:
        self._answer, self._values = answer, dist.HashStore()
        # By the first key that is missing, with its place: else N waits for N keys were N^3 checks.
        self._waiting: dict[str, list[tuple[list[bytes], Await, int]]] = {}

    def handle(self, sender: list[bytes], request: StoreCall | Await) -> None:
        if isinstance(request, Await):
            self._await(sender, request)
            return
        try:
            result = getattr(self._values, request.method)(*request.arguments)
        except (TypeError, ValueError) as error:
            self._answer(sender, StoreReply(error=f"{request.method} of {request.arguments[:1]}: {error}"))
            return
        if request.method in ("set", "add", "compare_set"):
            key = request.arguments[0]
            keys = list(self._waiting) if key == ENDED else [key]
            for waiter in [waiter for key in keys for waiter in self._waiting.pop(key, ())]:
                self._await(*waiter)
        self._answer(sender, StoreReply(result))

    def _await(self, sender: list[bytes], request: Await, first: int = 0) -> None:
        """The keys before ``first`` have been set, but may have been deleted since."""
        for place, key in enumerate(request.keys[first:], first):
            if not self._values.check([key]):
                if self._values.check([ENDED]):
                    self._answer(sender, StoreReply(error=bytes(self._values.get(ENDED)).decode()))
                    return
                self._waiting.setdefault(key, []).append((sender, request, place))
                return
        if first and not self._values.check(request.keys):
            self._await(sender, request)
            return
        self._answer(sender, StoreReply([self._values.get(key) for key in request.keys] if request.fetch else None))


class StoreServer:
    """Serve a table from one daemon thread, on exactly ``host`` and a ``port`` that the system chooses."""

    def __init__(self, host: str, secret: str) -> None:
        self._table = KeyTable(self._answer)
        self._server = RpcServer(host, secret, WIRE, self._take)
        self._thread = watched_thread("torch-store", self._server.run)
        try:
            self.host, self.port = host, self._server.port
        except EnvironmentError_ as error:
            raise dist.DistNetworkError(str(error)) from None

    def close(self) -> None:
        """Stop listening; clients that wait for a key are disconnected at once."""
        self._server.close()
        self._thread.join()

    def _take(self, client: bytes, number: bytes, *parts: bytes) -> None:
        try:
            request = _decode_request(b"".join(parts))
        except msgspec.DecodeError as error:
            self._answer([client, number], StoreReply(error=f"the request is not understood: {error}"))
        else:
            self._table.handle([client, number], request)

    def _answer(self, sender: list[bytes], reply: StoreReply) -> None:
        self._server.send(*sender, msgspec.msgpack.encode(reply))


class CurveStore(dist.Store):  # type: ignore[misc]  # torch carries no types here
    """Client of a ``StoreServer`` for any number of threads. The constructor connects.

    Methods and errors are those of ``torch.distributed.TCPStore``: DistStoreError if a key is not set in time,
    DistNetworkError if the server has ended. What torch uses only where a store has it is missing: appending,
    setting several keys at once, queues, ``list_keys``. A server that ends wakes all waiting threads. The store keeps
    itself alive until ``close``: process groups hold only its C++ half, which cannot work alone.

    The constructor lets gloo read the addresses of all ranks in one request: a group of N ranks is 2 N requests of the
    server, without it 2 N^2.
    """

    _open: ClassVar["set[CurveStore]"] = set()

    def __init__(self, host: str, port: int, secret: str, timeout_s: float) -> None:
        super().__init__()
        os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
        self.set_timeout(timedelta(seconds=timeout_s))
        self._where, self._secret = (host, port), secret
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy, self._closed = 0, False
        self._open.add(self)
        with undo_on_error(self.close):
            self.num_keys()

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
        self._call(StoreCall("set", (key, value)))

    def add(self, key: str, amount: int) -> int:
        return int(self._call(StoreCall("add", (key, amount))))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(map(bytes, self._call(Await(list(keys), fetch=True))))

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call(Await(list(keys), fetch=False), None if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call(StoreCall("check", (list(keys),))))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return bytes(self._call(StoreCall("compare_set", (key, expected_value, desired_value))))

    def delete_key(self, key: str) -> bool:
        return bool(self._call(StoreCall("delete_key", (key,))))

    def num_keys(self) -> int:
        return int(self._call(StoreCall("num_keys")))

    deleteKey, getNumKeys = delete_key, num_keys  # the names that C++ looks for

    def clone(self) -> Self:
        """Return this store: calls of several threads do not wait for each other."""
        return self

    # ------------------------------------------------------------ requests

    def _call(self, request: StoreCall | Await, timeout_s: float | None = None) -> Any:
        timeout_s = self.timeout.total_seconds() if timeout_s is None else timeout_s
        try:
            with self._connection() as connection:
                raw = connection.exchange(msgspec.msgpack.encode(request), timeout_s)
        except ConnectionLost as lost:
            if not lost.late or not connection.ready:
                another = ": it belongs to another run" if lost.refused else ""
                raise dist.DistNetworkError(f"{lost}{another}") from None
            host, port = self._where
            waited = f", keys: {', '.join(request.keys)}" if isinstance(request, Await) else ""
            raise dist.DistStoreError(f"store at {host}:{port}: wait timeout after {timeout_s:.3g} s{waited}") from None
        reply = _decode_reply(raw)
        if reply.error:
            raise dist.DistStoreError(reply.error)
        return reply.result

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """An idle connection, or a new one. After an error it is closed: a late answer may arrive there."""
        with self._lock:
            if self._closed:
                raise dist.DistStoreError("the store is closed")
            while self._idle and not self._idle[-1].usable():
                self._idle.pop().close()
            connection = self._idle.pop() if self._idle else Connection(self._context, *self._where, self._secret, WIRE)
            self._busy += 1
        usable = False
        try:
            yield connection
            usable = True
        finally:
            with self._lock:
                self._busy -= 1
                if usable and not self._closed:
                    self._idle.append(connection)
                else:
                    connection.close()
                over = self._closed and self._busy == 0
            if over:
                self._context.term()


INLINE_BYTES = 4096  # messages up to this size need one collective, larger ones a second


def first_problem(mine: str, exchange: "Exchange") -> str:
    """The problem of the first rank that has one; empty if none has. The same on every rank. Collective."""
    return next((raw.decode() for raw in exchange.all_gather_bytes(mine.encode()) if raw), "")


class Exchange:
    """Collectives over a gloo group of its own of all trainer ranks, created collectively.

    Always the same thread of each rank calls them, in the same order. ``timeout_s`` bounds the wait for the other
    ranks; None stands for the exchange's own bound. It is unusable after a PublishError: a rank did not take part.
    """

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._timeout_s = timeout_s
        self.rank = dist.get_rank()
        self._world = dist.get_world_size()

    def all_gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Return the data of every rank, in rank order. Raises PublishError."""
        heads = self._gather(_framed(data, INLINE_BYTES), timeout_s)
        sizes = [_size(head) for head in heads]
        widest = max(sizes)
        if widest > INLINE_BYTES:
            heads = self._gather(_framed(data, widest), timeout_s)
        return [_unframed(head) for head in heads]

    def broadcast_bytes(self, data: bytes | None, timeout_s: float | None = None) -> bytes:
        """Return the data of rank 0; the other ranks pass None. Raises PublishError."""
        head = self._broadcast(_framed(data or b"", INLINE_BYTES), timeout_s)
        if _size(head) > INLINE_BYTES:
            head = self._broadcast(_framed(data or b"", _size(head)), timeout_s)
        return _unframed(head)

    def scatter(self, part: Callable[[int], np.ndarray], of_ranks: Sequence[int], room: np.ndarray) -> None:
        """Fill ``room`` on each other rank with part number ``of_ranks[rank]``, which ``part`` makes on rank 0.

        Both are contiguous. The ranks of one part pass it on (`_links`). Raises PublishError.
        """
        made = None
        for source, target in _links(of_ranks):
            if target == self.rank:
                self.receive(room, source)
            elif source == self.rank:
                if source == 0 and made != of_ranks[target]:
                    room, made = part(of_ranks[target]), of_ranks[target]
                self.send(room, target)

    def send(self, data: np.ndarray, to: int) -> None:
        """Send ``data`` (contiguous) to rank ``to``, which calls `receive`, alone. Raises PublishError."""
        with self._named():
            self._group.send([torch.from_numpy(data)], to, 0).wait()

    def receive(self, room: np.ndarray, source: int) -> None:
        """Fill ``room`` (contiguous) with the data of rank ``source``. Raises PublishError."""
        with self._named():
            self._group.recv([torch.from_numpy(room)], source, 0).wait()

    def _gather(self, mine: torch.Tensor, timeout_s: float | None) -> list[torch.Tensor]:
        rows = [torch.empty_like(mine) for _ in range(self._world)]
        options = AllgatherOptions()
        options.timeout = self._bound(timeout_s)
        with self._named():
            self._group.allgather([rows], [mine], options).wait()
        return rows

    def _broadcast(self, flat: torch.Tensor, timeout_s: float | None) -> torch.Tensor:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._bound(timeout_s)
        with self._named():
            self._group.broadcast([flat], options).wait()
        return flat

    def _bound(self, timeout_s: float | None) -> timedelta:
        return timedelta(seconds=max(self._timeout_s if timeout_s is None else timeout_s, 0.001))

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Turn what torch raises into a PublishError that names the rank."""
        try:
            yield
        except RuntimeError as e:
            reason = str(e).splitlines()[0]
            raise PublishError(
                f"trainer rank {self.rank}: a trainer rank has ended or is late ({reason}); see its log"
            ) from e


def _links(of_ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(Source, target) in order: rank 0 sends to the first rank of each part, from there the part spreads as a tree.

    The part of rank 0 is last, so that the others spread meanwhile.
    """
    links = []
    for part in sorted(set(of_ranks), key=lambda part: part == of_ranks[0]):
        ranks = [rank for rank, own in enumerate(of_ranks) if own == part]
        links += [(0, ranks[0])] if ranks[0] else []
        links += [(ranks[k - (1 << k.bit_length() - 1)], ranks[k]) for k in range(1, len(ranks))]
    return links


def _framed(data: bytes, room: int) -> torch.Tensor:
    """Frame ``data`` as uint8 [8 + room]: its length, then as much of it as fits."""
    frame, n = np.zeros(8 + room, np.uint8), min(len(data), room)
    frame[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
    frame[8 : 8 + n] = np.frombuffer(data, np.uint8, n)
    return torch.from_numpy(frame)


def _size(frame: torch.Tensor) -> int:
    return int.from_bytes(frame[:8].numpy().tobytes(), "little")


def _unframed(frame: torch.Tensor) -> bytes:
    data: bytes = frame[8 : 8 + _size(frame)].numpy().tobytes()
    return data

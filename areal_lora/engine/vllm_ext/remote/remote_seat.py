"""The place of a remote server in the run: planes, groups, and the requests and shards that the server fetches.

HTTP with msgpack bodies; every request carries ``Authorization: Bearer <key of the remote plane>``.

======  ==================================  =========================================================================
method  path                                answer
======  ==================================  =========================================================================
GET     ``/remote/settings``                200 ``RemoteSettings``
POST    ``/remote/servers/WORKERS``         200 ``RemoteName``: the server is a member of the run from here on
GET     ``/remote/NAME/work/SEEN``          200 ``RemoteWork``: requests after number SEEN, within ``HOLD_S``
POST    ``/remote/NAME/answer``             200; the body is an ``RemoteAnswer``
GET     ``/remote/NAME/shard/N/SOURCE``     200: frames (`shards`) of the packed shard of source rank SOURCE that
                                            request N announces, as it arrives, from byte ``at`` on; 226: of its
                                            difference to that with seal ``base``. With a store: its name there
DELETE  ``/remote/NAME``                    200; the server has left
======  ==================================  =========================================================================

401 is another token, 404 a server that the gateway does not know (any more), 410 a shard that does not arrive.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from areal_lora.engine.vllm_ext.remote.shards import PART_BYTES, ArrivingShard, ShardBases, ShardStore, frame
from areal_lora.engine.vllm_ext.server.guards import BearerAuth, refusals
from areal_lora.errors import ManifestError, PublishError, RefusalReason
from areal_lora.network.http_server import LEAVING_HEADER, BodyLimit, unless_disconnected
from areal_lora.network.tls import Plane
from areal_lora.types import AdapterRef
from areal_lora.weight_sync import messages as wire
from areal_lora.weight_sync.kernels import ITEM_BYTES
from areal_lora.weight_sync.layout import AdapterLayout, Payload
from areal_lora.weight_sync.link.broadcast_groups import BroadcastGroup, join_group
from areal_lora.weight_sync.link.inbox import Part, RingInbox, WindowInbox
from areal_lora.weight_sync.manifest import decode, trailer_part

HOLD_S = 10.0
LOST_S = 10.0
"""A server that does not fetch work for so long is lost."""


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``config`` is the run's, as JSON, ``shard_keys`` those of ``manifest.shard_key_bytes``, ``store`` its URL."""

    config: bytes
    base_digest: str
    shard_keys: bytes
    store: str | None = None


class RemoteName(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class ForwardedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a ``plane`` of the server. With ``cancels`` only: that one's answer is not wanted any more."""

    number: int
    plane: Plane = Plane.DATA
    method: str = ""
    path: str = ""
    body: bytes = b""
    cancels: int = 0


class RemoteWork(msgspec.Struct, frozen=True, kw_only=True):
    """``over``: the run has ended."""

    requests: list[ForwardedRequest]
    over: bool = False


class RemoteAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """``leaving``: the server has not answered, another one may."""

    number: int
    status: int
    body: bytes
    media_type: str = "text/plain"
    leaving: bool = False


A = TypeVar("A")


class StayGroups(dict[int, BroadcastGroup]):
    """The groups of a stay by source rank; ``name`` is that of the threads in which they block, all at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(64, thread_name_prefix=name)

    def in_thread(self, call: Any, *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)

    async def settled(self, answer: Awaitable[A], others: Iterable[Awaitable[object]]) -> A:
        """Wait until all have ended, and return the answer. Where one has raised, leave the groups and raise that."""
        found: list[Any] = await asyncio.gather(answer, *others, return_exceptions=True)
        for problem in (*found[1:], found[0]):
            if isinstance(problem, BaseException):
                self.leave()
                raise problem
        result: A = found[0]
        return result

    def leave(self) -> None:
        for group in self.values():
            group.close()
        self.clear()


class ShardSpool:
    """The bytes of one packed shard, from the group to a remote server. ``ready`` of ``memory`` have arrived.

    Spools of other servers share ``shard``. Its numbers have ``item_bytes``. ``name`` is that of the shard in the
    store, once it is there.
    """

    def __init__(self, shard: ArrivingShard, ref: AdapterRef, source: int, item_bytes: int) -> None:
        self._shard, self.ref, self.source = shard, ref, source
        self._item_bytes = item_bytes
        self.ready, self.name, self._failure = 0, "", ""
        self._loop, self._more = asyncio.get_running_loop(), asyncio.Event()

    @property
    def memory(self) -> np.ndarray:
        return self._shard.memory

    def fill(self, inbox: RingInbox | WindowInbox, parts: Sequence[Part]) -> None:
        """Receive all parts. Blocks. Raises PublishError, also in ``frames``."""
        try:
            for start, end in parts:
                part = np.asarray(inbox.take())
                if not self._shard.place(start, part):  # a trainer that was restarted sends the version again
                    before, self._shard = self.memory[:start], ArrivingShard(len(self.memory))
                    self._shard.place(0, before)
                    self._shard.place(start, part)
                if end == len(self.memory):
                    inbox.finish()
                self._loop.call_soon_threadsafe(self._note, end)
        except PublishError as error:
            self._loop.call_soon_threadsafe(self._note, self.ready, str(error))
            raise

    async def put(self, store: ShardStore, run: str, deadline: float) -> None:
        """Store the shard, which is complete. Raises PublishError, also in ``stored``."""
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                self.name = await store.put(run, self.ref, self.source, self.memory)
        except (PublishError, TimeoutError) as error:
            self._note(self.ready, str(error) or f"{self.ref} was not stored in time")
            raise PublishError(self._failure) from None
        self._more.set()

    def _note(self, ready: int, failure: str = "") -> None:
        self.ready, self._failure = ready, failure
        self._more.set()

    async def frames(self, at: int, base: np.ndarray | None) -> AsyncIterator[bytes]:
        """Yield what differs from ``base`` from byte ``at`` on, as it arrives. Raises PublishError if it does not."""
        while at < len(self.memory):
            await self._until(lambda at=at: self.ready > at)  # type: ignore[misc]
            part = slice(at, min(self.ready, at + PART_BYTES))
            before = None if base is None else base[part]
            yield await asyncio.to_thread(frame, self.memory[part], before, self._item_bytes)
            at = part.stop

    async def stored(self) -> str:
        """The shard's name in the store, once it is there. Raises PublishError if it does not arrive."""
        await self._until(lambda: bool(self.name))
        return self.name

    async def _until(self, arrived: Callable[[], bool]) -> None:
        while not arrived():
            if self._failure:
                raise PublishError(self._failure)
            self._more.clear()
            await self._more.wait()


class RemoteSeat:
    """Server ``index`` of the run, in another place. ``spools`` are by transfer in progress and source rank."""

    def __init__(
        self, index: int, *, bind: str, secret: str, layouts: int, bases: ShardBases, store: ShardStore | None = None
    ) -> None:
        self.index, self.name = index, f"server-{index}"
        self._bind, self._secret, self._layouts, self._bases, self._store = bind, secret, layouts, bases, store
        self._numbers = itertools.count(1)
        self._unfetched: dict[int, ForwardedRequest] = {}
        self._unanswered: dict[int, asyncio.Future[RemoteAnswer]] = {}
        self._more = asyncio.Event()
        self._polls, self._fetched_at = 0, time.monotonic()
        self._known: dict[str, AdapterLayout] = {}
        self._groups = StayGroups(self.name)
        self.spools: dict[tuple[int, int], ShardSpool] = {}
        self.left, self.over = asyncio.Event(), False

    def apps(self) -> tuple[ASGIApp, ASGIApp]:
        """The data plane, which the caller guards, and the admin plane."""
        routes = [
            Route(wire.JOIN_PATH, self._join, methods=["POST"]),
            Route(wire.PUBLISH_PATH, self._publish, methods=["POST"]),
            Route("/{path:path}", partial(self._pass_on, Plane.ADMIN), methods=["GET", "POST"]),
        ]
        admin = Starlette(routes=routes, exception_handlers=refusals({ManifestError: 409, PublishError: 503}))
        data = Starlette(routes=[Route("/{path:path}", partial(self._pass_on, Plane.DATA), methods=["GET", "POST"])])
        return data, BearerAuth(BodyLimit(admin, wire.MAX_BODY_BYTES), self._secret, Plane.ADMIN)

    # --- towards the remote server

    async def work(self, seen: int) -> RemoteWork:
        """Requests after number ``seen``. What was fetched and did not arrive is fetched again."""
        self._polls += 1
        try:
            for number in [n for n in self._unfetched if n <= seen]:
                del self._unfetched[number]
            if not self._unfetched and not self.over:
                self._more.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._more.wait(), HOLD_S)
            return RemoteWork(requests=list(self._unfetched.values()), over=self.over)
        finally:
            self._polls -= 1
            self._fetched_at = time.monotonic()

    def answered(self, answer: RemoteAnswer) -> None:
        """Give the answer to the request, unless it has one or waits no more."""
        future = self._unanswered.get(answer.number)
        if future is not None and not future.done():
            future.set_result(answer)

    def lost(self, now: float) -> bool:
        return not self._polls and now - self._fetched_at > LOST_S

    def leave(self) -> None:
        """Hand back what is unanswered. From here on nothing is forwarded: the trainer gets no answer to a ping."""
        self.left.set()
        self._more.set()
        for number, future in self._unanswered.items():
            if not future.done():
                future.set_result(RemoteAnswer(number=number, status=503, body=b"this server has left", leaving=True))
        self._groups.leave()

    def end(self) -> None:
        """Let the remote server know that the run is over."""
        self.over = True
        self._more.set()

    async def forward(
        self, plane: Plane, method: str, path: str, body: bytes, numbered: Callable[[int], None] = lambda _: None
    ) -> RemoteAnswer:
        """Have the remote server answer a request. A caller that is cancelled cancels it there.

        Its number is given as it is sent: the remote server counts on the order.
        """
        if self.left.is_set():
            return RemoteAnswer(number=0, status=503, body=b"this server has left", leaving=True)
        numbered(number := next(self._numbers))
        future: asyncio.Future[RemoteAnswer] = asyncio.get_running_loop().create_future()
        self._unanswered[number] = future
        self._send(ForwardedRequest(number=number, plane=plane, method=method, path=path, body=body))
        try:
            return await future
        finally:
            del self._unanswered[number]
            if future.cancelled():
                self._send(ForwardedRequest(number=next(self._numbers), cancels=number))

    def _send(self, request: ForwardedRequest) -> None:
        self._unfetched[request.number] = request
        self._more.set()

    # --- towards the run

    async def _pass_on(self, plane: Plane, request: Request) -> Response:
        body = await request.body()
        return await unless_disconnected(request, self._response(plane, request.method, request.url.path, body))

    async def _response(self, plane: Plane, method: str, path: str, body: bytes) -> Response:
        answer = await self.forward(plane, method, path, body)
        headers = {LEAVING_HEADER: "1"} if answer.leaving else None
        return Response(answer.body, status_code=answer.status, media_type=answer.media_type, headers=headers)

    async def _join(self, request: Request) -> Response:
        """Join the trainer's groups here, while the remote server forms groups of its own for the same sources."""
        want = msgspec.msgpack.decode(await request.body(), type=wire.JoinRequest)
        assert want.endpoints is not None, "only a relay keeps its groups"
        self._groups.leave()
        hidden = [msgspec.structs.replace(e, host="", port=0, token="") for e in want.endpoints]
        body = msgspec.msgpack.encode(msgspec.structs.replace(want, endpoints=hidden))

        async def join(endpoint: wire.SourceEndpoint) -> None:
            place = want.ranks[0], self._bind, want.timeout_s, self._secret
            self._groups[endpoint.source] = await self._groups.in_thread(join_group, endpoint, *place)

        answer = self._response(Plane.ADMIN, "POST", wire.JOIN_PATH, body)
        response = await self._groups.settled(answer, map(join, want.endpoints))
        if response.status_code != 200:
            self._groups.leave()
        return response

    async def _publish(self, request: Request) -> Response:
        """Receive a version while the remote server fetches it; its answer is that of this server."""
        body, came = await request.body(), time.monotonic()
        announced = decode(body)
        digest = announced.manifest.layout
        layout = announced.layout or self._known.get(digest)
        if layout is None or {s.source for s in layout.shards} - self._groups.keys():
            self._groups.leave()  # how the bytes are cut is not known, or nothing of them arrives
            if layout is not None:
                raise PublishError(f"{announced.manifest.ref}: {self.name} is in no group; the trainer must join it")
            text = f"{announced.manifest.ref} uses a layout that {self.name} does not hold"
            raise ManifestError(RefusalReason.UNKNOWN_LAYOUT, text)
        self._known.pop(digest, None)
        while len(self._known) >= self._layouts:
            del self._known[next(iter(self._known))]
        self._known[digest] = layout
        deadline, fills, spools = came + announced.timeout_s, [], dict[int, ShardSpool]()
        for shard, table in zip(layout.shards, layout.tables, strict=True):
            group = self._groups[shard.source]
            parts = [*((b.start, b.end) for b in table.buckets(group.bucket_bytes)), trailer_part(shard)]
            ref = announced.manifest.ref
            memory = self._bases.arriving(ref, shard.source, parts[-1][1])
            spool = spools[shard.source] = ShardSpool(memory, ref, shard.source, ITEM_BYTES[layout.dtype])
            filled = self._groups.in_thread(spool.fill, group.receive(parts, deadline), parts)
            bases = self._bases if layout.payload is Payload.UNMERGED else None  # merged weights take all memory once
            fills.append(_received(filled, spool, self._store, bases, announced.manifest.run, deadline))

        def numbered(number: int) -> None:
            self.spools |= {(number, source): spool for source, spool in spools.items()}

        forwarded = self.forward(Plane.ADMIN, "POST", wire.PUBLISH_PATH, body, numbered)
        try:
            answer = await self._groups.settled(forwarded, fills)
        finally:
            self.spools = {key: spool for key, spool in self.spools.items() if spools.get(spool.source) is not spool}
        return Response(answer.body, status_code=answer.status, media_type=answer.media_type)


async def _received(
    filled: Awaitable[None],
    spool: ShardSpool,
    store: ShardStore | None,
    bases: ShardBases | None,
    run: str,
    deadline: float,
) -> None:
    await filled
    if store is not None:
        await spool.put(store, run, deadline)
    elif bases is not None:
        bases.keep(spool.ref.name, spool.source, spool.memory)

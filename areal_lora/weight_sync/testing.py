"""A rollout server without a model, for tests of whatever publishes: real groups, real receivers.

``MemoryServer`` answers the admin plane, on loopback where it is given no listening socket, and stages versions
into dictionaries. The backend ``SOCKETS`` sends bytes as between machines, where gloo would have receivers read
the source's memory.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import numpy as np
import torch

from areal_lora.errors import AdapterError, ManifestError, PublishError
from areal_lora.network.keys import Plane, authorized
from areal_lora.network.tls import server_context
from areal_lora.processes.faults import reached
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync import messages as tp
from areal_lora.weight_sync.blocks import Block, Marks, TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.link.backends import Backend, Seat, gloo, register_backend
from areal_lora.weight_sync.manifest import Announcement, decode
from areal_lora.weight_sync.refusal import Refusal
from areal_lora.weight_sync.server.receiver import AdapterReceiver
from areal_lora.weight_sync.server.slots import SlotTable
from areal_lora.weight_sync.trainer.packed_shard import Pack

Shapes = Mapping[str, tuple[int, ...]]
Score = Callable[[str | None, list[list[int]]], list[list[float]]]

SOCKETS = "gloo-sockets"


def over_sockets(seat: Seat) -> Backend:
    """gloo as it is between machines."""
    return replace(gloo(seat), same_host=False)


register_backend(SOCKETS, over_sockets)


def moe_shapes(
    rank: int, *, layers: int = 2, experts: int = 4, hidden: int = 16, ffn: int = 8
) -> dict[str, tuple[int, ...]]:
    """Wire names and shapes of a small MoE adapter on attention and every expert."""
    sizes = {f"self_attn.{p}_proj": (hidden, hidden) for p in "qkvo"}
    for e in range(experts):
        sizes |= {f"mlp.experts.{e}.{p}_proj": (ffn, hidden) for p in ("gate", "up")}
        sizes[f"mlp.experts.{e}.down_proj"] = (hidden, ffn)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        for module, (out, inner) in sizes.items():
            shapes[f"model.layers.{layer}.{module}.lora_A.weight"] = (rank, inner)
            shapes[f"model.layers.{layer}.{module}.lora_B.weight"] = (out, rank)
    return shapes


def pack_of(layout: AdapterLayout, source: int, tensors: Mapping[str, torch.Tensor]) -> Pack:
    """What packs given tensors as ``source``'s shard, one at a time: the publisher's ``Pack`` without an engine."""
    mine = [t for shard in layout.shards if shard.source == source for t in shard.tensors]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[layout.dtype]

    def pack(flat: np.ndarray) -> Iterator[int]:
        for i, place in enumerate(mine):
            raw = tensors[place.name].detach().to(dtype).contiguous().view(torch.uint8).reshape(-1).numpy()
            flat[place.offset : place.offset + raw.size] = raw
            yield i + 1

    return pack


class ThreadExchange:
    """An ``Exchange`` between ranks that are threads of one process."""

    def __init__(self, rank: int, meeting: threading.Barrier, said: list[bytes]) -> None:
        self.rank, self._meeting, self._said = rank, meeting, said

    @classmethod
    def world(cls, size: int) -> list[ThreadExchange]:
        meeting, said = threading.Barrier(size), [b""] * size
        return [cls(rank, meeting, said) for rank in range(size)]

    def all_gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        self._said[self.rank] = data
        try:
            self._meeting.wait(timeout_s)
            said = list(self._said)
            self._meeting.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise PublishError(f"trainer rank {self.rank}: a trainer rank is gone or late; see its log") from None
        return said

    def broadcast_bytes(self, data: bytes | None, timeout_s: float | None = None) -> bytes:
        return self.all_gather_bytes(data or b"", timeout_s)[0]


class MemoryWriter:
    """A ``SlotWriter`` that keeps float32 arrays by slot and name.

    ``touched`` are the slots that were written or cleared. ``on_write()``, if set, runs before
    every bucket: a test can wait there in the middle of a transfer, or raise.
    """

    def __init__(self, shapes: Callable[[AdapterSpec], Shapes]) -> None:
        self._shapes = shapes
        self.slots: dict[int, dict[str, np.ndarray]] = {}
        self._images: dict[int, np.ndarray] = {}
        self.touched: set[int] = set()
        self.on_write: Callable[[], None] | None = None

    def expected(self, spec: AdapterSpec) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes(spec))

    def plan(self, layout: AdapterLayout) -> list[TensorBlocks]:
        """Destinations count from the start of a slot's image, where full names lie in sorted order."""
        places, _ = _image(self._shapes(layout.spec))
        copies: dict[str, list[str]] = {}
        for name, wire in layout.aliases.items():
            copies.setdefault(wire, []).append(name)
        return [
            TensorBlocks.of(
                [
                    [
                        Block(
                            src=t.offset,
                            src_pitch=0,
                            dst=places[name],
                            dst_pitch=0,
                            rows=1,
                            cols=math.prod(t.shape),
                            scale=layout.spec.scale if ".lora_B." in name else 1.0,
                        )
                        for name in (t.name, *copies.get(t.name, ()))
                    ]
                    for t in shard.tensors
                ],
                layout.dtype,
                "float32",
            )
            for shard in layout.shards
        ]

    def prepare(self, slot: int, layout: AdapterLayout) -> None:
        self.touched.add(slot)
        shapes = self._shapes(layout.spec)
        places, nbytes = _image(shapes)
        image = self._images[slot] = np.zeros(nbytes // 4, dtype=np.float32)
        self.slots[slot] = {
            name: image[at // 4 : at // 4 + math.prod(shapes[name])].reshape(shapes[name])
            for name, at in places.items()
        }

    def write(self, plan: TensorBlocks, slot: int, base: int, first: int, last: int, marks: Marks) -> None:
        if self.on_write is not None:
            self.on_write()
        plan.copy(base, self._images[slot].ctypes.data, tensors=(first, last), marks=marks)

    def flush(self, slot: int) -> None:
        """Nothing: host memory is written at once."""

    def zero(self, slot: int) -> None:
        self.touched.add(slot)
        self.slots[slot] = {}


def _image(shapes: Shapes) -> tuple[dict[str, int], int]:
    """(byte offset of every name, bytes in all) of a slot that holds float32 tensors in sorted order."""
    places, at = {}, 0
    for name in sorted(shapes):
        places[name] = at
        at += 4 * math.prod(shapes[name])
    return places, at


class MemoryServer:
    """One server with ``workers`` receivers, all in this process. Use as a context manager."""

    def __init__(
        self,
        *,
        run: str,
        secret: str,
        base_digest: str,
        shapes: Callable[[AdapterSpec], Shapes],
        workers: int = 1,
        n_slots: int = 4,
        score: Score | None = None,
        declared: Mapping[str, AdapterSpec] | None = None,
        name: str = "server-0",
        keep: int | None = None,
        modules: Mapping[str, tuple[int, int]] | None = None,
        on_shutdown: Callable[[], object] | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self.slots = SlotTable(n_slots)
        self.writers = [MemoryWriter(shapes) for _ in range(workers)]
        self._staged: list[tp.StageResult | None] = [None] * workers
        self._arrived = threading.Condition()
        self._receivers = [
            AdapterReceiver(
                writer,
                run=run,
                secret=secret,
                base_digest=base_digest,
                declared=declared,
                on_staged=partial(self._arrive, w),
            )
            for w, writer in enumerate(self.writers)
        ]
        self._run, self._secret, self._base_digest = run, secret, base_digest
        self._n_slots, self._score, self._last_id = n_slots, score, 0
        self._keep = n_slots - 1 if keep is None else keep
        self._modules = _modules(shapes) if modules is None else dict(modules)
        self._on_shutdown = on_shutdown
        self._slots_lock, self._one_publish = threading.Lock(), threading.Lock()
        self._released = threading.Condition(self._slots_lock)
        self._pins: dict[str, AdapterRef] = {}
        self._replies: dict[AdapterRef, tp.PublishReply] = {}
        self._http = _HttpsServer(listener or socket.create_server(("127.0.0.1", 0)), secret, _handler(self))
        self.endpoint = tp.ServerEndpoint(
            name=name, host="127.0.0.1", admin_port=self._http.server_port, data_port=0, workers=workers
        )

    def __enter__(self) -> MemoryServer:
        watched_thread("memory-server", partial(self._http.serve_forever, 0.05))
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        for receiver in self._receivers:
            receiver.close()

    def tensors(self, ref: AdapterRef, worker: int = 0) -> dict[str, np.ndarray]:
        """What ``worker`` holds for an active version: float32 by full name, scale folded into lora_B."""
        return self.writers[worker].slots[self.slots.resolve(str(ref)).slot]

    @contextlib.contextmanager
    def lease(self, model: str, *, pinned: bool = False) -> Iterator[AdapterRef]:
        """Hold the version that ``model`` names; any thread. Raises UnknownVersionError.

        ``pinned`` keeps it until another version of the adapter is asked for so: the next request may come.
        """
        with self._released:
            ref = self.slots.resolve(model).ref
            self.slots.acquire(ref)
            if pinned and self._pins.get(ref.name) != ref:
                self.slots.acquire(ref)
                self._unpin(ref.name)
                self._pins[ref.name] = ref
        try:
            yield ref
        finally:
            with self._released:
                self.slots.release(ref)
                self._released.notify_all()

    def _unpin(self, name: str) -> None:
        if (ref := self._pins.pop(name, None)) is not None:
            self.slots.release(ref)
            self._released.notify_all()

    def handle(self, method: str, path: str, header: str | None, body: bytes) -> tuple[int, bytes]:
        """(status, body) of one admin request."""
        if not authorized(header, self._secret, Plane.ADMIN):
            return 401, b"missing or wrong key of the admin plane"
        try:
            if (method, path) == ("GET", tp.INFO_PATH):
                return 200, tp.encode_message(self._info())
            if (method, path) == ("GET", tp.MODULES_PATH):
                return 200, tp.encode_message(tp.ModulesReply(modules=self._modules, slots=self._n_slots, max_rank=64))
            if (method, path) == ("GET", tp.PING_PATH):
                return 200, tp.encode_message(tp.PingReply())
            if (method, path) == ("POST", tp.JOIN_PATH):
                request = tp.decode_message(body, tp.JoinRequest)
                with self._turn(request.timeout_s) as left_s:
                    return 200, tp.encode_message(self._join(msgspec.structs.replace(request, timeout_s=left_s)))
            if (method, path) == ("POST", tp.PUBLISH_PATH):
                announcement = decode(body)
                with self._turn(announcement.timeout_s) as left_s:
                    return 200, tp.encode_message(self._publish(announcement, left_s))
            if (method, path) == ("POST", tp.SHUTDOWN_PATH) and self._on_shutdown is not None:
                self._on_shutdown()
                return 200, tp.encode_message(tp.PingReply())
            if (method, path) == ("POST", tp.SCORE_PATH):
                return 200, tp.encode_message(self._scored(tp.decode_message(body, tp.ScoreRequest)))
        except ManifestError as e:
            return 409, tp.encode_message(tp.RefusalReply(reason=e.reason, detail=e.detail))
        except (AdapterError, PublishError, msgspec.MsgspecError) as e:
            return 500, str(e).encode()
        return 404, b"no such route"

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[float]:
        """Seconds that are left after waiting for the request before. Raises PublishError: what is late is not done."""
        deadline = time.monotonic() + timeout_s
        if not self._one_publish.acquire(timeout=timeout_s):
            raise PublishError("came while this server was busy, and is late by now; ask again")
        try:
            yield max(deadline - time.monotonic(), 0.0)
        finally:
            self._one_publish.release()

    def _info(self) -> tp.InfoReply:
        refs = [str(r) for r in self.slots.active()]
        return tp.InfoReply(
            run=self._run,
            model="memory",
            base_digest=self._base_digest,
            workers=len(self.writers),
            max_lora_rank=64,
            refs=refs,
        )

    def _join(self, request: tp.JoinRequest) -> tp.JoinReply:
        with ThreadPoolExecutor(len(self._receivers), thread_name_prefix="join") as pool:
            joins = [
                pool.submit(receiver.join, request.endpoints, rank, request.timeout_s)
                for receiver, rank in zip(self._receivers, request.ranks, strict=True)
            ]
        for join in joins:
            join.result()
        return tp.JoinReply(workers=len(self._receivers))

    def _publish(self, announcement: Announcement, timeout_s: float) -> tp.PublishReply:
        manifest, deadline = announcement.manifest, time.monotonic() + timeout_s
        slot = self._reserve(manifest.ref, timeout_s / 2)
        try:
            results = self._stage(announcement, slot, timeout_s)
        except PublishError:
            if slot is not None:
                self.slots.abort(manifest.ref)
            raise
        failed = next((r for r in results if not r.ok), None)
        if failed is not None and failed.reason == Refusal.DUPLICATE and manifest.ref in self._replies:
            return self._replies[manifest.ref]
        late = time.monotonic() >= deadline
        if failed is not None or late:
            for receiver in self._receivers:
                receiver.discard(manifest.ref)
            if slot is not None:
                self.slots.abort(manifest.ref)
        if failed is not None:
            if failed.reason == Refusal.SLOT:
                raise self.slots.full(manifest.ref)
            raise ManifestError(failed.reason, failed.detail)
        if late:
            raise PublishError(f"{manifest.ref} was staged too late: its trainer has given it up")
        self._last_id += 1
        with self._slots_lock:
            self.slots.activate(manifest.ref, self._last_id)
        phases = {p: max(getattr(r, f"{p}_s") for r in results) * 1e3 for p in ("wire", "verify", "write")}
        reply = tp.PublishReply(ref=str(manifest.ref), digest=results[0].digest, phases=phases | {"commit": 0.0})
        self._replies[manifest.ref] = reply
        reached("server.activated")
        return reply

    def _reserve(self, ref: AdapterRef, patience_s: float) -> int | None:
        """A slot, as the real server finds one; None: the receivers take the transfer off the wire and refuse it."""
        until = time.monotonic() + patience_s
        with self._released:
            while True:
                for old in self.slots.retirable(self._keep):
                    self.slots.retire(old)
                try:
                    return self.slots.reserve(ref)
                except ManifestError as e:
                    if e.reason != Refusal.SLOT:
                        return None
                spare = self.slots.retirable(1)[:1]
                for old in spare:
                    self.slots.retire(old)
                if not spare and not self._released.wait(max(until - time.monotonic(), 0.0)):
                    return None

    def _stage(self, announcement: Announcement, slot: int | None, timeout_s: float) -> list[tp.StageResult]:
        """Every worker's result."""
        self._staged = [None] * len(self._receivers)
        for receiver in self._receivers:
            receiver.begin(announcement.manifest, announcement.layout, slot, timeout_s)
        with self._arrived:
            if not self._arrived.wait_for(lambda: all(self._staged), timeout_s + 1.0):
                raise PublishError(f"{announcement.manifest.ref}: staging did not end")
        return [r for r in self._staged if r is not None]

    def _scored(self, request: tp.ScoreRequest) -> tp.ScoreReply:
        if request.model is not None:
            self.slots.resolve(request.model)
        if self._score is None:
            raise PublishError("this server was made without a score function")
        return tp.ScoreReply(logprobs=self._score(request.model, request.token_ids))

    def _arrive(self, worker: int, result: tp.StageResult) -> None:
        with self._arrived:
            self._staged[worker] = result
            self._arrived.notify_all()


def _modules(shapes: Callable[[AdapterSpec], Shapes]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every module that ``shapes`` names."""
    spec = AdapterSpec(name="any", base_model="any", rank=1, alpha=1.0, target_modules=())
    full = shapes(spec)
    modules = {name.removesuffix(".lora_A.weight") for name in full if name.endswith(".lora_A.weight")}
    return {m: (full[f"{m}.lora_A.weight"][1], full[f"{m}.lora_B.weight"][0]) for m in sorted(modules)}


class _HttpsServer(ThreadingHTTPServer):
    """Speaks TLS over a socket that listens already. Handshakes are made by the threads of the connections."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, secret: str, handler: type[BaseHTTPRequestHandler]) -> None:
        host, port = listener.getsockname()[:2]
        super().__init__((host, port), handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.server_port = listener, port
        self._tls = server_context(secret, Plane.ADMIN, host)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, peer = super().get_request()
        return self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), peer

    def handle_error(self, request: object, client_address: object) -> None:
        """Silent: a client without TLS, or one that is gone."""


def _handler(server: MemoryServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open, as the real server's do

        def do_GET(self) -> None:
            self._answer("GET")

        def do_POST(self) -> None:
            self._answer("POST")

        def _answer(self, method: str) -> None:
            length = int(self.headers.get("Content-Length", 0))
            if length > tp.MAX_BODY_BYTES:
                self.close_connection = True
                status, answer = 413, b"body too long"
            else:
                body = self.rfile.read(length)
                status, answer = server.handle(method, self.path, self.headers.get("Authorization"), body)
            with contextlib.suppress(OSError):  # the trainer has given up waiting
                self.send_response(status)
                self.send_header("Content-Type", tp.CONTENT_TYPE)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            """Silent: tests read answers, not access logs."""

    return Handler

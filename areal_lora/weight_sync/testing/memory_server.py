"""A rollout server without a model, for tests of whatever publishes: real groups, real receivers.

``MemoryServer`` answers the admin plane, on loopback where it is given no listening socket, and stages versions
into dictionaries.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import numpy as np

from areal_lora.errors import AdapterError, ManifestError, PublishError
from areal_lora.network.keys import Plane, authorized
from areal_lora.processes.faults import reached
from areal_lora.processes.watched import watched_thread
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync import messages as tp
from areal_lora.weight_sync.manifest import Announcement, decode
from areal_lora.weight_sync.refusal import Refusal
from areal_lora.weight_sync.server.receiver import AdapterReceiver
from areal_lora.weight_sync.server.slots import SlotTable
from areal_lora.weight_sync.testing.https_server import AdminHttpsServer
from areal_lora.weight_sync.testing.memory_writer import MemoryWriter, Shapes

Score = Callable[[str | None, list[list[int]]], list[list[float]]]


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
        self._http = AdminHttpsServer(listener or socket.create_server(("127.0.0.1", 0)), secret, self.handle)
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

"""Serve versions without a model, for tests of publishers: real groups, real receivers.

``MemoryServer`` answers the admin plane, on loopback unless it gets a listening socket, and stages versions
into dictionaries.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import numpy as np

from areal_lora.errors import AdapterError, ManifestError, PublishError, UnknownVersionError
from areal_lora.network.tls import Plane, authorized
from areal_lora.processes.watched import reached, watched_thread
from areal_lora.types import AdapterRef, AdapterSpec, AdapterStructure
from areal_lora.weight_sync import messages as tp
from areal_lora.weight_sync.admin_client import RequestRelay
from areal_lora.weight_sync.manifest import Announcement, ShardKeys, decode
from areal_lora.weight_sync.server.receiver import AdapterReceiver
from areal_lora.weight_sync.server.slot_table import ResidentVersion, ServedVersions
from areal_lora.weight_sync.server.transaction import AwaitRelease, PublishTransaction, Stage, check_turn, late_turn
from tests.support.weight_sync.https_server import AdminHttpsServer
from tests.support.weight_sync.memory_writer import MemoryWriter, Shapes

Score = Callable[[str | None, list[list[int]]], list[list[float]]]


class MemoryServer:
    """One server with ``workers`` receivers, all in this process. Use as a context manager."""

    def __init__(
        self,
        *,
        run: str,
        secret: str,
        base_digest: str,
        shapes: Callable[[AdapterStructure], Shapes],
        workers: int = 1,
        n_slots: int = 4,
        score: Score | None = None,
        declared: Mapping[str, AdapterSpec] | None = None,
        name: str = "server-0",
        keep: int | None = None,
        adapters: int = 1,
        layouts: int = 16,
        modules: Mapping[str, tuple[int, int]] | None = None,
        leaving: Callable[[], bool] = lambda: False,
        on_dismiss: Callable[[], object] = lambda: None,
        listener: socket.socket | None = None,
        host: str = "127.0.0.1",
        keys: ShardKeys | None = None,
    ) -> None:
        self.held = ServedVersions(n_slots, n_slots - 1 if keep is None else keep, adapters)
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
                layouts=layouts,
                on_staged=partial(self._arrive, w),
                keys=keys,
            )
            for w, writer in enumerate(self.writers)
        ]
        self._run, self._secret, self._base_digest = run, secret, base_digest
        self._n_slots, self._score = n_slots, score
        self._modules = _modules(shapes) if modules is None else dict(modules)
        self._leaving, self._on_dismiss, self._relay = leaving, on_dismiss, RequestRelay(secret)
        self._one_publish, self._released = threading.Lock(), threading.Condition()
        listener = listener or socket.create_server((host, 0))
        self._http = AdminHttpsServer(listener, secret, self.handle)
        self.endpoint = tp.ServerEndpoint(
            name=name, host=host, admin_port=self._http.server_port, data_port=0, workers=workers
        )

    def __enter__(self) -> MemoryServer:
        watched_thread("memory-server", partial(self._http.serve_forever, 0.05))
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        for receiver in self._receivers:
            receiver.close()

    @property
    def busy(self) -> bool:
        """Whether a publish or a join is in progress."""
        return self._one_publish.locked()

    def tensors(self, ref: AdapterRef, worker: int = 0) -> dict[str, np.ndarray]:
        """Return the tensors ``worker`` holds of an active version: float32 by full name, scale folded into lora_B."""
        return self.writers[worker].slots[self.held.resolve(str(ref)).slot]

    @contextlib.contextmanager
    def lease(
        self, model: str, *, pinned: bool = False, or_newer: bool = False, incarnation: int | None = None
    ) -> Iterator[ResidentVersion]:
        """Hold the version that ``model`` names; callable from any thread. Raises UnknownVersionError.

        ``pinned`` keeps the version for later requests: until a pinned request names another version of the
        adapter, or a publish finds no other slot.
        """
        with self._released:
            resident = self.held.acquire(model, pinned=pinned, or_newer=or_newer, incarnation=incarnation)
            self._released.notify_all()  # a pin may have ended
        try:
            yield resident
        finally:
            with self._released:
                self.held.release(resident, math.inf if pinned else None)
                self.held.retire_left()
                self._released.notify_all()

    def is_newest(self, resident: ResidentVersion) -> bool:
        """Whether a rollout may stay on it. Raises UnknownVersionError if the trainer has lost it."""
        with self._released:
            if resident in self.held.left:
                raise UnknownVersionError(f"{resident.ref} is lost: the trainer resumed from an older version")
            return self.held.resolve(resident.ref.name) is resident

    def handle(self, method: str, path: str, header: str | None, body: bytes) -> tuple[int, bytes]:
        """Answer one admin request with (status, body)."""
        if not authorized(header, self._secret, Plane.ADMIN):
            return 401, b"missing or wrong key of the admin plane"
        try:
            if (method, path) == ("GET", tp.INFO_PATH):
                return 200, msgspec.msgpack.encode(self._info())
            if (method, path) == ("GET", tp.MODULES_PATH):
                return 200, msgspec.msgpack.encode(
                    tp.ModulesReply(modules=self._modules, slots=self._n_slots, max_rank=64)
                )
            if (method, path) == ("GET", tp.PING_PATH):
                return 200, msgspec.msgpack.encode(tp.PingReply(leaving=self._leaving(), busy=self.busy))
            if (method, path) == ("POST", tp.DISMISS_PATH):
                self._on_dismiss()
                return 200, msgspec.msgpack.encode(tp.PingReply())
            if (method, path) == ("POST", tp.JOIN_PATH):
                request = msgspec.msgpack.decode(body, type=tp.JoinRequest)
                with self._turn("a join", request.timeout_s) as left_s:
                    return 200, msgspec.msgpack.encode(self._join(msgspec.structs.replace(request, timeout_s=left_s)))
            if (method, path) == ("POST", tp.PUBLISH_PATH):
                announcement = decode(body)
                with self._turn(str(announcement.manifest.ref), announcement.timeout_s) as left_s:
                    return 200, msgspec.msgpack.encode(self._publish(announcement, left_s))
            if (method, path) == ("POST", tp.DROP_PATH):
                return 200, msgspec.msgpack.encode(self._drop(msgspec.msgpack.decode(body, type=tp.DropRequest).name))
            if (method, path) == ("POST", tp.SCORE_PATH):
                return 200, msgspec.msgpack.encode(self._scored(msgspec.msgpack.decode(body, type=tp.ScoreRequest)))
            if (method, path) == ("POST", tp.RELAY_PATH):
                relayed = msgspec.msgpack.decode(body, type=tp.RelayRequest)
                return 200, msgspec.msgpack.encode(self._relay.send(relayed, time.monotonic()))
        except ManifestError as e:
            return 409, msgspec.msgpack.encode(tp.RefusalReply(reason=e.reason, detail=e.detail))
        except (AdapterError, PublishError, msgspec.MsgspecError) as e:
            return 500, str(e).encode()
        return 404, b"no such route"

    @contextlib.contextmanager
    def _turn(self, what: str, timeout_s: float) -> Iterator[float]:
        """Wait for the previous request and yield the remaining seconds. Raises PublishError if none remain."""
        deadline = time.monotonic() + timeout_s
        if not self._one_publish.acquire(timeout=timeout_s):
            raise late_turn(what)
        try:
            now = time.monotonic()
            check_turn(what, deadline, now)
            yield deadline - now
        finally:
            self._one_publish.release()

    def _info(self) -> tp.InfoReply:
        refs = [str(r) for r in sorted(self.held.active)]
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
                pool.submit(receiver.join, request.endpoints, rank, request.timeout_s, None if w else request.below)
                for w, (receiver, rank) in enumerate(zip(self._receivers, request.ranks, strict=True))
            ]
        for join in joins:
            join.result()
        return tp.JoinReply(workers=len(self._receivers))

    def _drop(self, name: str) -> tp.DropReply:
        with self._one_publish, self._released:
            running = self.held.drop(name)
            for receiver in self._receivers:
                receiver.forget(name)
            for resident in self.held.retire_left():
                for writer in self.writers:
                    writer.zero(resident.slot)
            self._released.notify_all()
        return tp.DropReply(running=running)

    def _publish(self, announcement: Announcement, timeout_s: float) -> tp.PublishReply:
        now = time.monotonic()
        with self._released:
            publish = PublishTransaction(self.held, announcement.manifest, now + timeout_s, now)
        try:
            results = self._stage(announcement, self._reserve(publish), timeout_s)
            with self._released:
                commit = publish.staged(results, time.monotonic())
                if isinstance(commit, tp.PublishReply):
                    return commit
                reply = publish.activated(commit, 0.0, time.monotonic())
        finally:
            with self._released:
                dropped = publish.end()
            if dropped is not None:
                for receiver in self._receivers:
                    receiver.discard(dropped)
        reached("server.activated")
        return reply

    def _reserve(self, publish: PublishTransaction) -> int | None:
        """Reserve a slot; None: the receivers drain the transfer and refuse it."""
        with self._released:
            while not isinstance(step := publish.next_step(time.monotonic()), Stage):
                if isinstance(step, AwaitRelease):
                    self._released.wait(step.timeout_s)
            return step.slot

    def _stage(self, announcement: Announcement, slot: int | None, timeout_s: float) -> list[tp.StageResult]:
        """Stage on all workers and return their results."""
        self._staged = [None] * len(self._receivers)
        for receiver in self._receivers:
            receiver.start(announcement.manifest, announcement.layout, slot, timeout_s)
        with self._arrived:
            if not self._arrived.wait_for(lambda: all(self._staged), timeout_s + 1.0):
                raise PublishError(f"{announcement.manifest.ref}: staging did not end")
        return [r for r in self._staged if r is not None]

    def _scored(self, request: tp.ScoreRequest) -> tp.ScoreReply:
        if request.model is not None:
            self.held.resolve(request.model)
        if self._score is None:
            raise PublishError("this server was made without a score function")
        return tp.ScoreReply(logprobs=self._score(request.model, request.token_ids))

    def _arrive(self, worker: int, result: tp.StageResult) -> None:
        with self._arrived:
            self._staged[worker] = result
            self._arrived.notify_all()


def _modules(shapes: Callable[[AdapterStructure], Shapes]) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of every module that ``shapes`` names."""
    full = shapes(AdapterStructure(rank=1, alpha=1.0, target_modules=()))
    modules = {name.removesuffix(".lora_A.weight") for name in full if name.endswith(".lora_A.weight")}
    return {m: (full[f"{m}.lora_A.weight"][1], full[f"{m}.lora_B.weight"][0]) for m in sorted(modules)}

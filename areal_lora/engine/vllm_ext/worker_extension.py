"""Mixed into every vLLM worker: receives adapter versions beside generation.

The server calls the ``al_`` methods through ``AsyncLLM.collective_rpc``. Such a call runs
between two engine steps, so each returns at once; what takes time happens in threads, which
report over a zmq socket to the server process::

    server                     worker (between steps)        worker thread
    al_setup, al_describe
    al_join  --------------->  starts a thread ------------> joins the trainers' groups --> Joined
    al_begin --------------->  starts a thread ------------> receive, verify, write ------> Staged
    al_commit -------------->  slot becomes a version
    al_retire -------------->  slot is free again
"""

from __future__ import annotations

import threading
import time

import msgspec
import zmq

from areal_lora.config.rendezvous import read_secret, zmq_curve_keys
from areal_lora.engine.vllm_ext.compat import (
    activate,
    adapter_manager,
    bound_matrices,
    deactivate,
    refuse_files,
    shared_memory_prefix,
)
from areal_lora.engine.vllm_ext.lora_install import StackedSlotWriter
from areal_lora.errors import ManifestError, PublishError
from areal_lora.obs.log import setup_logging
from areal_lora.types import AdapterRef, AdapterSpec, ShardManifest
from areal_lora.weight_sync.manifest import Refusal, decode
from areal_lora.weight_sync.receiver import AdapterReceiver
from areal_lora.weight_sync.transport import JoinRequest, StageResult

REPORT_ROLE = "server-reports"  # CURVE identity of the server's report socket
WORKER_ROLE = "server-worker"


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker must know of the run. The secret itself is read from the run folder."""

    run: str
    run_folder: str
    base_digest: str
    report_port: int
    index: int
    declared: dict[str, AdapterSpec]
    bind: str


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    worker: int
    max_rank: int
    slots: int
    names: list[str]
    shm_prefix: str


class Joined(msgspec.Struct, frozen=True, kw_only=True, tag="joined"):
    """``error`` is empty when the worker is a member of all groups."""

    worker: int
    error: str


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged"):
    worker: int
    result: StageResult


Report = Joined | Staged


class _Reporter:
    """PUSH socket to the server process, shared by this worker's threads."""

    def __init__(self, setup: WorkerSetup) -> None:
        secret = read_secret(setup.run_folder)
        self._lock = threading.Lock()
        public, private = zmq_curve_keys(secret, WORKER_ROLE)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, zmq_curve_keys(secret, REPORT_ROLE)[0])
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        self._socket.connect(f"tcp://127.0.0.1:{setup.report_port}")

    def send(self, report: Report) -> None:
        with self._lock:
            self._socket.send(msgspec.msgpack.encode(report))


class _WorkerAdapters:
    """State of one worker: where to write, who receives, where to report."""

    def __init__(self, worker: object, rank: int, setup: WorkerSetup) -> None:
        manager = adapter_manager(worker)
        self.rank, self.slots = rank, manager.lora_slots
        self.max_rank = manager.lora_config.max_lora_rank
        self.writer = StackedSlotWriter(bound_matrices(worker), self.max_rank)
        self.reporter = _Reporter(setup)
        self.receiver = AdapterReceiver(
            self.writer, run=setup.run, base_digest=setup.base_digest, on_staged=self.staged,
            declared=setup.declared, bind=setup.bind,
        )

    def staged(self, result: StageResult) -> None:
        self.reporter.send(Staged(worker=self.rank, result=result))

    def join(self, request: JoinRequest) -> None:
        error = ""
        try:
            self.receiver.join(request.endpoints, request.ranks[self.rank], request.timeout_s)
        except PublishError as e:
            error = str(e)
        except Exception as e:  # fault boundary: a thread's error must reach the server, not stderr only
            error = repr(e)
        self.reporter.send(Joined(worker=self.rank, error=error))

    def begin(self, manifest_bytes: bytes, ref: str, slot: int, deadline_s: float) -> None:
        """``slot`` is negative when none is free: the transfer is then taken off the wire and refused."""
        try:
            manifest: ShardManifest = decode(manifest_bytes)
            self.receiver.begin(manifest, slot if slot >= 0 else None, deadline_s)
        except ManifestError as e:
            self.staged(StageResult(ref=ref, slot=slot, ok=False, reason=e.reason, detail=e.detail))
        except PublishError as e:
            self.staged(StageResult(ref=ref, slot=slot, ok=False, reason=Refusal.WIRE, detail=str(e)))


class AdapterWorkerExtension:
    """RPC methods; arguments and answers are bytes, strings and numbers. ``rank`` is vLLM's."""

    rank: int

    def al_setup(self, setup_bytes: bytes) -> None:
        setup = msgspec.msgpack.decode(setup_bytes, type=WorkerSetup)
        setup_logging("server", setup.index)
        refuse_files(self)
        self._al_state = _WorkerAdapters(self, self.rank, setup)

    def al_describe(self) -> bytes:
        state = self._al_state
        return msgspec.msgpack.encode(
            WorkerDescription(
                worker=state.rank, max_rank=state.max_rank, slots=state.slots, names=state.writer.names,
                shm_prefix=shared_memory_prefix(),
            )
        )

    def al_join(self, request_bytes: bytes) -> None:
        request = msgspec.msgpack.decode(request_bytes, type=JoinRequest)
        threading.Thread(target=self._al_state.join, args=(request,), name="join", daemon=True).start()

    def al_begin(self, manifest_bytes: bytes, ref: str, slot: int, deadline_s: float) -> None:
        args = (manifest_bytes, ref, slot, deadline_s)
        threading.Thread(target=self._al_state.begin, args=args, name="begin", daemon=True).start()

    def al_commit(self, lora_id: int, slot: int) -> float:
        """Seconds taken: the only part of a publish that generation waits for."""
        started = time.perf_counter()
        activate(self, lora_id, slot, self._al_state.max_rank)
        return time.perf_counter() - started

    def al_discard(self, ref: str) -> None:
        self._al_state.receiver.discard(AdapterRef.parse(ref))

    def al_retire(self, lora_id: int) -> None:
        deactivate(self, lora_id)

    def al_close(self) -> None:
        self._al_state.receiver.close()

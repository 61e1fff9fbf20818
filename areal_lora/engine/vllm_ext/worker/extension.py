"""Receive adapter versions in every vLLM worker, beside generation.

The server calls the ``al_`` methods through ``AsyncLLM.collective_rpc``. Such a call waits for the
end of a model step and delays the next one, so only work that must be in step with generation is an
RPC; all other work is a command to a background thread (``worker_channel``)::

    server                      background thread              between two steps
    al_setup, al_describe       starts
    Join    ----------------->  thread, low priority: join the trainers' groups
    Begin   ----------------->  thread: receive, write, verify
    Hurry   ----------------->  the trainer waits: write at full speed
    Ping    ----------------->  at once
    al_commit  ----------------------------------------------> slot becomes a version
    al_retire  ----------------------------------------------> slot is free again
"""

from __future__ import annotations

import os
import threading
import time

import msgspec

from areal_lora.engine.vllm_ext.compat.engine import own_logprobs, shared_memory_prefix
from areal_lora.engine.vllm_ext.compat.slots import (
    activate,
    adapter_manager,
    bound_matrices,
    deactivate,
    enable_slots,
    refuse_files,
)
from areal_lora.engine.vllm_ext.worker.lora_install import StackedSlotWriter
from areal_lora.engine.vllm_ext.worker_channel import (
    Begin,
    Command,
    CommandDone,
    CommandThread,
    Hurry,
    Join,
    Ping,
    Respond,
    Staged,
)
from areal_lora.errors import ManifestError, PublishError
from areal_lora.processes import stacks
from areal_lora.processes.log import setup_logging
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync.manifest import decode
from areal_lora.weight_sync.messages import JoinRequest, StageResult
from areal_lora.weight_sync.refusal import Refusal
from areal_lora.weight_sync.server.receiver import AdapterReceiver

NICE = 10
"""Priority of gloo's receiving threads. Generation goes first: a version that arrives some milliseconds later costs
nothing, because the trainer does not wait for it.

Threads that run Python keep their priority. A thread that holds the GIL and gets no core would make generation
wait for both.
"""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's settings of the run. The worker reads the secret from the run folder."""

    run: str
    run_folder: str
    base_digest: str
    ports: tuple[int, ...]
    index: int
    declared: dict[str, AdapterSpec]
    bind: str
    cores: tuple[int, ...]


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    worker: int
    max_rank: int
    modules: dict[str, tuple[int, int]]
    shm_prefix: str


class _WorkerAdapters:
    """State of one worker: its slots, its receiver, the command to answer."""

    def __init__(self, worker: object, rank: int, setup: WorkerSetup) -> None:
        self.rank = rank
        self.max_rank = adapter_manager(worker).lora_config.max_lora_rank
        enable_slots(worker)
        self.writer = StackedSlotWriter(bound_matrices(worker), self.max_rank)
        secret = read_secret(RunFolder.of(setup.run_folder))
        self._receiver = AdapterReceiver(
            self.writer,
            run=setup.run,
            secret=secret,
            base_digest=setup.base_digest,
            on_staged=self._staged,
            declared=setup.declared,
            bind=setup.bind,
            device=self.writer.device,
        )
        self._asked: Respond | None = None  # answers the ``Begin`` in progress
        self._last_staged: AdapterRef | None = None
        self._joining = False
        self._commands = CommandThread(
            secret=secret, ports=setup.ports, worker=rank, cores=setup.cores, handle=self._handle
        )

    def _handle(self, command: Command, respond: Respond) -> None:
        match command:
            case Ping():
                respond(CommandDone())
            case Hurry(ref=ref):
                self._receiver.hurry(AdapterRef.parse(ref))
                respond(CommandDone())
            case Join() if self._joining:
                respond(CommandDone(error="still joining the groups of the previous request"))
            case Join(request=request):
                self._joining = True
                threading.Thread(target=self._join, args=(request, respond), name="join", daemon=True).start()
            case Begin() if self._joining or self._asked is not None:
                respond(_unstaged(command, Refusal.WIRE, "this worker is busy with another transfer"))
            case Begin() if time.monotonic() >= command.deadline:
                respond(_unstaged(command, Refusal.WIRE, "the command reached this worker after its deadline"))
            case Begin():
                self._asked = respond
                self._begin(command)

    def _begin(self, command: Begin) -> None:
        if self._last_staged is not None and str(self._last_staged) not in command.active:
            self._receiver.discard(self._last_staged)
        self._last_staged = None
        try:
            announcement = decode(command.announcement)
            slot = command.slot if command.slot >= 0 else None
            # A burst of writing delays the next token only where the model computes on the same cores.
            pace_s = announcement.pace_s if command.generating and self.writer.device.type == "cpu" else 0.0
            left_s = command.deadline - time.monotonic()
            self._receiver.begin(announcement.manifest, announcement.layout, slot, left_s, pace_s)
        except ManifestError as e:
            self._answer(_unstaged(command, e.reason, e.detail))
        except PublishError as e:
            self._answer(_unstaged(command, Refusal.WIRE, str(e)))

    def _staged(self, result: StageResult) -> None:
        if result.ok:
            self._last_staged = AdapterRef.parse(result.ref)
        self._answer(Staged(result=result))

    def _answer(self, staged: Staged) -> None:
        respond, self._asked = self._asked, None
        if respond is not None:
            respond(staged)

    def _join(self, request: JoinRequest, respond: Respond) -> None:
        error = ""
        lower_priority()  # the groups' threads inherit it; this thread ends with the request
        try:
            self._receiver.join(request.endpoints, request.ranks[self.rank], request.timeout_s)
        except PublishError as e:
            error = str(e)
        except Exception as e:  # fault boundary: a thread's error must reach the server, not stderr only  # noqa: BLE001
            error = repr(e)
        self._joining = False  # before the answer, because the trainer publishes as soon as it arrives
        respond(CommandDone(error=error))


def lower_priority() -> None:
    """Lower the priority of the calling thread and of its later child threads (Linux: priority is per thread)."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def _unstaged(command: Begin, reason: str, detail: str) -> Staged:
    return Staged(result=StageResult(ref=command.ref, slot=command.slot, ok=False, reason=reason, detail=detail))


class AdapterWorkerExtension:
    """RPC methods of a worker; arguments and answers are bytes, strings and numbers. ``rank`` is vLLM's."""

    rank: int

    def al_setup(self, setup_bytes: bytes) -> None:
        setup = msgspec.msgpack.decode(setup_bytes, type=WorkerSetup)
        setup_logging("server", setup.index)
        stacks.install(RunFolder.of(setup.run_folder).stack_dump(f"server-{setup.index}-worker-{self.rank}"))
        refuse_files(self)
        own_logprobs(self)
        self._al_state = _WorkerAdapters(self, self.rank, setup)

    def al_describe(self) -> bytes:
        state = self._al_state
        described = WorkerDescription(
            worker=state.rank, max_rank=state.max_rank, modules=state.writer.modules, shm_prefix=shared_memory_prefix()
        )
        return msgspec.msgpack.encode(described)

    def al_commit(self, lora_id: int, slot: int, retired: list[int]) -> float:
        """Serve the version in ``slot`` as ``lora_id``, stop serving ``retired``, and return the seconds taken.

        Generation waits for no other part of a publish.
        """
        started = time.perf_counter()
        for old in retired:
            deactivate(self, old)
        activate(self, lora_id, slot, self._al_state.max_rank)
        return time.perf_counter() - started

    def al_alive(self) -> None:
        """Answer between two model steps; an engine that hangs in a step does not answer."""

    def al_retire(self, lora_ids: list[int]) -> None:
        for lora_id in lora_ids:
            deactivate(self, lora_id)

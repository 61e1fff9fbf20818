"""Receive adapter versions in every vLLM worker, beside generation.

The server calls the ``al_`` methods through ``AsyncLLM.collective_rpc``. Such a call waits for the
end of a model step and delays the next one, so only work that must be in step with generation is an
RPC; all other work is a command to a background thread (``channel``)::

    server                      background thread              between two steps
    al_setup                    starts
    JoinCommand ------------->  thread, low priority: join the trainers' groups
    Receive ----------------->  thread: receive, write, verify
    Forget  ----------------->  an adapter was dropped
    Ping    ----------------->  at once
    al_commit  ----------------------------------------------> slot becomes a version
    al_follow  ----------------------------------------------> running requests change to it
    al_retire  ----------------------------------------------> slot is free again

Merged weights are one version, without slots: they are received into host copies, which are not served, and al_commit
puts them into the model's own weights, layer by layer. The host copies hold every weight that a layout names, because
a layout covers the served names exactly: nothing of an earlier version remains in them, and no base is needed.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import torch

from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.vllm_ext.compat import weights
from areal_lora.engine.vllm_ext.compat.model_runner import runner_of
from areal_lora.engine.vllm_ext.worker import channel
from areal_lora.engine.vllm_ext.worker.lora_install import PlacedBlock, StackedSlotWriter, held_dtype, planned
from areal_lora.errors import ManifestError, PublishError, RefusalReason
from areal_lora.platforms.device import synchronize
from areal_lora.processes import stacks
from areal_lora.processes.log import setup_logging
from areal_lora.processes.watched import reached
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef, AdapterSpec, AdapterStructure
from areal_lora.weight_sync.kernels import ITEM_BYTES, Marks, TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout, Payload, Shape, ShardLayout
from areal_lora.weight_sync.link.inbox import BucketBytes
from areal_lora.weight_sync.manifest import decode, expanded
from areal_lora.weight_sync.messages import WEIGHT, JoinRequest, StageResult, check_targets, covered, served_shapes
from areal_lora.weight_sync.server.receiver import AdapterReceiver


class MergedWeights:
    """The ``weight_sync.server.receiver.SlotWriter`` of a worker whose model is one version; slots mean nothing."""

    max_rank = 0  # any rank: no adapter is held
    on_device = False  # the host copies are written

    def __init__(
        self,
        fused: Iterable[weights.FusedWeight],
        device: torch.device,
        base: ModelFolder,
        target_modules: Sequence[str],
    ) -> None:
        self._fused, self.device = list(fused), device
        self._parts = {part.name: part for weight in self._fused for part in weight.parts}
        self._dtype = held_dtype({part.place.dtype for part in self._parts.values() if part.place is not None})
        self.modules = {name.removesuffix(WEIGHT): part.full[::-1] for name, part in self._parts.items()}
        """(inputs, outputs) of every module that can be adapted, the same on all workers."""
        self.slot_bytes = 0  # the model's own weights are the slot
        self._touched: frozenset[str] = frozenset()  # names of the layout in the host copies
        self._fill_rest(base, target_modules)

    def expected(self, structure: AdapterStructure) -> dict[str, Shape]:
        """Full names and shapes for ``structure``. Raises ManifestError (``targets``)."""
        check_targets(self.modules, structure)
        return served_shapes(self.modules, structure, Payload.MERGED)

    def plan(self, layout: AdapterLayout) -> list[TensorBlocks]:
        """Plan the copies per shard, by address. Raises ManifestError for a layout that does not fit."""
        return [self._plan_shard(layout, shard) for shard in layout.shards]

    def prepare(self, slot: int, layout: AdapterLayout) -> None:
        """Note which weights the version has: a layer without any of them keeps its own."""
        self._touched = frozenset(t.name for shard in layout.shards for t in shard.tensors)

    def write(self, plan: TensorBlocks, slot: int, arrived: BucketBytes, first: int, last: int, marks: Marks) -> None:
        plan.copy(arrived.base, 0, tensors=(first, last), marks=marks)

    def flush(self, slot: int) -> None:
        """Nothing to do: the host copies are complete."""

    def zero(self, slot: int) -> None:
        """Nothing to do: what was not verified is never committed, and the next version overwrites all of it."""

    def commit(self, lora_id: int, slot: int, retired: Sequence[int]) -> list[int]:
        """Make the host copies the model's weights. An error leaves a mixture: the server must not answer then."""
        for weight in self._fused:
            if any(part.name in self._touched for part in weight.parts):
                weight.apply()
                reached("server.weight_written")
        synchronize(self.device)
        return []

    def retire(self, lora_ids: Sequence[int]) -> list[int]:
        """Nothing to do: a version ends when the next one is written."""
        return []

    def _fill_rest(self, base: ModelFolder, target_modules: Sequence[str]) -> None:
        """Give the parts of adapted layers that no version has the base's numbers: vLLM packs a layer as a whole."""
        for weight in self._fused:
            adapted = [covered(part.name.removesuffix(WEIGHT), target_modules) for part in weight.parts]
            if not any(adapted):
                continue
            for part, moves in zip(weight.parts, adapted, strict=True):
                if not moves and part.place is not None:
                    rows, cols = part.place.shape
                    whole = base.rows(part.name, part.row, part.row + rows)
                    part.place.copy_(whole[:, part.col : part.col + cols])

    def _plan_shard(self, layout: AdapterLayout, shard: ShardLayout) -> TensorBlocks:
        placed: list[list[PlacedBlock]] = []
        for tensor in shard.tensors:
            part = self._parts.get(tensor.name)
            if part is None:
                raise ManifestError(RefusalReason.UNKNOWN_TENSOR, f"{tensor.name} is nothing this engine serves")
            placed.append([])
            if part.place is not None:
                at, held = (part.row, part.col), (part.place.shape[0], part.place.shape[1])
                placed[-1].append(PlacedBlock.of(tensor, part.place, at, held, part.full, ITEM_BYTES[layout.dtype]))
        return planned(placed, layout.dtype, self._dtype, shard)


NICE = 10
"""Priority of gloo's receiving threads. Generation goes first: a version that arrives some milliseconds later costs
nothing, because the trainer does not wait for it.

Threads that run Python keep their priority. A thread that holds the GIL and gets no core would make generation
wait for both.
"""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's settings of the run. The worker reads the secret from the run folder. ``model`` is the base's."""

    run: str
    run_folder: str
    base_digest: str
    ports: tuple[int, ...]
    index: int
    declared: dict[str, AdapterSpec]
    bind: str
    cores: tuple[int, ...]
    model: str
    payload: Payload
    adapters: int


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    max_rank: int
    modules: dict[str, tuple[int, int]]
    slot_bytes: int


class AdapterSlots(StackedSlotWriter):
    """The versions of a worker with LoRA: each in a slot of its own."""

    def __init__(self, worker: Any) -> None:
        self._worker, self._runner = worker, runner_of(worker)
        weights.refuse_files(worker)
        weights.enable_slots(worker)
        self._served_as: dict[int, int] = {}  # ids of requests that follow an adapter, to that of its newest version
        weights.serve_as(worker, self._served_as)
        super().__init__(weights.bound_matrices(worker), weights.adapter_manager(worker).lora_config.max_lora_rank)

    def commit(self, lora_id: int, slot: int, retired: Sequence[int]) -> list[int]:
        """Serve the version in ``slot`` as ``lora_id``, and stop serving ``retired`` as `retire` does."""
        remaining = self.retire(retired)
        weights.activate(self._worker, lora_id, slot, self.max_rank)
        return remaining

    def retire(self, lora_ids: Sequence[int]) -> list[int]:
        """Stop serving versions, and return those that a request in the batch still uses."""
        remaining = [lora_id for lora_id in lora_ids if self._is_used(lora_id)]
        for lora_id in lora_ids:
            if lora_id not in remaining:
                weights.deactivate(self._worker, lora_id)
                for follow_id in self._following(lora_id):
                    del self._served_as[follow_id]
        return remaining

    def follow(self, follow_id: int, lora_id: int) -> dict[str, int]:
        """Compute requests with ``follow_id`` as those with ``lora_id``; return how many tokens each has by now."""
        self._served_as[follow_id] = lora_id
        return self._runner.sampled(follow_id)

    def _following(self, lora_id: int) -> list[int]:
        return [follow_id for follow_id, served in self._served_as.items() if served == lora_id]

    def _is_used(self, lora_id: int) -> bool:
        return any(self._runner.in_batch(each) for each in (lora_id, *self._following(lora_id)))


class _WorkerAdapters:
    """State of one worker: what holds its versions, its receiver, the command to answer."""

    def __init__(self, worker: Any, rank: int, setup: WorkerSetup) -> None:
        self.rank = rank
        self.held: AdapterSlots | MergedWeights
        if setup.payload is Payload.MERGED:
            targets = sorted({t for spec in setup.declared.values() for t in spec.target_modules})
            base = ModelFolder.at(setup.model)
            self.held = MergedWeights(weights.fused_weights(worker), worker.device, base, targets)
        else:
            self.held = AdapterSlots(worker)
        folder = RunFolder.of(setup.run_folder)
        secret = read_secret(folder)
        self._receiver = AdapterReceiver(
            self.held,
            run=setup.run,
            secret=secret,
            base_digest=setup.base_digest,
            on_staged=self._staged,
            declared=setup.declared,
            bind=setup.bind,
            device=self.held.device,
            layouts=setup.adapters,
            keys=expanded(folder.shard_keys.read_bytes()) if folder.shard_keys.exists() else None,
        )
        self._respond: channel.Respond | None = None  # answers the ``Receive`` in progress
        self._last_staged: AdapterRef | None = None
        self._joining = False
        self._commands = channel.CommandThread(
            secret=secret, ports=setup.ports, worker=rank, cores=setup.cores, handle=self._handle
        )

    def _handle(self, command: channel.Command, respond: channel.Respond) -> None:
        match command:
            case channel.Ping():
                respond(channel.WorkerAnswer())
            case channel.Forget(name=name):
                if self._last_staged is not None and self._last_staged.name == name:
                    self._last_staged = None
                self._receiver.forget(name)
                respond(channel.WorkerAnswer())
            case channel.JoinCommand() if self._joining:
                respond(channel.WorkerAnswer(error="still joining the groups of the previous request"))
            case channel.JoinCommand(request=request):
                self._joining = True
                threading.Thread(target=self._join, args=(request, respond), name="join", daemon=True).start()
            case channel.Receive() if self._joining or self._respond is not None:
                respond(_unstaged(command, RefusalReason.WIRE, "this worker is busy with another transfer"))
            case channel.Receive() if time.monotonic() >= command.deadline:
                respond(_unstaged(command, RefusalReason.WIRE, "the command reached this worker after its deadline"))
            case channel.Receive():
                self._respond = respond
                self._receive(command)

    def _receive(self, command: channel.Receive) -> None:
        if self._last_staged is not None and str(self._last_staged) not in command.active:
            self._receiver.discard(self._last_staged)
        self._last_staged = None
        try:
            announcement = decode(command.announcement)
            slot = command.slot if command.slot >= 0 else None
            self._receiver.start(announcement.manifest, announcement.layout, slot, command.deadline - time.monotonic())
        except ManifestError as e:
            self._answer(_unstaged(command, e.reason, e.detail))
        except PublishError as e:
            self._answer(_unstaged(command, RefusalReason.WIRE, str(e)))

    def _staged(self, result: StageResult) -> None:
        if result.ok:
            self._last_staged = AdapterRef.parse(result.ref)
        self._answer(channel.WorkerAnswer(staged=result))

    def _answer(self, staged: channel.WorkerAnswer) -> None:
        respond, self._respond = self._respond, None
        if respond is not None:
            respond(staged)

    def _join(self, request: JoinRequest, respond: channel.Respond) -> None:
        error = ""
        lower_priority()  # the groups' threads inherit it; this thread ends with the request
        try:
            below = None if self.rank else request.below
            self._receiver.join(request.endpoints, request.ranks[self.rank], request.timeout_s, below)
        except PublishError as e:
            error = str(e)
        except Exception as e:  # fault boundary: a thread's error must reach the server, not stderr only  # noqa: BLE001
            error = repr(e)
        self._joining = False  # before the answer, because the trainer publishes as soon as it arrives
        respond(channel.WorkerAnswer(error=error))


def lower_priority() -> None:
    """Lower the priority of the calling thread and of its later child threads (Linux: priority is per thread)."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def _unstaged(command: channel.Receive, reason: str, detail: str) -> channel.WorkerAnswer:
    failed = StageResult(ref=command.ref, slot=command.slot, ok=False, reason=reason, detail=detail)
    return channel.WorkerAnswer(staged=failed)


class AdapterWorkerExtension:
    """RPC methods of a worker; arguments and answers are bytes, strings and numbers. ``rank`` is vLLM's."""

    rank: int
    device: torch.device

    def al_setup(self, setup_bytes: bytes) -> bytes:
        """Start with a `WorkerSetup`; return the `WorkerDescription`."""
        setup = msgspec.msgpack.decode(setup_bytes, type=WorkerSetup)
        setup_logging("server", setup.index)
        stacks.install(RunFolder.of(setup.run_folder).stack_dump(f"server-{setup.index}-worker-{self.rank}"))
        runner_of(self).own_logprobs()
        if self.device.type == "cpu":
            from areal_lora.engine.vllm_ext.compat.cpu_scheduler import return_routes

            return_routes(self)
        self._al_state = _WorkerAdapters(self, self.rank, setup)
        held = self._al_state.held
        return msgspec.msgpack.encode(
            WorkerDescription(max_rank=held.max_rank, modules=held.modules, slot_bytes=held.slot_bytes)
        )

    def al_commit(self, lora_id: int, slot: int, retired: list[int]) -> tuple[float, list[int]]:
        """Serve the version in ``slot`` as ``lora_id`` and stop serving ``retired``, as `al_retire` does.

        Returns the seconds taken and the ids that are still served. Generation waits for no other part of a publish.
        """
        started = time.perf_counter()
        remaining = self._al_state.held.commit(lora_id, slot, retired)
        return time.perf_counter() - started, remaining

    def al_follow(self, follow_id: int, lora_id: int) -> dict[str, int]:
        """Let the requests with ``follow_id`` change to a version, with the KV caches that they have (`keep`).

        Returns how many tokens each has sampled before, by the engine's name of the request.
        """
        held = self._al_state.held
        assert isinstance(held, AdapterSlots), "merged weights are one version"
        return held.follow(follow_id, lora_id)

    def al_alive(self) -> None:
        """Answer between two model steps; an engine that hangs in a step does not answer."""

    def al_retire(self, lora_ids: list[int]) -> list[int]:
        """Stop serving versions, and return those that a request in the batch still uses.

        The server has sent its answer, but vLLM's scheduler may not know that yet, or has scheduled a further step
        already. That step looks the version up; without it vLLM would try to read a file, and the engine would end.
        """
        return self._al_state.held.retire(lora_ids)

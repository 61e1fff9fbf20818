"""The interface between the training loop and a trainer engine, and all of it that does not compute the model.

One process per rank, all ranks call the same verbs in the same order (SPMD)::

    engine.add_adapter(spec, optimizer, seed)
    logp = engine.logprobs(batch, adapter="math")              # [T], of the sequences that the rank holds
    stats = engine.forward_backward(minibatch, loss_fn)        # sums into the adapter's gradients
    step = engine.optim_step("math", denominator=n_tokens, lr=1e-4)  # divide, reduce, clip, Adam
    for done in engine.pack_adapter("math", "float32", flat): ...  # this rank's share of the publish

A `TrainBatch` is equal on every rank, but for token columns: of these a rank needs its part (`parts`). The engine
cuts the part into micro-batches and pads as its layout needs. Callers never see padding (contract C10).
Adapters have memory, optimizer and clock of their own (contract C1). A `Compute` runs the model.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from areal_lora.algorithms.merging import CastLoss
from areal_lora.checkpoint.state import MOMENTS, PARTS, WEIGHT, AdapterState
from areal_lora.config.models import ModelConfig, OptimizerConfig, TrainerConfig
from areal_lora.config.sections.run import ServedAs
from areal_lora.data.collate import HOST, MicroPlan
from areal_lora.engine.base import DTYPES, AdamValues, LossFn
from areal_lora.engine.common import adapter_memory, micro_batches as micro
from areal_lora.engine.common.adapter_optimizer import AdapterOptimizer, copy_state
from areal_lora.engine.common.arena import Range, ShardedModel, context_groups
from areal_lora.engine.common.compute import Compute
from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.common.transfer_plan import MergedShard, merged_layout
from areal_lora.engine.layers.active import Dropout, step_seed
from areal_lora.engine.layers.attention import pack
from areal_lora.engine.layers.context import ContextGroup
from areal_lora.engine.layers.output import Readout
from areal_lora.engine.layers.served_weights import served_weights
from areal_lora.errors import AdapterError, ConfigError
from areal_lora.families.sites import PassSizes
from areal_lora.families.targets import check_patterns, check_targets
from areal_lora.obs.trace import Spans
from areal_lora.platforms.device import finish_stream, held_bytes, peak_bytes, profiler_range
from areal_lora.types import AdapterSpec, StepStats, TrainBatch
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.manifest import base_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes that torch had allocated on one rank's device at its peak: all, the base, adapters with their moments."""

    peak: int
    base: int
    adapters: int


@dataclass(slots=True, kw_only=True)
class Resident:
    """An adapter that is attached to the model; a frozen one has no ``optimizer``."""

    spec: AdapterSpec
    sizes: PassSizes
    memory: adapter_memory.AdapterMemory
    optimizer: AdapterOptimizer | None
    seed: int

    def trained(self) -> AdapterOptimizer:
        """Raises AdapterError for a frozen adapter."""
        if self.optimizer is None:
            raise AdapterError(f"adapter {self.spec.name!r} is frozen")
        return self.optimizer

    def nbytes(self) -> int:
        """Bytes of weights, their cast, gradients and moments on this rank."""
        flats = [self.memory.weights, self.memory.grads, *(self.optimizer.moments.values() if self.optimizer else ())]
        cast = [] if self.memory.cast is self.memory.weights else [self.memory.cast]
        return sum(int(flat.nbytes) for flat in flats + cast)

    def dropout(self) -> Dropout | None:
        """The masks of the next optimizer step's passes; scores have none (contract C10)."""
        step = self.trained().step_count
        return Dropout(rate=self.spec.dropout, seed=step_seed(self.seed, step)) if self.spec.dropout else None


class AdapterEngine:
    """The verbs of a trainer rank on a `Compute`. Each is collective over all ranks unless its docstring differs."""

    def __init__(
        self, model: Compute, sharded: ShardedModel, base: ModelConfig, trainer: TrainerConfig, device: torch.device
    ) -> None:
        self.rank, self.world_size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.shape, self.routed = sharded.shape, sharded.shape.experts > 0
        """``routed``: whether the model chooses experts for each token."""
        self.spans = Spans(label=profiler_range)
        """Seconds of this rank by verb; FLOPs of all ranks by formula, padding left out."""
        self._base_sizes, self._base_bytes = PassSizes.of(sharded.shape, None), held_bytes(device)
        self._model, self._sharded, self._base, self._trainer = model, sharded, base, trainer
        self._context = ContextGroup.join(context_groups(sharded.layout), self.rank)
        self._merged: dict[str, MergedShard] = {}
        self._residents: dict[str, Resident] = {}

    def add_adapter(self, spec: AdapterSpec, optimizer: OptimizerConfig, seed: int) -> None:
        """Make a trainable adapter resident beside the others: lora_A kaiming-uniform, lora_B zero, all fp32.

        Each has gradients, moments, clipping and clock of its own; what is done to one changes no byte of another.
        The initial values depend on ``seed`` and the tensor's Hugging Face name only, so they are equal for every
        layout. A value head is zero at first. ``optimizer`` configures Adam and clipping; the learning rate is an
        argument of each step. Raises ConfigError for a target module that matches nothing, or a resident name.
        """
        if spec.name in self._residents:
            raise ConfigError("adapters", f"{spec.name!r} is resident already", "give each adapter its own name")
        check_targets(self._sharded.shape, spec)
        check_patterns(self._sharded.shape, spec)
        memory = adapter_memory.AdapterMemory(self._sharded, spec, self.rank, self.device, DTYPES[self._base.dtype])
        adam = AdapterOptimizer(optimizer, memory, self._model.attach(memory))
        held = set(memory.held[0])
        tensors = [t for shard in memory.layout("float32").shards for t in shard.tensors if t.name in held]
        memory.load(memory.weights, {t.name: adapter_memory.initial_tensor(t, seed) for t in tensors})
        self._residents[spec.name] = Resident(
            spec=spec, sizes=PassSizes.of(self._sharded.shape, spec), memory=memory, optimizer=adam, seed=seed
        )

    def freeze_copy(self, adapter: str, name: str) -> None:
        """Hold a copy of the weights of ``adapter`` as the frozen adapter ``name`` (not collective).

        It has neither gradients nor moments, and no later step changes it; a second call replaces its weights.
        """
        source = self.resident(adapter)
        if name not in self._residents:
            spec = replace(source.spec, name=name)
            dtype = source.memory.cast.dtype
            memory = adapter_memory.AdapterMemory(self._sharded, spec, self.rank, self.device, dtype, frozen=True)
            self._model.attach(memory)
            self._residents[name] = replace(source, spec=spec, memory=memory, optimizer=None)
        copy = self.resident(name)
        if copy.optimizer is not None:
            raise AdapterError(f"adapter {name!r} is trained: no copy may replace it")
        copy.memory.weights.copy_(source.memory.weights)

    def remove_adapter(self, adapter: str) -> None:
        """Forget a resident adapter and free its memory (not collective)."""
        self.resident(adapter)
        self._model.detach(adapter)
        del self._residents[adapter]
        self._merged.pop(adapter, None)

    def resident(self, name: str) -> Resident:
        """A resident adapter (not collective). Raises AdapterError for another one."""
        if name not in self._residents:
            raise AdapterError(f"adapter {name!r} is not resident in this engine")
        return self._residents[name]

    def logprobs(self, batch: TrainBatch, *, adapter: str | None, temperature: float = 1.0) -> Tensor:
        """log p(token t | tokens before it), [T] fp32, no grad, of the sequences that the rank holds; 0 for others.

        Tokens off the loss mask have 0, but those of clients. ``adapter=None`` scores the frozen base (KL reference,
        C11). Raises AdapterError for an adapter with a value head.
        """
        if adapter is not None and self.resident(adapter).spec.value_head:
            raise AdapterError(f"adapter {adapter!r} gives values, not log-probabilities")
        return self.logprobs_of_each(replace(batch, adapters=(adapter or "",) * batch.n_sequences), temperature)

    def own_choice(self, batch: TrainBatch, *, adapter: str, temperature: float = 1.0) -> tuple[Tensor, float | None]:
        """As `logprobs` with the experts that the routers choose, and the share of the routes that differ from them."""
        with self._model.active.choosing("compare"):
            return self.logprobs(batch, adapter=adapter, temperature=temperature), self._model.active.flipped_share()

    def recorded(
        self, batch: TrainBatch, minibatches: int, *, adapter: str, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """As `logprobs`, and the experts that its routers choose: [H, L, K] int16, the ``routes`` of later passes.

        They are of the sequences of the rank's `parts` and the layers of its stage.
        """
        needed, _ = self.parts(batch, minibatches)
        recorder = micro.RouteRecorder(
            batch, needed, self._sharded, self._model.groups.get(Range.DENSE_SPLIT), self._context
        )
        with self._model.active.choosing("record"):
            each = replace(recorder.batch, adapters=(adapter,) * batch.n_sequences)
            return self.logprobs_of_each(each, temperature, recorder=recorder), recorder.routes()

    def served(self, batch: TrainBatch, kind: ServedAs, *, adapter: str | None, temperature: float = 1.0) -> Tensor:
        """As `logprobs` of the base by the weights of servers; ``adapter``: what they merged."""
        memory = self.resident(adapter).memory if adapter else None
        with served_weights(self._model.served_sites(memory), kind):
            return self.logprobs(batch, adapter=None, temperature=temperature)

    def values(self, batch: TrainBatch, *, adapter: str) -> Tensor:
        """Value of the state before token t, by the value head of ``adapter``: [T] fp32, on every rank of all.

        Tokens off the loss mask have 0. Raises AdapterError for an adapter without a value head.
        """
        if not self.resident(adapter).spec.value_head:
            raise AdapterError(f"adapter {adapter!r} has no value head")
        return self.logprobs_of_each(replace(batch, adapters=(adapter,) * batch.n_sequences), whole=True)

    def logprobs_of_each(
        self,
        batch: TrainBatch,
        temperature: float = 1.0,
        *,
        whole: bool = False,
        recorder: micro.RouteRecorder | None = None,
    ) -> Tensor:
        """As `logprobs`, of each sequence by the adapter that it names; of several none may have a value head.

        ``whole``: on every rank of all sequences. ``recorder`` reads what routers choose.
        """
        with self.spans.span("score"), torch.no_grad(), self._model.active.using(dict.fromkeys(batch.adapters)):
            plans, results = self._run(batch, None, Readout(temperature), recorder)
            finish_stream(self.device)  # kernels are only queued so far
        return micro.gather_scores(batch, plans, results, self._sharded.layout, whole=whole)

    def forward_backward(
        self,
        batch: TrainBatch,
        loss_fn: LossFn,
        *,
        temperature: float = 1.0,
        need_entropy: bool = False,
        scores: Tensor | None = None,
    ) -> dict[str, float]:
        """Add the gradients of the summed loss to those of the adapter that the batch names.

        Gradients stay local and undivided until `optim_step`. Returns the loss functions' sums over all micro-batches
        and data-parallel ranks (``loss`` and every stat), each token counted once, equal on every rank. ``scores``, [T]
        fp32 on the host, [T, 2] if entropies are needed, is filled with what the loss functions saw of each token of
        the whole batch, on every rank. Raises AdapterError for several adapters, or one not resident.
        """
        adapter, *others = sorted(set(batch.adapters))
        if others:
            raise AdapterError(f"a batch names the adapters {[adapter, *others]}; each batch trains one")
        readout = Readout(temperature, need_entropy)
        return self.forward_backward_of_each(batch, {adapter: loss_fn}, scores=scores, readout=readout)[adapter]

    def forward_backward_of_each(
        self, batch: TrainBatch, losses: Mapping[str, LossFn], *, scores: Tensor | None, readout: Readout | None = None
    ) -> dict[str, dict[str, float]]:
        """As `forward_backward`, for all adapters that ``batch`` names in common micro-batches; each has its loss.

        Gradients and sums are those of passes of their own but for rounding. All losses give stats of the same names.
        Raises AdapterError for an adapter with a value head beside others.
        """
        dropouts = {name: self.resident(name).dropout() for name in dict.fromkeys(batch.adapters)}
        with self.spans.span("passes"), self._model.active.using(dropouts):
            plans, results = self._run(batch, losses, readout or Readout())
            finish_stream(self.device)
        sums = {name: Counter[str]() for name in dropouts}
        for sequences, stats, _ in results:
            sums[batch.adapters[sequences[0]]].update({name: float(value) for name, value in stats.items()})
        if scores is not None:
            columns = scores.shape[1:]
            scores.copy_(micro.gather_scores(batch, plans, results, self._sharded.layout, whole=True, columns=columns))
        return micro.sum_over_ranks(sums, self._sharded.layout.reporting())

    def parts(self, batch: TrainBatch, minibatches: int) -> tuple[np.ndarray, list[int]]:
        """The sequences [P, N] bool whose token columns passes over ``batch`` need, and each rank's number (below P).

        Not collective, equal on all ranks; the columns are not read.
        """
        held = micro.parts_of(batch, minibatches, self._sharded.layout, self._trainer.max_tokens_per_microbatch)
        return held, [self._sharded.layout.dp_rank(rank) for rank in range(self.world_size)]

    def _run(
        self,
        batch: TrainBatch,
        losses: Mapping[str, LossFn] | None,
        readout: Readout,
        recorder: micro.RouteRecorder | None = None,
    ) -> tuple[list[MicroPlan], list[micro.Result]]:
        residents = {name: self.resident(name) for name in dict.fromkeys(batch.adapters) if name}
        for name, resident in residents.items():
            if len(residents) > 1 and resident.spec.value_head:
                raise AdapterError(f"adapter {name!r} has a value head: a pass has no other adapter")
            resident.memory.refresh()
        layout, train, own = self._sharded.layout, losses is not None, micro.of_stage(batch, self._sharded, self.rank)
        plans = micro.plans_of(batch, layout, self._trainer.max_tokens_per_microbatch)
        sizes = {"": self._base_sizes} | {name: resident.sizes for name, resident in residents.items()}
        self.spans.counts.update(micro.flops_of(plans, batch, sizes, self._trainer.recompute if train else None))
        judge, results = micro.BatchJudge(readout, losses), list[micro.Result]()
        for part in micro.runs_of(plans, train=train, uniform=layout.pp > 1):
            packed = (pack(own, plan, layout.dp_rank(self.rank), self.device, self._context) for plan in part)
            with torch.set_grad_enabled(backward := train and part[0].gradient):
                batches = recorder.watch(packed, part) if recorder else packed
                results += self._model.run(batches, part, judge, train=backward)
        return plans, results

    def memory(self) -> DeviceMemory | None:
        """Of the rank with the highest peak since the last call; None on CPUs."""
        if (peak := peak_bytes(self.device)) is None:
            return None
        adapters = sum(resident.nbytes() for resident in self._residents.values())
        rows = torch.zeros(self.world_size, 3, dtype=torch.int64)
        rows[self.rank] = torch.tensor([peak, self._base_bytes, adapters])
        dist.all_reduce(rows)
        peak, base, adapters = max(rows.tolist())
        return DeviceMemory(peak=peak, base=base, adapters=adapters)

    def optim_step(self, adapter: str, denominator: float, lr: float, adam: AdamValues | None = None) -> StepStats:
        """Divide the gradients by ``denominator``, reduce, clip by the adapter's norm, Adam step at ``lr``.

        ``adam`` takes the place of the configured values in this step alone.

        Returns ``grad_norm`` (before clipping), ``lr`` and ``skipped`` (1.0 when a gradient was
        not finite on some rank: weights and moments are then untouched). Gradients are zero
        afterwards in every case.
        """
        with self.spans.span("optimizer"):
            return self.resident(adapter).trained().step(denominator, lr, adam)

    def discard_gradients(self, adapter: str) -> None:
        """Forget the gradients since the last step, as if no batch had been passed (not collective)."""
        self.resident(adapter).memory.grads.zero_()

    def adapter_layout(self, adapter: str, dtype: str = "float32") -> AdapterLayout:
        """Sender and offset of every wire tensor, and which names share one (not collective, equal on all ranks)."""
        return self.resident(adapter).memory.layout(dtype)

    def pack_adapter(self, adapter: str, dtype: str, flat: Tensor) -> Iterator[int]:
        """Fill ``flat`` (uint8, where the weights are) with this rank's shard of `adapter_layout`; see `Pack`.

        Collective over the tensor-parallel groups of the ranks that send: every rank must run the
        iterator to its end before the weights change. A rank without a shard gives an empty ``flat``.
        """
        memory = self.resident(adapter).memory
        return memory.packer(dtype).fill(memory.weights, flat, self._model.groups)

    def merged_layout(self, adapter: str, dtype: str) -> AdapterLayout:
        """The layout of the weights that the adapter changes (not collective, equal on all ranks)."""
        return merged_layout(self.resident(adapter).memory.layout("float32", spread=True), dtype)

    def pack_merged(self, adapter: str, loss: CastLoss, flat: Tensor) -> Iterator[int]:
        """Fill ``flat`` (uint8, host) with this rank's shard of `merged_layout` in ``loss.dtype``, as the adapter is.

        Each weight is base + alpha / rank * lora_B @ lora_A, computed in fp32 out of place and cast last; ``loss``
        counts what the cast loses. Collective like `pack_adapter`, but only until the call returns: the iterator
        reads no tensor of the model that trains. Raises UnknownTensorError for a base folder that does not fit.
        """
        memory = self.resident(adapter).memory
        if adapter not in self._merged:
            folder, layout = ModelFolder.of(self._base), memory.layout("float32", spread=True)
            self._merged[adapter] = MergedShard(folder, layout, self.rank, DTYPES[self._base.dtype], self.device)
        # All of the adapter before the first weight: what is sent must not depend on when the iterator runs.
        tensors = dict(memory.packer("float32", spread=True).tensors(memory.weights, self._model.groups))
        return self._merged[adapter].fill(tensors | memory.shared_tensors(), flat, loss)

    def export_adapter(self, adapter: str) -> Iterator[tuple[str, Tensor]]:
        """The wire tensors this rank owns: whole, contiguous fp32 copies, in `adapter_layout` order.

        The iterator makes the copies as it runs, a few MiB at a time. Collective like `pack_adapter`: every rank
        must start at once and run the iterator to its end before the weights change.
        """
        memory = self.resident(adapter).memory
        return memory.packer("float32").tensors(memory.weights, self._model.groups)

    def load_adapter(self, adapter: str, tensors: Mapping[str, Tensor]) -> None:
        """Set the adapter's weights from whole wire tensors, equal on every rank (not collective).

        Alias names may be present when they equal their wire tensor. Optimizer moments are kept. Raises
        UnknownTensorError for unknown or missing names, AdapterError for wrong shapes or unequal aliases.
        """
        memory = self.resident(adapter).memory
        memory.load(memory.weights, adapter_memory.checked(memory.layout("float32"), tensors))

    def base_digest(self) -> str:
        """Digest of the frozen base, for manifests and checkpoints (not collective)."""
        return base_digest(self._base.folder)

    def export_state(self, adapter: str) -> AdapterState:
        """Host copies of the weights and moments that this rank publishes, and the step count. Collective.

        The states of all ranks together are the whole state and do not depend on the layout.
        """
        state, copying = self.copy_state(adapter)
        deque(copying, maxlen=0)
        return state

    def copy_state(self, adapter: str, *, moments: bool = True) -> tuple[AdapterState, Iterator[None]]:
        """As `export_state`, with ``moments`` or without, but the iterator makes the copies, a slice each time.

        All ranks get as many slices. Every rank must run it to its end, or equally far if the copies are not needed,
        before the adapter changes or is packed.
        """
        resident = self.resident(adapter)
        return copy_state(resident.memory, resident.optimizer, self._model.groups, moments=moments)

    def load_state(self, adapter: str, parts: Mapping[str, Mapping[str, np.ndarray]], step: int) -> None:
        """Inverse of `export_state` in any layout: whole wire tensors by part, equal on every rank (not collective).

        Raises like `load_adapter`, before any value has changed.
        """
        memory, optimizer = self.resident(adapter).memory, self.resident(adapter).optimizer
        layout = memory.layout("float32")
        whole = {
            part: adapter_memory.checked(
                layout, {name: torch.from_numpy(values) for name, values in parts[part].items()}
            )
            for part in (PARTS if optimizer else (WEIGHT,))
        }
        memory.load(memory.weights, whole[WEIGHT])
        if optimizer:
            host = torch.zeros(memory.arena.size, device=HOST)
            for name in MOMENTS:
                memory.load(host, whole[name])
                optimizer.load_moment(name, host)
            optimizer.step_count = step

"""Write received tensors into an inactive slot of a worker's stacked LoRA buffers.

Runs in the receiver's background thread while the model generates. Destinations are planned once
per layout; a publish then runs compiled or strided copies only. This module knows wire names and shapes,
``compat.weights`` knows where vLLM keeps the buffers.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from areal_lora.engine.base import DTYPES
from areal_lora.engine.vllm_ext.compat.weights import Matrix
from areal_lora.errors import AdapterError, ManifestError, RefusalReason
from areal_lora.families.family import Scope, covers
from areal_lora.families.registry import path_of
from areal_lora.platforms.device import lane_of
from areal_lora.processes.watched import renamed
from areal_lora.types import AdapterStructure
from areal_lora.weight_sync.kernels import ITEM_BYTES, Block, Marks, TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout, Shape, ShardLayout, WireTensor
from areal_lora.weight_sync.link.inbox import BucketBytes
from areal_lora.weight_sync.messages import check_targets, served_shapes
from areal_lora.weight_sync.strided import ChunkSums, StridedCopies

_VLLM_MODULES = {
    ("linear_qkv", Scope.ATTENTION): "qkv_proj",
    ("linear_proj", Scope.ATTENTION): "o_proj",
    ("linear_fc1", Scope.MLP): "gate_up_proj",
    ("linear_fc2", Scope.MLP): "down_proj",
    ("linear_fc1", Scope.SHARED_EXPERT): "gate_up_proj",
    ("linear_fc2", Scope.SHARED_EXPERT): "down_proj",
    ("linear_fc1", Scope.EXPERT): "experts",
    ("linear_fc2", Scope.EXPERT): "experts",
}
_NOTHING = ""  # a slot of zeros: any layout can be written over it


def vllm_modules(target_modules: Sequence[str]) -> list[str]:
    """Leaf names of vLLM's modules that hold the projections of canonical targets; empty for unknown targets.

    vLLM itself knows which projections it has fused into one module.
    """
    paths = {target.rpartition(".")[2] for target in target_modules}
    return sorted(
        {leaf for leaf in paths if not leaf.startswith("linear_")}
        | {m for (linear, scope), m in _VLLM_MODULES.items() if covers(target_modules, linear, scope)}
    )


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Copies of one shard into slot 0, by address. On a device the same as views, and fingerprints there."""

    blocks: TensorBlocks
    copies: StridedCopies
    chunks: ChunkSums


class StackedSlotWriter:
    """The ``weight_sync.server.receiver.SlotWriter`` of a vLLM worker.

    Slots are written in place: by compiled loops on the host, as `strided` views on a device (``on_device``, by default
    where the slots are). What arrives on the host is uploaded there bucket by bucket.
    """

    def __init__(self, matrices: Iterable[Matrix], max_rank: int, *, on_device: bool | None = None) -> None:
        self._matrices = {renamed("server.matrix", m.name): m for m in matrices if path_of(m.module) is not None}
        self.max_rank = max_rank
        stacks = {id(m.stacked): m.stacked for m in self._matrices.values() if m.stacked is not None}
        self._dtype = held_dtype({t.dtype for t in stacks.values()})
        self._stacks = sorted(stacks.values(), key=torch.Tensor.data_ptr)
        self._n_slots = self._stacks[0].shape[0]
        self.device = self._stacks[0].device
        self._lane = lane_of(self.device)
        self.on_device = self._lane is not None if on_device is None else on_device
        self.slot_bytes = sum(t[0].numel() * t.element_size() for t in self._stacks)
        """Memory of one slot on this worker."""
        self._written: dict[int, str] = {}  # by slot: which cells may be non-zero
        inputs = {m.module: m.full for m in self._matrices.values() if m.is_a}
        self.modules = {m.module: (inputs[m.module], m.full) for m in self._matrices.values() if not m.is_a}
        """(inputs, outputs) of every module that can be adapted, the same on all workers."""

    def expected(self, structure: AdapterStructure) -> dict[str, Shape]:
        """Full names and shapes for ``structure``. Raises ManifestError (``rank``, ``targets``)."""
        if structure.max_rank > self.max_rank:
            raise ManifestError(
                RefusalReason.RANK,
                f"the adapter has rank {structure.max_rank}, this server holds up to {self.max_rank}; "
                "raise rollout.max_lora_rank",
            )
        check_targets(self.modules, structure)
        return served_shapes(self.modules, structure)

    def plan(self, layout: AdapterLayout) -> list[ShardPlan]:
        """Plan the copies per shard. Raises ManifestError for a layout that does not fit."""
        full_names: dict[str, list[str]] = {}
        for name, wire in layout.aliases.items():
            full_names.setdefault(wire, []).append(name)
        starts = [stack.data_ptr() for stack in self._stacks]
        plans, taken = [], Taken()
        for shard, table in zip(layout.shards, layout.tables, strict=True):
            blocks = self._plan_shard(layout, shard, full_names, taken)
            plans.append(ShardPlan(blocks, StridedCopies(blocks, (0,), starts), ChunkSums(table)))
        return plans

    def prepare(self, slot: int, layout: AdapterLayout) -> None:
        """Clear the slot unless its content comes from a layout with the same cells, which ``layout`` overwrites."""
        made = layout.structure
        cells = f"{made.rank} {made.rank_pattern} {' '.join(sorted(made.target_modules))}"
        if self._written.get(slot) not in (cells, _NOTHING):
            self.zero(slot)
        self._written[slot] = cells

    def write(self, plan: ShardPlan, slot: int, arrived: BucketBytes, first: int, last: int, marks: Marks) -> None:
        """Store tensors [first, last) of a shard, with which ``arrived`` starts, and measure them."""
        if not self.on_device:
            plan.blocks.copy(arrived.base, 0, slot=slot, tensors=(first, last), marks=marks)
            return
        with self._queue():
            flat = torch.as_tensor(arrived.memory).to(self.device, non_blocking=True)
            source, skipped = flat.view(DTYPES[marks.dtype]), (arrived.start, 0)
            plan.copies.copy((source,), self._stacks, (first, last), slot=slot, skipped=skipped)
            plan.chunks.measure(marks, flat, first, last)  # waits: the bucket's memory is used again

    def flush(self, slot: int) -> None:
        """Wait for the device, if the slot is there."""
        if self._lane is not None:
            self._lane.synchronize()

    def zero(self, slot: int) -> None:
        """Clear ``slot`` on this worker."""
        with self._queue():
            for stack in self._stacks:
                if self.on_device:
                    stack[slot].zero_()
                else:
                    _host_view(stack[slot])[...] = 0
        self._written[slot] = _NOTHING

    def _queue(self) -> AbstractContextManager[object]:
        return nullcontext() if self._lane is None else self._lane.queue()

    def _plan_shard(
        self, layout: AdapterLayout, shard: ShardLayout, full_names: Mapping[str, Sequence[str]], taken: "Taken"
    ) -> TensorBlocks:
        placed = []
        for tensor in shard.tensors:
            blocks = []
            for name in (tensor.name, *full_names.get(tensor.name, ())):
                matrix = self._matrices.get(name)
                if matrix is None:
                    raise ManifestError(RefusalReason.UNKNOWN_TENSOR, f"{name} is nothing this engine serves")
                if matrix.stacked is None:
                    continue
                place = matrix.stacked[0, matrix.index]
                step = matrix.stacked.stride(0) * matrix.stacked.element_size()
                rank = layout.structure.rank_of(matrix.module)
                if matrix.is_a:
                    held, at, full, scale = (rank, place.shape[1]), (0, matrix.start), (rank, matrix.full), 1.0
                else:
                    held, at, full = (place.shape[0], rank), (matrix.start, 0), (matrix.full, rank)
                    scale = layout.structure.scale_of(matrix.module)
                item = ITEM_BYTES[layout.dtype]
                block = PlacedBlock.of(tensor, place, at, held, full, item, step=step, scale=scale)
                if block.address not in taken:
                    blocks.append(block)
                elif taken[block.address] != (tensor, block):
                    reason = f"{name} differs from {taken[block.address][0].name}; slots have one for all experts"
                    raise ManifestError(RefusalReason.TARGETS, f"{reason}: use expert_layout shared_outer")
                taken[block.address] = tensor, block
            placed.append(blocks)
        return planned(placed, layout.dtype, self._dtype, shard, self._n_slots)


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A copy into the matrix at ``address`` in slot 0, which has ``nbytes`` there."""

    block: Block
    address: int
    nbytes: int

    @classmethod
    def of(
        cls,
        tensor: WireTensor,
        place: torch.Tensor,
        at: tuple[int, int],
        held: tuple[int, int],
        full: tuple[int, int],
        item: int,
        *,
        step: int = 0,
        scale: float = 1.0,
    ) -> "PlacedBlock":
        """The rectangle ``held`` of a matrix ``full``, from row and column ``at`` on, goes to the start of ``place``.

        Raises ManifestError for a tensor that does not fit.
        """
        (row, col), (rows, cols), (outputs, inputs) = at, held, full
        fits = rows <= place.shape[0] and cols <= place.shape[1] and place.stride(1) == 1
        if tensor.shape != full or row + rows > outputs or col + cols > inputs or not fits:
            raise ManifestError(
                RefusalReason.SHAPE,
                f"{tensor.name}: {list(tensor.shape)} does not fit [{row}, {col}] onwards of {list(full)} "
                f"into {list(place.shape)}",
            )
        pitch = place.stride(0) * place.element_size()
        block = Block(
            src=tensor.offset + (row * inputs + col) * item,
            src_pitch=inputs * item,
            dst=0,
            dst_pitch=pitch,
            dst_step=step,
            rows=rows,
            cols=cols,
            scale=scale,
        )
        nbytes = (place.shape[0] - 1) * pitch + place.shape[1] * place.element_size()
        return cls(block, place.data_ptr(), nbytes)


Taken = dict[int, tuple[WireTensor, PlacedBlock]]
"""What all shards put into a place, by address: experts may share one, which is written once."""


def planned(
    placed: Sequence[Sequence[PlacedBlock]], wire_dtype: str, dtype: str, shard: ShardLayout, slots: int = 1
) -> TensorBlocks:
    """The copies of each tensor of ``shard``, by address. Raises ManifestError for one outside of the memory."""
    plan = TensorBlocks.of([[each.block for each in blocks] for blocks in placed], wire_dtype, dtype)
    every = [each for blocks in placed for each in blocks]
    limits = [(slots - 1) * each.block.dst_step + each.nbytes for each in every]
    plan.check(src_bytes=shard.nbytes, dst_bytes=np.array(limits, dtype=np.int64), slots=slots)
    return plan.moved(dst_by=np.array([each.address for each in every], dtype=np.int64))


def held_dtype(dtypes: Collection[torch.dtype]) -> str:
    """The name of the one type of a worker's matrices. Raises AdapterError for none, several or another one."""
    names = {str(dtype).removeprefix("torch.") for dtype in dtypes}
    if len(names) != 1 or not names <= DTYPES.keys():
        raise AdapterError(
            f"this worker holds what adapters change as {sorted(names)}; areal_lora writes one of {sorted(DTYPES)}: "
            "choose model.dtype among them"
        )
    return names.pop()


def _host_view(tensor: torch.Tensor) -> np.ndarray:
    """View host memory with numpy (bfloat16 as bit patterns), which fills it without OpenMP."""
    view: np.ndarray = tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
    return view

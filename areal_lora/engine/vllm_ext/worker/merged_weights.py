"""Receive merged weights into host copies beside generation, and put them into the model between two steps.

    background thread   receive, fingerprint, write     host copies: not served, whatever happens to them
    between two steps   ``commit``                      host copies -> the model's own weights, layer by layer

There is one version. The host copies hold every weight that a layout names, because a layout covers the served names
exactly: nothing of an earlier version remains in them, and ``commit`` needs no base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from areal_lora.engine.common.model_folder import ModelFolder
from areal_lora.engine.vllm_ext.compat.weights import FusedWeight, WeightPart
from areal_lora.errors import AdapterError, ManifestError
from areal_lora.processes.faults import reached
from areal_lora.types import AdapterStructure
from areal_lora.weight_sync.blocks import ITEM_BYTES, Block, Marks, TensorBlocks
from areal_lora.weight_sync.layout import AdapterLayout, Payload, Shape, ShardLayout, WireTensor
from areal_lora.weight_sync.refusal import RefusalReason
from areal_lora.weight_sync.served import WEIGHT, check_targets, covered, served_shapes

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class MergedWeights:
    """The ``weight_sync.server.receiver.SlotWriter`` of a worker whose model is one version; slots mean nothing."""

    def __init__(
        self, fused: Iterable[FusedWeight], device: torch.device, base: ModelFolder, target_modules: Sequence[str]
    ) -> None:
        self._fused, self.device = list(fused), device
        self._parts = {part.name: part for weight in self._fused for part in weight.parts}
        dtypes = {part.place.dtype for part in self._parts.values() if part.place is not None}
        if len(dtypes) != 1 or not dtypes <= _DTYPES.keys():
            raise AdapterError(
                f"this worker holds weights as {sorted(map(str, dtypes))}; areal_lora writes one of "
                f"{sorted(_DTYPES.values())}: choose model.dtype among them"
            )
        self._dtype = _DTYPES[dtypes.pop()]
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

    def write(self, plan: TensorBlocks, slot: int, base: int, first: int, last: int, marks: Marks) -> None:
        plan.copy(base, 0, tensors=(first, last), marks=marks)

    def flush(self, slot: int) -> None:
        """Nothing to do: the host copies are complete."""

    def zero(self, slot: int) -> None:
        """Nothing to do: what was not verified is never committed, and the next version overwrites all of it."""

    def commit(self) -> None:
        """Make the host copies the model's weights. An error leaves a mixture: the server must not answer then."""
        for weight in self._fused:
            if any(part.name in self._touched for part in weight.parts):
                weight.apply()
                reached("server.weight_written")
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

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
        tensors: list[list[Block]] = []
        starts: list[int] = []
        limits: list[int] = []
        for tensor in shard.tensors:
            part = self._parts.get(tensor.name)
            if part is None:
                raise ManifestError(RefusalReason.UNKNOWN_TENSOR, f"{tensor.name} is nothing this engine serves")
            tensors.append([])
            if part.place is None:
                continue
            tensors[-1].append(_block(tensor, part, part.place, layout.dtype))
            starts.append(part.place.data_ptr())
            rows, cols = part.place.shape
            limits.append(((rows - 1) * part.place.stride(0) + cols) * part.place.element_size())
        plan = TensorBlocks.of(tensors, layout.dtype, self._dtype)
        plan.check(src_bytes=shard.nbytes, dst_bytes=np.array(limits, dtype=np.int64))
        return plan.moved(dst_by=np.array(starts, dtype=np.int64))


def _block(tensor: WireTensor, part: WeightPart, place: torch.Tensor, dtype: str) -> Block:
    """Plan the copy of this worker's rectangle of a weight."""
    (rows, cols), (outputs, inputs), item = place.shape, part.full, ITEM_BYTES[dtype]
    if tensor.shape != part.full or part.row + rows > outputs or part.col + cols > inputs or place.stride(1) != 1:
        raise ManifestError(
            RefusalReason.SHAPE,
            f"{part.name}: {list(tensor.shape)} does not fit [{part.row}, {part.col}] onwards of {list(part.full)} "
            f"into {list(place.shape)}",
        )
    return Block(
        src=tensor.offset + (part.row * inputs + part.col) * item,
        src_pitch=inputs * item,
        dst=0,
        dst_pitch=place.stride(0) * place.element_size(),
        rows=rows,
        cols=cols,
    )

"""Find what an adapter changes in a vLLM worker, and put other numbers there: adapter slots, or the weights themselves.

With LoRA a worker stacks the matrices of all adapters by slot (`bound_matrices`) and maps adapter ids to slots
(`activate`). Without it (merged rollouts) the model's weights change (`fused_weights`).

vLLM fuses projections (qkv, gate and up, all experts of a layer) and, on CPUs, packs every matrix for its kernels when
it loads the model: neither a parameter's shape nor its memory is that of the checkpoint. So each fused weight has a
host copy in the plain order, as this worker holds it, and ``apply`` hands it to vLLM's own packing. On GPUs the
parameter is overwritten in place, because CUDA graphs have its address; vLLM then reorders experts for its kernel.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.utils import process_packed_modules_mapping
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from areal_lora.errors import AdapterError
from areal_lora.families.registry import path_of, target_of
from areal_lora.processes.log import get_logger
from areal_lora.weight_sync.messages import LORA_A, LORA_B, WEIGHT

log = get_logger(__name__)

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Of every family; vLLM's own table of a model leaves out what its LoRA does not adapt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPart:
    """One weight of the checkpoint as one worker holds it.

    ``place`` [rows, cols] is its part of a host copy; None where another worker holds it (expert parallel). The part
    starts at ``row``, ``col`` of the whole weight, which has the shape ``full`` (outputs, inputs).
    """

    name: str
    place: Tensor | None
    row: int
    col: int
    full: tuple[int, int]


def fused_weights(worker: Any) -> "Iterator[FusedWeight]":
    """Yield the layers of a worker's model that an adapter can change. Raises AdapterError for one of another form."""
    model: nn.Module = worker.model_runner.get_model()
    packed: dict[str, list[str]] = FUSED | process_packed_modules_mapping(model)
    for name, module in model.named_modules():
        path = name.removesuffix(".routed_experts")
        prefix, _, leaf = path.rpartition(".")
        names = [f"{prefix}.{part}" for part in packed.get(leaf, [])] or [path]
        if all(target_of(part) is None for part in names):
            continue
        if isinstance(module, RoutedExperts):
            yield _Experts(module, names)
        elif isinstance(module, LinearBase):
            yield _Linear(module, names)


class _Linear:
    def __init__(self, layer: LinearBase, names: list[str]) -> None:
        if not isinstance(layer.quant_method, UnquantizedLinearMethod):
            raise AdapterError(
                f"{names[0]}: merged rollouts write plain weights, not {type(layer.quant_method).__name__}"
            )
        self._layer = layer
        in_part = layer.input_size_per_partition
        sizes, starts, fulls = _rows_of(layer)
        self._staged = _host(layer, sum(sizes), in_part)
        col = _column_of(layer)
        self.parts: list[WeightPart] = []
        at = 0
        for name, size, start, full in zip(names, sizes, starts, fulls, strict=True):
            place = self._staged[at : at + size]
            self.parts.append(
                WeightPart(name=name + WEIGHT, place=place, row=start, col=col, full=(full, layer.input_size))
            )
            at += size

    def apply(self) -> None:
        layer = self._layer
        if self._staged.is_pinned():
            layer.weight.data.copy_(self._staged, non_blocking=True)
            return
        layer.weight = _parameter(self._staged)
        layer.quant_method.process_weights_after_loading(layer)


def _column_of(layer: LinearBase) -> int:
    """The first of this worker's columns."""
    return layer.tp_rank * layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else 0


def _rows_of(layer: LinearBase) -> tuple[list[int], list[int], list[int]]:
    """Of each projection fused in ``layer``: this worker's rows, the first of them, and all rows."""
    if isinstance(layer, QKVParallelLinear):
        d, rank = layer.head_size, layer.tp_rank
        kv = layer.num_kv_heads * d  # repeated where there are fewer heads than workers
        sizes = [layer.num_heads * d, kv, kv]
        starts = [rank * sizes[0]] + [rank // layer.num_kv_head_replicas * kv] * 2
        return sizes, starts, [layer.total_num_heads * d] + [layer.total_num_kv_heads * d] * 2
    if isinstance(layer, MergedColumnParallelLinear):
        sizes = list(layer.output_partition_sizes)
        return sizes, [layer.tp_rank * size for size in sizes], list(layer.output_sizes)
    if isinstance(layer, ColumnParallelLinear):
        size = layer.output_size_per_partition
        return [size], [layer.tp_rank * size], [layer.output_size]
    return [layer.output_size], [0], [layer.output_size]


class _Experts:
    """``names`` are those of all experts' gate, down and up projections, expert by expert."""

    def __init__(self, layer: RoutedExperts, names: list[str]) -> None:
        method, config = layer.quant_method, layer.moe_config
        if not isinstance(method, UnquantizedFusedMoEMethod) or not config.is_act_and_mul:
            raise AdapterError(f"{names[0]}: merged rollouts write plain gate, up and down projections of experts")
        self._layer, self._method = layer, method
        self._packed = method.unquantized_backend is UnquantizedMoeBackend.CPU
        # Of the checkpoint: the parameter of a kernel may be wider.
        inter, hidden = config.intermediate_size_per_partition_unpadded, config.hidden_dim_unpadded
        local = layer.local_num_experts
        tp_rank, tp_size = config.moe_parallel_config.tp_rank, config.moe_parallel_config.tp_size
        self._w13 = _host(layer, local, 2 * inter, hidden)
        self._w2 = _host(layer, local, hidden, inter)
        if not self._packed and not self._fits(layer.w13_weight, layer.w2_weight):
            kernel, fix = method.unquantized_backend.value, "set rollout.engine_args.moe_backend=triton"
            raise AdapterError(f"{names[0]}: vLLM keeps experts for {kernel} in a form of their own (fix: {fix})")
        wide, narrow = (inter * tp_size, hidden), (hidden, inter * tp_size)
        index = local_experts(layer.expert_map, len(names) // 3)
        self.parts: list[WeightPart] = []
        for i, name in enumerate(names):
            at, which = index[i // 3], i % 3
            row, col = (0, inter * tp_rank) if which == 1 else (inter * tp_rank, 0)
            place = None
            if at >= 0:
                place = (self._w13[at, :inter], self._w2[at], self._w13[at, inter:])[which]
            full = narrow if which == 1 else wide
            self.parts.append(WeightPart(name=name + WEIGHT, place=place, row=row, col=col, full=full))

    def _fits(self, w13: Tensor, w2: Tensor) -> bool:
        n, hidden, inter = w2.shape
        wide = all(a >= b for a, b in zip(w2.shape, self._w2.shape, strict=True))
        return wide and w13.shape == (n, 2 * inter, hidden)

    def apply(self) -> None:
        layer, (_, hidden, inter) = self._layer, self._w2.shape
        if self._packed:
            layer.w13_weight, layer.w2_weight = _parameter(self._w13), _parameter(self._w2)
            # Not the method's own step: from its second call on, that leaves experts of a CPU unpacked.
            self._method.moe_kernel.fused_experts.process_weights_after_loading(layer)
            return
        halves = (2, -1)  # gate and up, each with its own padding
        w13 = layer.w13_weight.data.unflatten(1, halves)[:, :, :inter, :hidden]
        w13.copy_(self._w13.unflatten(1, halves), non_blocking=True)
        layer.w2_weight.data[:, :hidden, :inter].copy_(self._w2, non_blocking=True)
        self._method.process_weights_after_loading(layer)


FusedWeight = _Linear | _Experts
"""``parts`` are the host copies of one layer's weights, in the type that the model computes with.

``apply`` gives the layer their numbers: call it between two engine steps only.
"""


def local_experts(expert_map: Tensor | None, n: int) -> list[int]:
    """Map each of a layer's ``n`` experts to its index on this worker, -1 if another worker holds it."""
    return list(range(n)) if expert_map is None else [int(i) for i in expert_map.tolist()]


def _host(layer: Any, *shape: int) -> Tensor:
    """Host memory for a copy, pinned where the model computes on a device."""
    on_device = any(p.device.type != "cpu" for p in layer.parameters())
    return torch.zeros(shape, dtype=layer.params_dtype, device="cpu", pin_memory=on_device)


def _parameter(staged: Tensor) -> nn.Parameter:
    """A copy: some of vLLM's kernels keep the memory that they are given, and the next version is staged meanwhile."""
    return nn.Parameter(staged.clone(), requires_grad=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """One ``lora_A`` or ``lora_B`` of the model as one worker holds it.

    ``stacked`` is ``[S, E, max_rank, in_part]`` (A) or ``[S, E, out_part, max_rank]`` (B) for S slots,
    of which this is entry ``index`` of the second dimension, which several experts may share; None where another
    worker holds it (expert parallel). The part is ``start`` onwards of an in- or output dimension that is ``full``
    long (tensor parallel).
    """

    name: str
    stacked: torch.Tensor | None
    index: int
    start: int
    full: int

    @property
    def is_a(self) -> bool:
        return self.name.endswith(LORA_A)

    @property
    def module(self) -> str:
        return self.name.removesuffix(LORA_A).removesuffix(LORA_B)


def adapter_manager(worker: Any) -> LRUCacheLoRAModelManager:
    """Return the manager that owns a worker's slots. ``worker`` is vLLM's, with the extension mixed in."""
    manager = worker.model_runner.lora_manager._adapter_manager
    if not isinstance(manager, LRUCacheLoRAModelManager):
        raise AdapterError(f"vLLM's adapter manager is a {type(manager).__name__}; areal_lora knows vLLM 0.32")
    return manager


def bound_matrices(worker: Any) -> Iterator[Matrix]:
    """Yield every LoRA matrix that a worker can hold, by wire name; modules of other kinds are skipped."""
    manager = adapter_manager(worker)
    if manager.lora_config.fully_sharded_loras:
        raise AdapterError("fully_sharded_loras splits matrices by rank; start vLLM without it")
    # The manager's own names are experts.w1, w2 and w3 where experts share matrices; a wrapped layer adds base_layer.
    packed = process_packed_modules_mapping(manager.model)
    experts = [name.removesuffix(".base_layer") for name in packed.get("experts", [])]
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if isinstance(module, FusedMoEWithLoRA):
            parts = [f"{name.rpartition('.')[0]}.{part}" for part in experts]
        if all(path_of(part) is None for part in parts):
            continue
        if isinstance(module, FusedMoEWithLoRA):
            if isinstance(module, FusedMoE3DWithLoRA) or not module.moe_config.is_act_and_mul:
                log.warning("%s cannot be adapted: its experts are not separate gate, up and down projections", name)
                continue
            yield from _expert_matrices(module, parts)
        elif isinstance(module, BaseLinearLayerWithLoRA):
            yield from _linear_matrices(module, parts)


def _linear_matrices(module: BaseLinearLayerWithLoRA, parts: list[str]) -> Iterator[Matrix]:
    layer = module.base_layer
    sizes, starts, fulls = _rows_of(layer)
    if len(parts) < len(sizes):  # the checkpoint has one projection where others have several
        starts, fulls = [layer.tp_rank * sum(sizes)], [sum(fulls)]
    for part, a, b, start, full in zip(parts, module.lora_a_stacked, module.lora_b_stacked, starts, fulls, strict=True):
        yield Matrix(name=part + LORA_A, stacked=a, index=0, start=_column_of(layer), full=layer.input_size)
        yield Matrix(name=part + LORA_B, stacked=b, index=0, start=start, full=full)


def _expert_matrices(module: FusedMoEWithLoRA, parts: list[str]) -> Iterator[Matrix]:
    """``parts`` are vLLM's names of all experts' gate, down and up projections, expert by expert."""
    inter = module.intermediate_size_per_partition
    full_inter, start_inter = inter * module.tp_size, inter * module.tp_rank
    gate_a, up_a = module.w13_lora_a_stacked
    gate_b, up_b = module.w13_lora_b_stacked
    down_a, down_b = module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]
    wide, narrow = (0, module.hidden_size), (start_inter, full_inter)
    rows = ((gate_a, gate_b, wide, narrow), (down_a, down_b, narrow, wide), (up_a, up_b, wide, narrow))
    local = local_experts(module.base_layer.routed_experts.expert_map, len(parts) // 3)
    for i, part in enumerate(parts):
        a, b, inputs, outputs = rows[i % 3]
        index = local[i // 3]
        for suffix, stacked, (start, full) in ((LORA_A, a, inputs), (LORA_B, b, outputs)):
            held, only = stacked if index >= 0 else None, stacked.shape[1] - 1  # 0 where all experts share it
            yield Matrix(name=part + suffix, stacked=held, index=min(max(index, 0), only), start=start, full=full)


def enable_slots(worker: Any) -> None:
    """Enable every slot in the expert layers, once: tokens use a slot only through an id that is mapped to it.

    Setting the flags at every activation would stall generation for a time that grows with the layers.
    """
    for module in adapter_manager(worker).modules.values():
        if isinstance(module, FusedMoEWithLoRA):
            module.adapter_enabled.fill_(1)


def activate(worker: Any, lora_id: int, slot: int, rank: int) -> None:
    """Serve requests with ``lora_id`` from ``slot``. Call it between two engine steps only.

    vLLM itself loads adapters from files only, and evicts them without a request to do so. Raises AdapterError if the
    slot is in use or vLLM would evict an adapter.
    """
    manager = adapter_manager(worker)
    if manager.lora_index_to_id[slot] is not None or len(manager._registered_adapters) >= manager.capacity:
        raise AdapterError(f"slot {slot} for adapter id {lora_id} is not free: {manager.lora_index_to_id}")
    manager._registered_adapters[lora_id] = LoRAModel(lora_id, rank, {})
    manager._active_adapters[lora_id] = None
    manager.lora_index_to_id[slot] = lora_id


def deactivate(worker: Any, lora_id: int) -> None:
    """Undo ``activate``, if it was done; the slot keeps its numbers until the next write."""
    manager = adapter_manager(worker)
    if lora_id not in manager.lora_index_to_id:
        return
    manager.remove_adapter(lora_id)


def serve_as(worker: Any, ids: Mapping[int, int]) -> None:
    """Have a worker compute requests with an adapter id among ``ids`` as those with the id there.

    ``ids`` may change between two engine steps: requests that run keep their KV cache, and vLLM's scheduler their id.
    """
    manager = worker.model_runner.lora_manager
    plain = manager.set_active_adapters

    def set_active_adapters(requests: set[LoRARequest], mapping: Any) -> None:
        if ids:
            requests = {
                LoRARequest(
                    lora_name=r.lora_name, lora_int_id=ids.get(r.lora_int_id, r.lora_int_id), lora_path=r.lora_path
                )
                for r in requests
            }
            of_tokens, of_samples = (
                tuple(ids.get(i, i) for i in row) for row in (mapping.index_mapping, mapping.prompt_mapping)
            )
            mapping = replace(mapping, index_mapping=of_tokens, prompt_mapping=of_samples)
        plain(requests, mapping)

    manager.set_active_adapters = set_active_adapters


def refuse_files(worker: Any) -> None:
    """Make loading an adapter from a path an error: versions arrive over the wire only."""

    def load(request: Any) -> LoRAModel:
        raise AdapterError(f"adapter {request.lora_name} is in no slot of this worker and cannot be read from a path")

    worker.model_runner.lora_manager._load_adapter = load

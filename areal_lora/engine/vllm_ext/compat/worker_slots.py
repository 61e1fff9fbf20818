"""Access the adapter slots of a vLLM worker, and map adapter ids to slots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    FusedMoE3DWithLoRA,
    FusedMoEWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LRUCacheLoRAModelManager

from areal_lora.engine.vllm_ext.compat.weights import Matrix, local_experts
from areal_lora.errors import AdapterError
from areal_lora.families.registry import path_of
from areal_lora.processes.log import get_logger
from areal_lora.weight_sync.messages import LORA_A, LORA_B

log = get_logger(__name__)


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
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
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
    a_start = module.tp_rank * module.input_size if isinstance(module, RowParallelLinearWithLoRA) else 0
    a_full = module.input_size * (module.tp_size if isinstance(module, RowParallelLinearWithLoRA) else 1)
    if isinstance(module, MergedColumnParallelLinearWithLoRA):
        # Key and value heads are repeated when there are fewer of them than workers: the
        # module's own shard ids define which part is held.
        starts = [shard * size for shard, size in zip(module.output_ids, module.output_slices, strict=True)]
        fulls = list(module.base_layer.output_sizes)
        if isinstance(module, MergedQKVParallelLinearWithLoRA):
            base = module.base_layer
            fulls = [base.total_num_heads * base.head_size] + [base.total_num_kv_heads * base.head_size] * 2
    elif isinstance(module, ColumnParallelLinearWithLoRA):
        starts, fulls = [module.tp_rank * module.output_size], [module.output_size * module.tp_size]
    else:
        starts, fulls = [0], [module.output_size]
    for part, a, b, start, full in zip(parts, module.lora_a_stacked, module.lora_b_stacked, starts, fulls, strict=True):
        yield Matrix(name=part + LORA_A, stacked=a, index=0, start=a_start, full=a_full)
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
            held = stacked if index >= 0 else None
            yield Matrix(name=part + suffix, stacked=held, index=max(index, 0), start=start, full=full)


def enable_slots(worker: Any) -> None:
    """Enable every slot in the expert layers, once: tokens use a slot only through an id that is mapped to it.

    Setting the flags at every activation would stall generation for a time that grows with the layers.
    """
    for module in adapter_manager(worker).modules.values():
        if isinstance(module, FusedMoEWithLoRA):
            module.adapter_enabled.fill_(1)


def activate(worker: Any, lora_id: int, slot: int, rank: int) -> None:
    """Serve requests with ``lora_id`` from ``slot``. Call it between two engine steps only.

    Raises AdapterError if the slot is in use or vLLM would evict an adapter.
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


def in_batch(worker: Any, lora_id: int) -> bool:
    """Whether a request with ``lora_id`` is in the worker's batch: a step that is scheduled may still compute it."""
    return bool(worker.model_runner.input_batch.lora_id_to_request_ids.get(lora_id))


def refuse_files(worker: Any) -> None:
    """Make loading an adapter from a path an error: versions arrive over the wire only."""

    def load(request: Any) -> LoRAModel:
        raise AdapterError(f"adapter {request.lora_name} is in no slot of this worker and cannot be read from a path")

    worker.model_runner.lora_manager._load_adapter = load

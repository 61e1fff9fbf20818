"""Everything that relies on vLLM's private interfaces, written against vLLM 0.32.

=============================  ==================================================================
what                           why
=============================  ==================================================================
``CpuLoraExperts``             with LoRA vLLM picks its Triton experts, which need a GPU
``PackedExperts``              torch's matmul of a few rows is slow; vLLM's own linear layers use the same
``CpuLoraLinear`` (punica)     vLLM's CPU path is slow, and base tokens (-1) read the last slot
``bound_matrices``             where a worker keeps the stacked weights of all adapters
``activate``, ``deactivate``   vLLM loads adapters from files only, and evicts on its own
``own_logprobs``               vLLM's are without the temperature, or after top-p: the trainer's are neither
``hide_llvmlite``              vLLM's scan of all loaded modules stumbles over numba's compiler
=============================  ==================================================================
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import llvmlite.binding.ffi
import numpy as np
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
from vllm import _custom_ops
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
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from areal_lora.engine.vllm_ext.cpu.linear_lora import BatchSlots, add_lora
from areal_lora.engine.vllm_ext.cpu.moe_lora import ExpertAdapters, Spans, moe_lora
from areal_lora.engine.vllm_ext.worker.lora_install import Matrix
from areal_lora.errors import AdapterError
from areal_lora.families.registry import target_of
from areal_lora.processes.log import get_logger
from areal_lora.weight_sync.served import LORA_A, LORA_B

log = get_logger(__name__)

SCORE_TEMPERATURE = "areal_lora_score_temperature"  # in ``SamplingParams.extra_args`` of a request that scores


class CpuLoraLinear(PunicaWrapperCPU):
    """Per-batch adapter slots, and the LoRA of linear layers on CPU."""

    batch = BatchSlots.of(np.empty(0, dtype=np.int64))

    def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any) -> None:
        super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
        self.batch = BatchSlots.of(self.token_lora_indices.numpy())

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Any,
        lora_b_stacked: Any,
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        # Scale is 1: alpha / rank was folded into B when the slot was written.
        add_lora(
            y.view(-1, y.shape[-1]),
            x.view(-1, x.shape[-1]),
            lora_a_stacked,
            lora_b_stacked,
            output_slices,
            self.batch.segments,
        )


class PackedExperts:
    """An ``ExpertProduct`` through vLLM's oneDNN kernels, with a packed copy of W [E, N, K]."""

    MAX_ROWS = 128  # oneDNN builds a kernel per number of rows, some 0.3 ms each, and keeps this many

    def __init__(self, weight: torch.Tensor) -> None:
        self._handlers = [_custom_ops.create_onednn_mm(w.t(), self.MAX_ROWS) for w in weight]
        self._pointers = [h.handler_tensor for h in self._handlers]

    def __call__(self, out: torch.Tensor, x: torch.Tensor, spans: Spans) -> None:
        product = torch.ops._C.onednn_mm.default
        for expert, xs, ys in zip(spans.experts, spans.of(x), spans.of(out), strict=True):
            if xs.shape[0] <= self.MAX_ROWS:
                product(ys, xs, None, self._pointers[expert])
                continue
            parts = -(-xs.shape[0] // self.MAX_ROWS)
            for y_part, x_part in zip(ys.chunk(parts), xs.chunk(parts), strict=True):
                product(y_part, x_part, None, self._pointers[expert])


class CpuLoraExperts(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    """``moe_lora`` as a vLLM experts class; honours ``expert_map`` (expert parallel)."""

    _adapters: ExpertAdapters
    _w1: PackedExperts
    _w2: PackedExperts

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._w1, self._w2 = PackedExperts(layer.w13_weight), PackedExperts(layer.w2_weight)
        for name in ("w13_weight", "w2_weight"):
            # vLLM reads the shapes at every step; one element is enough for that, the packed copy has the rest.
            weight = getattr(layer, name)
            weight.data = weight.data.new_zeros(1, 1, 1).expand(weight.shape)

    def set_lora_context(self, ctx: Any) -> None:
        super().set_lora_context(ctx)
        gate_a, up_a = ctx.w13_lora_a_stacked
        gate_b, up_b = ctx.w13_lora_b_stacked
        self._adapters = ExpertAdapters(
            gate_a=gate_a,
            up_a=up_a,
            gate_b=gate_b,
            up_b=up_b,
            down_a=ctx.w2_lora_a_stacked[0],
            down_b=ctx.w2_lora_b_stacked[0],
        )

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: Any, activation_key: Any) -> bool:
        return weight_key is None and activation_key is None

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: Any,
        a2_scale: Any,
        workspace13: Any,
        workspace2: Any,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        if activation != MoEActivation.SILU or apply_router_weight_on_input:
            raise AdapterError(f"MoE LoRA on CPU knows SwiGLU with weights on the output only, not {activation}")
        ids = topk_ids if expert_map is None else expert_map[topk_ids]
        batch = self._lora_context.punica_wrapper.batch
        group_of = batch.group_of[: topk_ids.shape[0]]
        moe_lora(
            output, hidden_states, self._w1, self._w2, topk_weights, ids.numpy(), self._adapters, batch.groups, group_of
        )


def install_cpu_lora() -> None:
    """Put the two CPU classes in place of vLLM's choices. Repeating it changes nothing."""
    if oracle.backend_to_kernel_cls is _kernel_classes:
        return
    hide_llvmlite()
    global _vllm_kernel_classes
    _vllm_kernel_classes = oracle.backend_to_kernel_cls
    oracle.backend_to_kernel_cls = _kernel_classes
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: f"{__name__}.{CpuLoraLinear.__name__}")


_vllm_kernel_classes = oracle.backend_to_kernel_cls


def _kernel_classes(backend: oracle.UnquantizedMoeBackend) -> list[type[mk.FusedMoEExperts]]:
    # vLLM names TRITON only for layers with LoRA on a CPU.
    return [CpuLoraExperts] if backend == oracle.UnquantizedMoeBackend.TRITON else _vllm_kernel_classes(backend)


def hide_llvmlite() -> None:
    """Let llvmlite's library object have no attributes with underscores.

    It answers every name with a C function, ``__dict__`` too, which vLLM's CPU platform then takes for a namespace
    when it looks through all modules for kernels to replace.
    """
    answer = llvmlite.binding.ffi._lib_wrapper.__getattr__

    def getattr_(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    llvmlite.binding.ffi._lib_wrapper.__getattr__ = getattr_


def adapter_manager(worker: Any) -> LRUCacheLoRAModelManager:
    """The manager that owns a worker's slots. ``worker`` is vLLM's, with the extension mixed in."""
    manager = worker.model_runner.lora_manager._adapter_manager
    if not isinstance(manager, LRUCacheLoRAModelManager):
        raise AdapterError(f"vLLM's adapter manager is a {type(manager).__name__}; areal_lora knows vLLM 0.32")
    return manager


def bound_matrices(worker: Any) -> Iterator[Matrix]:
    """Every LoRA matrix a worker could hold, in the names of the wire; modules of other kinds are left out."""
    manager = adapter_manager(worker)
    if manager.lora_config.fully_sharded_loras:
        raise AdapterError("fully_sharded_loras splits matrices by rank; start vLLM without it")
    for name, module in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if all(target_of(part) is None for part in parts):
            continue
        if isinstance(module, FusedMoEWithLoRA):
            if isinstance(module, FusedMoE3DWithLoRA) or not module.moe_config.is_act_and_mul:
                log.warning("%s cannot be adapted: its experts are not separate gate, up and down projections", name)
                continue
            yield from _expert_matrices(module, parts)
        elif isinstance(module, BaseLinearLayerWithLoRA):
            yield from _linear_matrices(module, parts)


def _linear_matrices(module: BaseLinearLayerWithLoRA, parts: list[str]) -> Iterator[Matrix]:
    a_begin = module.tp_rank * module.input_size if isinstance(module, RowParallelLinearWithLoRA) else 0
    a_full = module.input_size * (module.tp_size if isinstance(module, RowParallelLinearWithLoRA) else 1)
    if isinstance(module, MergedColumnParallelLinearWithLoRA):
        # Key and value heads are repeated when there are fewer of them than workers: the
        # module's own shard ids say which part is held.
        begins = [shard * size for shard, size in zip(module.output_ids, module.output_slices, strict=True)]
        fulls = list(module.base_layer.output_sizes)
        if isinstance(module, MergedQKVParallelLinearWithLoRA):
            base = module.base_layer
            fulls = [base.total_num_heads * base.head_size] + [base.total_num_kv_heads * base.head_size] * 2
    elif isinstance(module, ColumnParallelLinearWithLoRA):
        begins, fulls = [module.tp_rank * module.output_size], [module.output_size * module.tp_size]
    else:
        begins, fulls = [0], [module.output_size]
    for part, a, b, begin, full in zip(parts, module.lora_a_stacked, module.lora_b_stacked, begins, fulls, strict=True):
        yield Matrix(name=part + LORA_A, stacked=a, index=0, begin=a_begin, full=a_full)
        yield Matrix(name=part + LORA_B, stacked=b, index=0, begin=begin, full=full)


def _expert_matrices(module: FusedMoEWithLoRA, parts: list[str]) -> Iterator[Matrix]:
    """``parts`` are vLLM's names of all experts' gate, down and up projections, expert by expert."""
    inter = module.intermediate_size_per_partition
    full_inter, begin_inter = inter * module.tp_size, inter * module.tp_rank
    gate_a, up_a = module.w13_lora_a_stacked
    gate_b, up_b = module.w13_lora_b_stacked
    down_a, down_b = module.w2_lora_a_stacked[0], module.w2_lora_b_stacked[0]
    wide, narrow = (0, module.hidden_size), (begin_inter, full_inter)
    rows = ((gate_a, gate_b, wide, narrow), (down_a, down_b, narrow, wide), (up_a, up_b, wide, narrow))
    local = _local_experts(module)
    for i, part in enumerate(parts):
        a, b, inputs, outputs = rows[i % 3]
        index = local[i // 3]
        for suffix, stacked, (begin, full) in ((LORA_A, a, inputs), (LORA_B, b, outputs)):
            held = stacked if index >= 0 else None
            yield Matrix(name=part + suffix, stacked=held, index=max(index, 0), begin=begin, full=full)


def _local_experts(module: FusedMoEWithLoRA) -> list[int]:
    """For every expert of the layer its index on this worker, -1 if another one holds it."""
    expert_map = module.base_layer.routed_experts.expert_map
    return list(range(module.global_num_experts)) if expert_map is None else expert_map.tolist()


def enable_slots(worker: Any) -> None:
    """Let the expert layers compute with every slot, once for all: only an id mapped to a slot makes tokens use it.

    Setting the flags at every activation would hold up generation for a time that grows with the layers.
    """
    for module in adapter_manager(worker).modules.values():
        if isinstance(module, FusedMoEWithLoRA):
            module.adapter_enabled.fill_(1)


def activate(worker: Any, lora_id: int, slot: int, rank: int) -> None:
    """Let requests with ``lora_id`` use what was written into ``slot``. Between two engine steps only.

    Raises AdapterError where vLLM would evict something or the slot is taken.
    """
    manager = adapter_manager(worker)
    if manager.lora_index_to_id[slot] is not None or len(manager._registered_adapters) >= manager.capacity:
        raise AdapterError(f"slot {slot} for adapter id {lora_id} is not free: {manager.lora_index_to_id}")
    manager._registered_adapters[lora_id] = LoRAModel(lora_id, rank, {})
    manager._active_adapters[lora_id] = None
    manager.lora_index_to_id[slot] = lora_id


def deactivate(worker: Any, lora_id: int) -> None:
    """Undo ``activate``, if it was done; the slot's numbers stay until it is written again."""
    manager = adapter_manager(worker)
    if lora_id not in manager.lora_index_to_id:
        return
    manager.remove_adapter(lora_id)


def own_logprobs(worker: Any) -> None:
    """Make every log-probability that a worker returns log softmax(logits / temperature).

    vLLM computes those of sampled tokens from the raw logits, or after temperature and truncation, and those of
    prompts from the raw logits. The trainer divides by the temperature and truncates nothing.
    """
    runner = worker.model_runner
    if not isinstance(runner, GPUModelRunner):
        raise AdapterError(f"vLLM's model runner is a {type(runner).__name__}; set VLLM_USE_V2_MODEL_RUNNER=0")
    draw = runner.sampler.topk_topp_sampler
    truncated = draw.forward

    def forward(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if k is None and p is None:
            return truncated(logits, generators, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)  # before: truncation is done in place
        sampled, _ = truncated(logits, generators, k, p)
        return sampled, logprobs

    draw.forward = forward
    plain = runner._get_prompt_logprobs_dict

    def scores(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        asked = runner.num_prompt_logprobs
        groups: dict[float, dict[str, int]] = {}
        for request, n in asked.items():
            extra = runner.requests[request].sampling_params.extra_args or {}
            groups.setdefault(float(extra.get(SCORE_TEMPERATURE, 1.0)), {})[request] = n
        found: dict[str, Any] = {}
        try:
            for temperature, group in groups.items():
                runner.num_prompt_logprobs = group
                runner.sampler.compute_logprobs = partial(_tempered, temperature=temperature)
                found |= plain(hidden_states, num_scheduled_tokens)
        finally:
            runner.num_prompt_logprobs, runner.sampler.compute_logprobs = asked, Sampler.compute_logprobs
        for request in asked.keys() - {r for group in groups.values() for r in group}:
            del asked[request]  # vLLM has taken it out of its group: all of its prompt is scored
        return found

    runner._get_prompt_logprobs_dict = scores


def _tempered(logits: torch.Tensor, *, temperature: float) -> torch.Tensor:
    return Sampler.compute_logprobs(logits if temperature == 1.0 else logits / temperature)


def shared_memory_prefix() -> str:
    """How this engine's files in /dev/shm begin (CPU workers share tensors there); empty where there are none."""
    ident = os.environ.get("VLLM_DIST_IDENT", "")
    return f"{ident}-" if ident else ""


def refuse_files(worker: Any) -> None:
    """Make loading an adapter from a path an error: versions come over the wire or not at all."""

    def load(request: Any) -> LoRAModel:
        raise AdapterError(f"adapter {request.lora_name} is in no slot of this worker and cannot be read from a path")

    worker.model_runner.lora_manager._load_adapter = load

"""Replace vLLM's experts class and punica wrapper for LoRA on CPUs."""

from functools import cache, partial
from typing import Any

import llvmlite.binding.ffi
import numpy as np
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
import vllm.model_executor.layers.fused_moe.oracle.unquantized as oracle
from vllm import _custom_ops
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms.cpu import CpuPlatform

from areal_lora.engine.vllm_ext.cpu_lora import BatchSlots, ExpertAdapters, ExpertProduct, Runs, add_lora_rows, moe_lora
from areal_lora.errors import AdapterError
from areal_lora.processes.log import get_logger

log = get_logger(__name__)


class CpuLoraLinear(PunicaWrapperCPU):
    """Per-batch adapter slots, and the LoRA of linear layers on CPU."""

    batch = BatchSlots.of(np.empty(0, dtype=np.int64))

    def update_metadata(self, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any) -> None:
        """vLLM's tables serve its embedding, too, which vLLM's own server adapts (`engine.vllm_ext.stock`)."""
        super().update_metadata(mapping, lora_index_to_id, *args, **kwargs)
        self.batch = BatchSlots.of(self.token_lora_indices.numpy())

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, lora_a_stacked: Any, lora_b_stacked: Any, *args: Any, **kwargs: Any
    ) -> None:
        # Scale is 1: alpha / rank was folded into B when the slot was written.
        rows, cells = self.batch.rows, self.batch.cells
        add_lora_rows(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), rows, cells, lora_a_stacked, lora_b_stacked)

    def add_lora_logits(self, *args: Any, **kwargs: Any) -> None:
        """No adapter has the output layer; vLLM's own fails where prompts of several requests are scored."""


class PackedExperts:
    """An ``ExpertProduct`` through vLLM's oneDNN kernels, with a packed copy of W [E, N, K].

    torch's product of a few rows is slow. Raises RuntimeError if oneDNN has no kernel for this type and CPU.
    """

    MAX_ROWS = 128  # oneDNN builds one kernel per number of rows in about 0.3 ms, and caches this many

    def __init__(self, weight: torch.Tensor) -> None:
        self._width = weight.shape[1]
        self._handlers = [_custom_ops.create_onednn_mm(w.t(), self.MAX_ROWS) for w in weight]

    def __call__(self, x: torch.Tensor, runs: Runs) -> torch.Tensor:
        out = x.new_empty(len(x), self._width)
        for expert, rows in runs:
            for y_part, x_part in zip(out[rows].split(self.MAX_ROWS), x[rows].split(self.MAX_ROWS), strict=True):
                torch.ops._C.onednn_mm.default(y_part, x_part, None, self._handlers[expert].handler_tensor)
        return out


def plain_product(weight: torch.Tensor, x: torch.Tensor, runs: Runs) -> torch.Tensor:
    """In float32 through torch, for CPUs with AVX2 only: there oneDNN has no bfloat16, and torch's is slower."""
    return torch.cat([x[rows].float() @ weight[expert].float().t() for expert, rows in runs]).to(x.dtype)


def expert_product(weight: torch.Tensor) -> ExpertProduct:
    """Multiply by ``weight`` [E, N, K], through oneDNN if it has a kernel for this type on this CPU."""
    try:
        return PackedExperts(weight)
    except RuntimeError as e:
        _warn_of_plain_experts(str(weight.dtype).removeprefix("torch."), str(e))
        return partial(plain_product, weight.detach())


@cache
def _warn_of_plain_experts(dtype: str, why: str) -> None:
    log.warning(
        "oneDNN has no products of %s on this CPU (%s); experts take 1.3 to 3.5 times as long as with "
        "model.dtype=float32, and linear layers longer, too",
        dtype,
        why,
    )


NO_GROUPS = np.array([-1])  # of tokens without an adapter


class CpuLoraExperts(LoRAExpertsMixin, mk.FusedMoEExpertsModular):
    """``moe_lora`` as a vLLM experts class, whose own with LoRA need a GPU; honours ``expert_map`` (expert parallel).

    vLLM sets a LoRA context only where the configured modules hold experts. Without one the experts are the base's.
    """

    _adapters: ExpertAdapters | None = None
    _w1: ExpertProduct
    _w2: ExpertProduct

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self._w1, self._w2 = expert_product(layer.w13_weight), expert_product(layer.w2_weight)
        for name in ("w13_weight", "w2_weight"):
            # vLLM reads the shapes at every step; one element is enough for that, the packed copy has the rest.
            weight = getattr(layer, name)
            weight.data = weight.data.new_zeros(1, 1, 1).expand(weight.shape)

    def set_lora_context(self, ctx: Any) -> None:
        super().set_lora_context(ctx)
        (gate_a, up_a), (gate_b, up_b) = ctx.w13_lora_a_stacked, ctx.w13_lora_b_stacked
        (down_a,), (down_b,) = ctx.w2_lora_a_stacked, ctx.w2_lora_b_stacked
        self._adapters = ExpertAdapters(
            gate_a=gate_a, up_a=up_a, gate_b=gate_b, up_b=up_b, down_a=down_a, down_b=down_b
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
    def _supports_activation(activation: Any) -> bool:
        return bool(activation.value == "silu")

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Any) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    def workspace_shapes(
        self, M: int, N: int, K: int, *others: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """``others``, ``global_num_experts`` among them, decide no shape here."""
        return (0,), (0,), (M, K)

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduceNoOP:
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        *,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        **others: Any,
    ) -> None:
        if activation.value != "silu" or apply_router_weight_on_input:
            raise AdapterError(f"MoE LoRA on CPU knows SwiGLU with weights on the output only, not {activation}")
        ids = (topk_ids if expert_map is None else expert_map[topk_ids]).long().numpy()
        groups, group_of = NO_GROUPS, np.zeros(len(ids), dtype=np.int64)
        if self._lora_context is not None:
            batch = self._lora_context.punica_wrapper.batch
            groups, group_of = batch.groups, batch.group_of[: len(ids)]
        made = moe_lora(hidden_states, self._w1, self._w2, topk_weights, ids, self._adapters, groups, group_of)
        output.copy_(made)


def install_cpu_lora() -> None:
    """Put these classes and functions in place of vLLM's choices. Idempotent."""
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
    """Hide attributes with underscores of llvmlite's library object.

    The object answers every name with a C function, also ``__dict__``. vLLM's CPU platform takes that for a
    namespace when it searches all modules for kernels to replace.
    """
    answer = llvmlite.binding.ffi._lib_wrapper.__getattr__

    def getattr_(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return answer(self, name)

    llvmlite.binding.ffi._lib_wrapper.__getattr__ = getattr_

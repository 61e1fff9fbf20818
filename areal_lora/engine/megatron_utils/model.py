"""The frozen base model: a Hugging Face folder as this rank's Megatron module.

Bridge 0.3 has no Mixtral and no Qwen2-MoE, reads neither the rope theta of transformers 5 nor the list of
dense layers, and gives every expert-parallel rank the first experts. Therefore `model` takes the sizes
from config.json, `megatron_model` loads the weights, and Bridge builds the model only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.base import DTYPES
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.megatron_utils.base_weights import architecture
from areal_lora.engine.megatron_utils.cpu_patches import exchange_tokens
from areal_lora.engine.megatron_utils.modules import GroupedExperts, PackedAttention, Packing, Rotary, follow_tokens
from areal_lora.platforms.device import collective_of


def build_model(
    model: ModelConfig, trainer: TrainerConfig, layout: ParallelLayout, hf: Mapping[str, Any], device: torch.device
) -> tuple[nn.Module, Packing]:
    """This rank's part of the model, weights not loaded, and its attention plans.

    Parallel state must be initialised.
    """
    dtype = DTYPES[model.dtype]
    provider = GPTModelProvider(
        **architecture(hf), **_parallel(trainer, layout, dtype), **_numerics(trainer, on_cpu=device.type == "cpu")
    )
    provider.finalize()
    module: nn.Module = provider.provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    )
    module = module.to(device=device, dtype=dtype)
    if trainer.recompute and parallel_state.is_pipeline_first_stage():
        # Megatron recomputes a block only if its input wants a gradient; embeddings are frozen.
        module.get_submodule("embedding").register_forward_hook(
            lambda _module, _args, output: output.detach().requires_grad_(torch.is_grad_enabled())
        )
    # Losses arrive as plain sums; with this set the schedule divides by nothing.
    config: Any = module.config
    config.calculate_per_token_loss = True
    config.variable_seq_lengths = False
    rotary = RotaryEmbedding(  # Megatron's own, with its scaling of long contexts
        provider.kv_channels,
        rotary_percent=1.0,
        rotary_base=provider.rotary_base,
        rope_scaling=provider.rope_scaling,
        rope_scaling_factor=provider.rope_scaling_factor,
        use_cpu_initialization=True,
    )
    packing = Packing(Rotary(rotary.inv_freq.to(device), dtype))
    if device.type == "cpu":
        exchange_tokens(module)
    follow_tokens(module)
    return module, packing


def _parallel(trainer: TrainerConfig, layout: ParallelLayout, dtype: torch.dtype) -> dict[str, Any]:
    stages = [["decoder"] * count for count in layout.stage_layers]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {
        "tensor_model_parallel_size": trainer.tp,
        "pipeline_model_parallel_size": trainer.pp,
        "pipeline_model_parallel_layout": stages if trainer.pp > 1 else None,
        "expert_model_parallel_size": trainer.ep,
        "expert_tensor_parallel_size": trainer.etp,
        "sequence_parallel": trainer.tp > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
    }


def _numerics(trainer: TrainerConfig, *, on_cpu: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "make_vocab_size_divisible_by": 1,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # The router is frozen and no auxiliary loss may leak into the adapters' gradients.
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "transformer_layer_spec": partial(_layers, on_cpu=on_cpu),
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": True,
        # Every weight is read from the folder.
        "perform_initialization": False,
    }
    if trainer.recompute:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if on_cpu:
        # No fused kernels; `exchange_tokens` replaces the dispatcher.
        fused = (
            "bias_activation_fusion",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "cross_entropy_loss_fusion",
            "moe_permute_fusion",
            "apply_rope_fusion",
            "persist_layer_norm",
        )
        fields |= dict.fromkeys(fused, False) | {
            "use_cpu_initialization": True,
            "moe_token_dispatcher_type": "allgather",
        }
    return fields


def _layers(config: GPTModelProvider, *, on_cpu: bool) -> Any:
    """Attention over packed token trees, and grouped experts with LoRA inside."""
    norm = {"normalization": "RMSNorm"} if on_cpu else {}
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=not on_cpu, **norm)
    for layer in block.layer_specs:
        parts = layer.submodules
        parts.self_attention.submodules.core_attention = PackedAttention
        if "experts" in vars(parts.mlp.submodules):
            parts.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    return block


def initialize_parallel(
    trainer: TrainerConfig, device: torch.device, seed: int = 0
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create the groups of ``trainer``'s layout; joins the world from the environment unless the caller has.

    Returns this rank's tensor-parallel group and expert-tensor-parallel group.
    """
    if not dist.is_initialized():
        dist.init_process_group(collective_of(device))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=trainer.tp,
        pipeline_model_parallel_size=trainer.pp,
        expert_model_parallel_size=trainer.ep,
        expert_tensor_parallel_size=trainer.etp,
    )
    model_parallel_cuda_manual_seed(seed)
    return parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()

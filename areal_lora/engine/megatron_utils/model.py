"""The frozen base model: Hugging Face folder to this rank's Megatron shard, right under expert parallelism."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from safetensors import safe_open
from torch import Tensor, nn

from areal_lora.config.models import ModelConfig, TrainerConfig
from areal_lora.engine.megatron_utils.layout import Layout
from areal_lora.errors import UnknownTensorError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(model: ModelConfig, trainer: TrainerConfig, layout: Layout, device: torch.device) -> nn.Module:
    """This rank's part of the model with its weights loaded. Parallel state must be initialised."""
    dtype = DTYPES[model.dtype]
    bridge = AutoBridge.from_hf_pretrained(model.path, dtype=dtype)
    provider = bridge.to_megatron_provider(load_weights=False)
    _set_parallel(provider, trainer, dtype)
    if device.type == "cpu":
        _set_cpu(provider, layout)
    provider.finalize()
    module = provider.provide(
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage()
    )
    module = module.to(device=device, dtype=dtype)
    bridge.load_hf_weights([module])
    if layout.experts:
        load_experts(module, model.path, layout, parallel_state.get_expert_model_parallel_rank())
    # Losses arrive as plain sums; with this set the schedule divides by nothing.
    module.config.calculate_per_token_loss = True
    module.config.variable_seq_lengths = False
    return module


def _set_parallel(provider: Any, trainer: TrainerConfig, dtype: torch.dtype) -> None:
    provider.tensor_model_parallel_size = trainer.tp
    provider.pipeline_model_parallel_size = trainer.pp
    provider.expert_model_parallel_size = trainer.ep
    provider.expert_tensor_parallel_size = trainer.etp
    provider.sequence_parallel = trainer.tp > 1
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, False
    provider.make_vocab_size_divisible_by = 1
    provider.gradient_accumulation_fusion = False
    # The router is frozen and no auxiliary loss may leak into the adapters' gradients.
    provider.moe_router_load_balancing_type, provider.moe_aux_loss_coeff = "none", 0.0
    # One module per expert: the layout `per_expert` at every expert-parallel size.
    provider.moe_grouped_gemm = False
    provider.hidden_dropout = provider.attention_dropout = 0.0
    if trainer.recompute:
        provider.recompute_granularity, provider.recompute_method, provider.recompute_num_layers = "full", "uniform", 1


def _set_cpu(provider: Any, layout: Layout) -> None:
    """Plain torch layers, no fused kernels, and the token dispatcher whose collectives gloo accepts."""
    provider.transformer_layer_spec = get_gpt_layer_local_spec(
        num_experts=layout.experts or None, moe_grouped_gemm=False, qk_layernorm=provider.qk_layernorm,
        normalization="RMSNorm",
    )
    provider.moe_token_dispatcher_type = "allgather"
    provider.use_cpu_initialization = True
    provider.bias_activation_fusion = provider.bias_dropout_fusion = False
    provider.masked_softmax_fusion = provider.cross_entropy_loss_fusion = False
    provider.moe_permute_fusion = provider.apply_rope_fusion = provider.persist_layer_norm = False


_EXPERT = re.compile(r"decoder\.layers\.(\d+)\.mlp\.experts\.local_experts\.(\d+)\.(linear_fc1|linear_fc2)\.weight$")


def load_experts(module: nn.Module, path: str, layout: Layout, ep_rank: int) -> None:
    """Read this rank's experts from the safetensors files.

    Bridge 0.3 gives every expert-parallel rank the first experts when each expert is a module
    of its own. Raises UnknownTensorError for a missing tensor or an expert nobody loads.
    """
    index = _weight_index(path)
    first_layer = parallel_state.get_pipeline_model_parallel_rank() * layout.layers_per_stage
    loaded = 0
    for name, parameter in module.named_parameters():
        found = _EXPERT.search(name)
        if found is None:
            continue
        layer, expert = first_layer + int(found[1]), ep_rank * layout.experts_per_rank + int(found[2])
        base = f"model.layers.{layer}.mlp.experts.{expert}"
        if found[3] == "linear_fc1":
            whole = [_read(index, f"{base}.{part}_proj.weight") for part in ("gate", "up")]
            dim = 0
        else:
            whole, dim = [_read(index, f"{base}.down_proj.weight")], 1
        etp, rank = layout.etp, parallel_state.get_expert_tensor_parallel_rank()
        with torch.no_grad():
            parameter.copy_(torch.cat([w.chunk(etp, dim)[rank] for w in whole], dim=0 if dim == 0 else 1))
        loaded += 1
    expected = 2 * layout.layers_per_stage * layout.experts_per_rank
    if loaded != expected:
        raise UnknownTensorError(f"{path}: loaded {loaded} expert tensors on this rank, expected {expected}")


def _weight_index(path: str) -> dict[str, Path]:
    """Which file of the folder holds which tensor."""
    index: dict[str, Path] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            index |= dict.fromkeys(tensors.keys(), file)
    return index


def _read(index: dict[str, Path], name: str) -> Tensor:
    if name not in index:
        raise UnknownTensorError(f"model tensor {name} is in no safetensors file of the model folder")
    with safe_open(index[name], framework="pt") as tensors:
        return tensors.get_tensor(name)

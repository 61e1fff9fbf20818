"""vLLM's LoRA layers for GPUs, built around base layers that have sizes only: one worker of a pretended group."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

ATTENTION, DENSE, MOE = "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.mlp.experts"
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    hidden: int = 16
    head: int = 4
    heads: int = 8
    kv_heads: int = 2
    ffn: int = 24
    experts: int = 8
    expert_ffn: int = 8
    max_rank: int = 4
    slots: int = 3
    shared_outer: bool = False
    """Of the slots: what the experts of `ExpertLayout.SHARED_OUTER` have in common is there once."""


def base(kind: Any, **values: Any) -> Any:
    """A base layer of vLLM that has sizes and an empty weight, and no parallel state behind it."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.weight = torch.empty(0)
    for name, value in values.items():
        setattr(layer, name, value)
    return layer


def dense_modules(sizes: LayerSizes, tp: int, rank: int) -> dict[str, Any]:
    from vllm.lora import layers
    from vllm.model_executor.layers import linear

    size: dict[str, Any] = {"tp_size": tp, "tp_rank": rank}
    copies = max(1, tp // sizes.kv_heads)
    local = {
        "num_heads": sizes.heads // tp,
        "num_kv_heads": max(1, sizes.kv_heads // tp),
        "num_kv_head_replicas": copies,
    }
    qkv = base(
        linear.QKVParallelLinear,
        input_size=sizes.hidden,
        head_size=sizes.head,
        total_num_heads=sizes.heads,
        total_num_kv_heads=sizes.kv_heads,
        # of all workers, copies of key and value heads included
        output_sizes=[sizes.heads * sizes.head, *[local["num_kv_heads"] * sizes.head * tp] * 2],
        output_size_per_partition=(local["num_heads"] + 2 * local["num_kv_heads"]) * sizes.head,
        **local,
        **size,
    )
    gate_up = base(
        linear.MergedColumnParallelLinear,
        input_size=sizes.hidden,
        output_sizes=[sizes.ffn, sizes.ffn],
        output_partition_sizes=[sizes.ffn // tp] * 2,
        output_size_per_partition=2 * sizes.ffn // tp,
        **size,
    )
    rows = {
        name: base(
            linear.RowParallelLinear,
            input_size=n_in,
            input_size_per_partition=n_in // tp,
            output_size=sizes.hidden,
            **size,
        )
        for name, n_in in ((f"{ATTENTION}.o_proj", sizes.heads * sizes.head), (f"{DENSE}.down_proj", sizes.ffn))
    }
    column = base(
        linear.ColumnParallelLinear,
        input_size=sizes.hidden,
        output_size=sizes.ffn,
        output_size_per_partition=sizes.ffn // tp,
        **size,
    )
    return {
        f"{ATTENTION}.qkv_proj": layers.MergedQKVParallelLinearWithLoRA(qkv),
        f"{DENSE}.gate_up_proj": layers.MergedColumnParallelLinearWithLoRA(gate_up),
        "model.layers.2.mlp.up_proj": layers.ColumnParallelLinearWithLoRA(column),
        **{name: layers.RowParallelLinearWithLoRA(row) for name, row in rows.items()},
    }


def expert_module(sizes: LayerSizes, kind: str, tp: int, ep: int, rank: int) -> Any:
    from vllm.lora import layers

    held, local = (
        sizes.experts // ep,
        range(rank * sizes.experts // ep, (rank + 1) * sizes.experts // ep) if ep > 1 else range(sizes.experts),
    )
    mapped = torch.tensor([e - local.start if e in local else -1 for e in range(sizes.experts)])
    module = getattr(layers, kind).__new__(getattr(layers, kind))
    nn.Module.__init__(module)
    module.moe_config = SimpleNamespace(
        hidden_dim=sizes.hidden,
        num_experts=sizes.experts,
        num_local_experts=held,
        intermediate_size_per_partition=sizes.expert_ffn // tp,
        is_act_and_mul=True,
        moe_parallel_config=SimpleNamespace(use_ep=ep > 1, ep_rank=rank if ep > 1 else 0),
    )
    module.base_layer = SimpleNamespace(routed_experts=SimpleNamespace(expert_map=mapped if ep > 1 else None))
    module.tp_size, module.tp_rank, module.device = tp, rank if tp > 1 else 0, torch.device("cpu")
    module.enable_moe_shared_loras, module._w13_slices = False, 1 if "3D" in kind else 2
    return module


def packed_modules(experts: int) -> dict[str, list[str]]:
    """Modules of the adapter in each layer that joins several."""
    return {
        f"{ATTENTION}.qkv_proj": [f"{ATTENTION}.{x}_proj" for x in "qkv"],
        f"{DENSE}.gate_up_proj": [f"{DENSE}.gate_proj", f"{DENSE}.up_proj"],
        MOE: [f"{MOE}.{e}.{x}_proj" for e in range(experts) for x in ("gate", "down", "up")],
    }


def lora_config(sizes: LayerSizes, dtype: torch.dtype) -> Any:
    """vLLM's settings of stacks."""
    return SimpleNamespace(
        max_lora_rank=sizes.max_rank,
        max_loras=sizes.slots,
        max_cpu_loras=sizes.slots,
        lora_dtype=dtype,
        fully_sharded_loras=False,
        enable_moe_shared_loras=sizes.shared_outer,
        specialize_active_lora=False,
    )


def made(sizes: LayerSizes, modules: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """``modules`` with empty stacks."""
    config = lora_config(sizes, dtype)
    model = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
    for module in modules.values():
        module.create_lora_weights(sizes.slots, config, model)
    return modules


def worker_with(modules: dict[str, Any], packed: dict[str, list[str]]) -> Any:
    """As vLLM has it: the experts' names are those of wrapped layers, and those of the manager of three stacks."""
    from vllm.lora.model_manager import LRUCacheLoRAModelManager

    model, layer = nn.Module(), MOE.removesuffix("experts")
    model.packed_modules_mapping = {"experts": [f"{name.removeprefix(layer)}.base_layer" for name in packed[MOE]]}
    if modules[MOE].enable_moe_shared_loras:
        packed = packed | {MOE: [f"{MOE}.{stack}" for stack in ("w1", "w2", "w3")]}

    class Manager(LRUCacheLoRAModelManager):
        def __init__(self) -> None:
            self.model, self.modules, self.packed_modules = model, modules, packed
            self.lora_config = SimpleNamespace(fully_sharded_loras=False)

    return SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=Manager())))


def stacks(module: Any) -> list[torch.Tensor]:
    names = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
    groups = [getattr(module, name) for name in names] if hasattr(module, names[0]) else None
    return [t for group in groups or (module.lora_a_stacked, module.lora_b_stacked) for t in group]

"""What a worker of a pretended tensor or expert parallel group writes, against vLLM's own slicing.

vLLM's LoRA layers for GPUs are built around base layers that have sizes only. The same numbered adapter is given to
``set_lora`` and written by us; all stacks must agree bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from areal_lora.errors import AdapterError
from areal_lora.types import AdapterSpec
from tests.support.engine.vllm_ext.slots import install, layout_of
from tests.support.lazy import Lazy

lora_install = Lazy("areal_lora.engine.vllm_ext.worker.lora_install")

pytestmark = pytest.mark.slow  # importing vLLM

HIDDEN, HEAD, HEADS, KV_HEADS, FFN, EXPERTS, EXPERT_FFN = 16, 4, 8, 2, 24, 8, 8
MAX_RANK, RANK, SLOTS, SLOT = 4, 3, 3, 1
ATTENTION, DENSE, MOE = "model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.mlp.experts"
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def base(kind: Any, **sizes: Any) -> Any:
    """A base layer of vLLM that has sizes and an empty weight, and no parallel state behind it."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.weight = torch.empty(0)
    for name, value in sizes.items():
        setattr(layer, name, value)
    return layer


def dense_modules(tp: int, rank: int) -> dict[str, Any]:
    from vllm.lora import layers
    from vllm.model_executor.layers import linear

    size: dict[str, Any] = {"tp_size": tp, "tp_rank": rank}
    copies = max(1, tp // KV_HEADS)
    local = {"num_heads": HEADS // tp, "num_kv_heads": max(1, KV_HEADS // tp), "num_kv_head_replicas": copies}
    qkv = base(
        linear.QKVParallelLinear,
        input_size=HIDDEN,
        head_size=HEAD,
        total_num_heads=HEADS,
        total_num_kv_heads=KV_HEADS,
        # of all workers, copies of key and value heads included
        output_sizes=[HEADS * HEAD, *[local["num_kv_heads"] * HEAD * tp] * 2],
        output_size_per_partition=(local["num_heads"] + 2 * local["num_kv_heads"]) * HEAD,
        **local,
        **size,
    )
    gate_up = base(
        linear.MergedColumnParallelLinear,
        input_size=HIDDEN,
        output_sizes=[FFN, FFN],
        output_size_per_partition=2 * FFN // tp,
        **size,
    )
    rows = {
        name: base(
            linear.RowParallelLinear, input_size=n_in, input_size_per_partition=n_in // tp, output_size=HIDDEN, **size
        )
        for name, n_in in ((f"{ATTENTION}.o_proj", HEADS * HEAD), (f"{DENSE}.down_proj", FFN))
    }
    column = base(linear.ColumnParallelLinear, input_size=HIDDEN, output_size_per_partition=FFN // tp, **size)
    return {
        f"{ATTENTION}.qkv_proj": layers.MergedQKVParallelLinearWithLoRA(qkv),
        f"{DENSE}.gate_up_proj": layers.MergedColumnParallelLinearWithLoRA(gate_up),
        "model.layers.2.mlp.up_proj": layers.ColumnParallelLinearWithLoRA(column),
        **{name: layers.RowParallelLinearWithLoRA(row) for name, row in rows.items()},
    }


def expert_module(kind: str, tp: int, ep: int, rank: int) -> Any:
    from vllm.lora import layers

    held, local = EXPERTS // ep, range(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep) if ep > 1 else range(EXPERTS)
    mapped = torch.tensor([e - local.start if e in local else -1 for e in range(EXPERTS)])
    module = getattr(layers, kind).__new__(getattr(layers, kind))
    nn.Module.__init__(module)
    module.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        num_experts=EXPERTS,
        num_local_experts=held,
        intermediate_size_per_partition=EXPERT_FFN // tp,
        is_act_and_mul=True,
        moe_parallel_config=SimpleNamespace(use_ep=ep > 1, ep_rank=rank if ep > 1 else 0),
    )
    module.base_layer = SimpleNamespace(routed_experts=SimpleNamespace(expert_map=mapped if ep > 1 else None))
    module.tp_size, module.tp_rank, module.device = tp, rank if tp > 1 else 0, torch.device("cpu")
    module.enable_moe_shared_loras, module._w13_slices = False, 1 if "3D" in kind else 2
    return module


PACKED = {
    f"{ATTENTION}.qkv_proj": [f"{ATTENTION}.{x}_proj" for x in "qkv"],
    f"{DENSE}.gate_up_proj": [f"{DENSE}.gate_proj", f"{DENSE}.up_proj"],
    MOE: [f"{MOE}.{e}.{x}_proj" for e in range(EXPERTS) for x in ("gate", "down", "up")],
}


def made(modules: dict[str, Any]) -> dict[str, Any]:
    """``modules`` with empty stacks."""
    config = SimpleNamespace(
        max_lora_rank=MAX_RANK,
        max_loras=SLOTS,
        lora_dtype=torch.float32,
        fully_sharded_loras=False,
        enable_moe_shared_loras=False,
    )
    model = SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])
    for module in modules.values():
        module.create_lora_weights(SLOTS, config, model)
    return modules


def worker_with(modules: dict[str, Any]) -> Any:
    from vllm.lora.model_manager import LRUCacheLoRAModelManager

    class Manager(LRUCacheLoRAModelManager):
        def __init__(self) -> None:
            self.modules, self.packed_modules = modules, PACKED
            self.lora_config = SimpleNamespace(fully_sharded_loras=False)

    return SimpleNamespace(model_runner=SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=Manager())))


def stacks(module: Any) -> list[torch.Tensor]:
    names = ("w13_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_a_stacked", "w2_lora_b_stacked")
    groups = [getattr(module, name) for name in names] if hasattr(module, names[0]) else None
    return [t for group in groups or (module.lora_a_stacked, module.lora_b_stacked) for t in group]


def set_as_vllm(modules: dict[str, Any], full: dict[str, np.ndarray], ep: int, ep_rank: int) -> None:
    """What vLLM's manager does with a loaded adapter: pack, keep the experts of this worker, ``set_lora``."""
    for name, module in modules.items():
        parts = PACKED.get(name, [name])
        a, b = ([torch.from_numpy(full[f"{p}.lora_{x}.weight"]) for p in parts] for x in "AB")
        if name == MOE:
            held = slice(ep_rank * EXPERTS // ep, (ep_rank + 1) * EXPERTS // ep)
            a, b = ([torch.stack(x[i::3])[held] for i in range(3)] for x in (a, b))
            module.set_lora(SLOT, a, b)
        elif len(parts) == 1:
            module.set_lora(SLOT, a[0], b[0])
        else:
            module.set_lora(SLOT, a, b)


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """No two elements of an adapter are equal."""
    found, at = {}, 1
    for name, shape in shapes.items():
        n = int(np.prod(shape))
        found[name] = np.arange(at, at + n, dtype=np.float32).reshape(shape)
        at += n
    assert at < 2**24
    return found


def all_modules(tp: int, ep: int, rank: int) -> dict[str, Any]:
    return {**dense_modules(tp, rank), MOE: expert_module("FusedMoEWithLoRA", 1 if ep > 1 else tp, ep, rank)}


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4)])
def test_every_worker_holds_what_vllm_would_slice(tp: int, ep: int) -> None:
    from areal_lora.engine.vllm_ext.compat.weights import bound_matrices

    spec = AdapterSpec(name="a", base_model="m", rank=RANK, alpha=RANK, target_modules=TARGETS)
    for rank in range(tp):
        ours, theirs = made(all_modules(tp, ep, rank)), made(all_modules(tp, ep, rank))
        writer = lora_install.StackedSlotWriter(bound_matrices(worker_with(ours)), MAX_RANK)
        full = numbered(writer.expected(spec))
        assert len(full) == 2 * (8 + 3 * EXPERTS), "q k v o, gate up down, one plain column, the experts"
        install(writer, SLOT, layout_of(full, spec), full)
        set_as_vllm(theirs, full, ep, rank if ep > 1 else 0)
        for name in ours:
            for mine, reference in zip(stacks(ours[name]), stacks(theirs[name]), strict=True):
                assert torch.equal(mine, reference), f"{name} on worker {rank} of {tp}"
                assert mine[SLOT].abs().max() > 0
                assert mine[[0, 2]].abs().max() == 0


def test_fused_experts_in_one_tensor_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """``FusedMoE3DWithLoRA`` holds gate and up in one matrix per expert, in an order that depends on the model."""
    from areal_lora.engine.vllm_ext.compat.weights import bound_matrices

    module = made({MOE: expert_module("FusedMoE3DWithLoRA", 2, 1, 0)})
    assert list(bound_matrices(worker_with(module))) == []
    with pytest.raises(AdapterError):
        lora_install.StackedSlotWriter(bound_matrices(worker_with(module)), MAX_RANK)

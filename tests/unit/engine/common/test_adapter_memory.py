"""The initial adapter: a pure part of the engine."""

from __future__ import annotations

import torch

from areal_lora.engine.common.adapter_memory import initial_tensor
from areal_lora.weight_sync.layout import WireTensor


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first = WireTensor("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 64), 0)
    second = WireTensor("model.layers.1.self_attn.q_proj.lora_A.weight", (4, 64), 1024)
    moved = WireTensor(first.name, first.shape, 4096)
    assert torch.equal(initial_tensor(first, 1), initial_tensor(moved, 1))
    assert not torch.equal(initial_tensor(first, 1), initial_tensor(second, 1))
    assert not torch.equal(initial_tensor(first, 1), initial_tensor(first, 2))
    assert not initial_tensor(WireTensor("model.layers.0.self_attn.q_proj.lora_B.weight", (64, 4), 0), 1).any()

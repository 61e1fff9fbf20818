"""FLOPs by formula against what torch counts of transformers' models with PEFT's adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import PassSizes
from areal_lora.types import AdapterStructure
from tests.support.lazy import Lazy

peft = Lazy("peft")

RANK, TOKENS = 3, 12
DENSE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "tie_word_embeddings": False,
}
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "mlp_only_layers": [0],
}
# No fused layer, whose lora_A serves several projections: PEFT has no such adapter.
STRUCTURE = AdapterStructure(rank=RANK, alpha=1.0, target_modules=("linear_proj",))


def counted(model: dict[str, Any], *, adapted: bool) -> tuple[int, int]:
    """Forward and backward, of `TOKENS` tokens in one sequence; eager attention computes all pairs."""
    kind = str(model["model_type"])
    config = AutoConfig.for_model(kind, **{k: v for k, v in model.items() if k != "model_type"})
    base: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    base.requires_grad_(False)
    if adapted:
        base = peft.get_peft_model(base, peft.LoraConfig(r=RANK, target_modules=["o_proj"]))
    embedded = torch.randn(1, TOKENS, int(model["hidden_size"]), requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        logits = base(inputs_embeds=embedded, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("adapted", [False, True])
def test_torch_counts_the_same(model: dict[str, Any], adapted: bool) -> None:
    torch.manual_seed(0)
    sizes = PassSizes.of(ModelShape.from_hf(model), STRUCTURE if adapted else None)
    forward, backward = counted(model, adapted=adapted)
    assert sizes.forward(TOKENS, TOKENS**2) == forward
    assert sizes.training(TOKENS, TOKENS**2) == forward + backward
    unread = int(model["hidden_size"]) * int(model["vocab_size"])
    assert sizes.training(TOKENS, TOKENS**2) - sizes.training(TOKENS, TOKENS**2, TOKENS - 1) == 4 * unread


def test_recompute_leaves_out_the_output_layer_and_a_critic_has_none() -> None:
    shape = ModelShape.from_hf(SPARSE)
    sizes = PassSizes.of(shape, STRUCTURE)
    assert sizes.forward(7, 28) - sizes.recompute(7, 28) == 2 * 7 * 16 * 40
    critic = AdapterStructure(rank=RANK, alpha=1.0, target_modules=STRUCTURE.target_modules, value_head=True)
    assert PassSizes.of(shape, critic).output == 16


def test_a_fused_layer_has_one_lora_a_and_every_chosen_expert_an_adapter() -> None:
    """The sizes of a sparse layer by hand: qkv 16 -> 64, fc1 16 -> 24, fc2 12 -> 16."""
    targets = ("linear_qkv", "expert.linear_fc1", "expert.linear_fc2")
    structure = AdapterStructure(
        rank=RANK, alpha=1.0, target_modules=targets, rank_pattern=(("self_attn.q_proj", 2 * RANK),)
    )
    sizes = PassSizes.of(ModelShape.from_hf(SPARSE), structure)
    assert sizes.adapter == 2 * 2 * RANK * (16 + 64) + 2 * RANK * ((16 + 24) + (12 + 16))

"""What a refusal of router, embeddings and output layer says about vLLM, against vLLM's own classes."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lora.families.family import Family
from areal_lora.families.registry import TABLE

pytestmark = pytest.mark.slow  # importing vLLM

MODELS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}


def bare(kind: Any) -> Any:
    """A layer that has a class and nothing else."""
    return object.__new__(kind)


def wraps(layer: Any, name: str, supported: list[str]) -> bool:
    """Whether vLLM's manager replaces ``layer`` by one with LoRA."""
    from vllm.lora.utils import _all_lora_classes, is_supported_lora_module

    config = SimpleNamespace(fully_sharded_loras=False)
    return is_supported_lora_module(name, layer, supported) and any(
        kind.can_replace_layer(source_layer=layer, lora_config=config, packed_modules_list=[], model_config=None)
        for kind in _all_lora_classes
    )


@pytest.mark.parametrize("family", TABLE, ids=lambda f: f.model_type)
def test_embeddings_are_served_where_the_models_class_names_them(family: Family) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    model = getattr(import_module(f"vllm.model_executor.models.{family.model_type}"), MODELS[family.model_type])
    named = list(getattr(model, "embedding_modules", None) or ())
    found = wraps(bare(VocabParallelEmbedding), "model.embed_tokens", named)
    assert found == family.vllm_embeddings
    assert ("lm_head" in named) == family.vllm_embeddings, "vLLM wraps its logits processor beside lm_head"


@pytest.mark.parametrize("family", [f for f in TABLE if f.experts], ids=lambda f: f.model_type)
def test_routers_are_linear_layers_that_vllm_wraps(family: Family) -> None:
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
    from vllm.model_executor.layers.linear import ReplicatedLinear

    source = inspect.getsource(import_module(f"vllm.model_executor.models.{family.model_type}"))
    assert "self.gate = GateLinear(" in source
    assert wraps(bare(GateLinear), "model.layers.0.mlp.gate", ["gate"])
    assert wraps(bare(ReplicatedLinear), "model.layers.0.mlp.shared_expert_gate", ["shared_expert_gate"])
    assert family.experts is not None
    if family.experts.shared is not None:
        assert "self.shared_expert_gate = ReplicatedLinear(" in source

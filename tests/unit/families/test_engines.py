"""Which engine trains a config.json."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_lora.families.engines import PACKED, UNSERVED, engines, served
from areal_lora.families.registry import supported
from tests.support.families.rowless import ROWLESS


def test_the_lists_name_architectures_of_transformers_without_a_row() -> None:
    assert set(PACKED) <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert not PACKED & set(supported())
    assert UNSERVED < PACKED
    assert ROWLESS.keys() <= PACKED


def test_a_family_without_a_row_is_for_the_fsdp_engine() -> None:
    assert engines({"model_type": "qwen3"}) == ("megatron", "fsdp")
    assert engines({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}) == ("fsdp",)
    assert engines({"model_type": "phi3"}) == ("fsdp",)
    assert engines({"model_type": "phi3", "layer_types": ["linear_attention"]}) == ()
    assert engines({"model_type": "gpt2"}) == ()


def test_what_vllm_serves() -> None:
    assert served({"model_type": "phi3"})
    assert not served({"model_type": "helium"})
    assert not served({"model_type": "gpt2"})

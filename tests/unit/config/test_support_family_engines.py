"""Which engine trains a config.json."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_lora.config.support import ENGINES, PACKED, UNSERVED, variants
from areal_lora.families.registry import supported
from tests.support.families.rowless import ROWLESS


def test_the_lists_name_architectures_of_transformers_without_a_row() -> None:
    assert set(PACKED) <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert not PACKED & set(supported())
    assert UNSERVED < PACKED
    assert ROWLESS.keys() == PACKED


def test_variants_of_a_family_that_an_engine_does_not_compute() -> None:
    sliding = {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True}
    assert [bool(variants(engine, sliding)) for engine in ENGINES] == [True, False]
    assert variants("fsdp", {"model_type": "phi3", "layer_types": ["linear_attention"]}) == [
        "layers of type linear_attention, whose states cross packed sequences"
    ]
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert variants("fsdp", {"model_type": "phi3", cap: 50.0})
    assert variants("megatron", {"model_type": "phi3"}) == [], "its family is another matter"

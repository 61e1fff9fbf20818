"""Arguments of vLLM's engine for a run."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lora.engine.vllm_ext.server.assemble import engine_context

LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "longest", "context"),
    [
        ({}, 4096, 4097),
        ({"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8192}}, 8192, 8193),
        ({"rope_parameters": LONG}, 4096, 4096),
        ({"rope_parameters": LONG}, 4095, 4096),
        ({"rope_parameters": LONG}, 8192, 8193),
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096, 4096),
    ],
)
def test_room_for_a_sampled_token_does_not_change_long_rope(config: dict[str, Any], longest: int, context: int) -> None:
    """vLLM takes the long factors for a context above the original one."""
    assert engine_context(longest, config) == context

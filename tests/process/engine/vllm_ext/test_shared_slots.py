"""Servers whose adapters all share the outer sides of a layer's experts: slots have these once, as vLLM keeps them.

Against Hugging Face with the adapter merged, in float32. One server per row of ``SERVERS`` for all tests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from transformers import AutoConfig

from areal_lora.config.sizing.slots import slot_parameters
from areal_lora.errors import ManifestError
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import AdapterLayout, make_layout
from areal_lora.weight_sync.manifest import base_digest
from tests.support.engine.vllm_ext.serving import (
    PARTS,
    PROMPT,
    RunningServer,
    Tensors,
    largest,
    make_model,
    running_server,
    without,
)
from tests.support.sizes import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SERVERS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "mixtral tp2": ("mixtral", {"tp": 2}),
    "qwen2_moe tp2 ep2": ("qwen2_moe", {"tp": 2, "expert_parallel": True}),
}
OUTER = r"(gate_proj|up_proj|w1|w3)\.lora_A|(down_proj|w2)\.lora_B"


@pytest.fixture(scope="module", params=sample(SERVERS, 0, lambda name: [" " in name]))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    family, rollout = SERVERS[request.param]
    model = make_model(tmp_path_factory.mktemp("model"), family)
    folder = tmp_path_factory.mktemp("server") / "run"
    layouts = {"expert_layout": "shared_outer"}, {"name": "other", "expert_layout": "shared"}
    with running_server(folder, model, differing=layouts[0], further=layouts[1:], **rollout) as running:
        yield running


def published(
    served: RunningServer, tensors: Tensors, common: str = OUTER, index: int = 0
) -> tuple[AdapterRef, Tensors]:
    """Publish what the experts have in common (a pattern) as the first one has it; return the version and all of it."""
    spec = served.config.adapters[index].spec(str(served.model))
    first = {n: re.sub(r"experts\.\d+", "experts.0", n) if re.search(common, n) else n for n in tensors}
    aliases = {n: wire for n, wire in first.items() if n != wire}
    wire = {n: t for n, t in tensors.items() if n not in aliases}
    shapes = [(n, tuple(t.shape)) for n, t in wire.items()]
    layout: AdapterLayout = make_layout(spec, "float32", {0: shapes}, aliases)
    full = {n: tensors[w] for n, w in first.items()}
    if index == 0:
        return served.publish(wire, layout=layout), full
    ref = AdapterRef(name=spec.name, version=0)
    served.source.publish(ref, layout, wire, base=base_digest(served.model))
    return ref, full


def test_all_experts_are_bound_in_slots_of_the_planned_size(served: RunningServer) -> None:
    reply, config = served.modules(), served.config
    assert {f"{m}.lora_B.weight" for m in reply.modules} == {n for n in served.adapter(1) if "lora_B" in n}
    shape = ModelShape.from_hf(AutoConfig.from_pretrained(served.model).to_dict())
    tp = config.rollout.tp
    assert slot_parameters(config, shape) * 4 * tp == pytest.approx(reply.slot_bytes, rel=0.01)
    apart = [adapter.model_copy(update={"expert_layout": "per_expert"}) for adapter in config.adapters]
    assert slot_parameters(config.model_copy(update={"adapters": apart}), shape) * 4 * tp > 1.1 * reply.slot_bytes


@pytest.mark.parametrize("part", [None, *sample(PARTS, 0, lambda part: [PARTS[part]])])
def test_every_part_of_an_adapter_scores_like_merged_hugging_face(served: RunningServer, part: str | None) -> None:
    """Without a part the scores are others, on both sides the same."""
    print("seed 1")
    tensors = served.adapter(1)
    less = without(tensors, part) if part else tensors
    ref, full = published(served, less)
    got = served.score(ref)
    assert largest(got, served.logprobs(full, PROMPT)) < 1e-4
    if part is None:
        assert largest(got, served.score(None)) > 0.1, "the adapter must show"
        assert largest(got, served.logprobs(tensors, PROMPT)) > 1e-3, "and that its experts share these sides"
    elif any((less[n] != t).any() for n, t in tensors.items()):
        assert largest(got, served.logprobs(published(served, tensors)[1], PROMPT)) > 1e-3


def test_what_experts_share_scores_like_hugging_face(served: RunningServer) -> None:
    """The outer sides of the first adapter, all of the second."""
    print("seeds 2 and 3")
    (outer, first), (every, second) = published(served, served.adapter(2)), published(served, served.adapter(3), "", 1)
    for ref, full in ((outer, first), (every, second)):
        assert largest(served.score(ref), served.logprobs(full, PROMPT)) < 1e-4


def test_a_slot_used_before_shows_nothing_of_it(served: RunningServer) -> None:
    for seed in range(served.config.rollout.resident_versions):
        published(served, served.adapter(seed))
    zero, _ = published(served, served.adapter(7, b_scale=0.0))
    assert largest(served.score(zero), served.score(None)) < 1e-6


def test_experts_that_differ_are_refused(served: RunningServer) -> None:
    """What is served stays."""
    print("seeds 4 and 5")
    ref, full = published(served, served.adapter(4))
    with pytest.raises(ManifestError, match=r"targets: .* for all experts"):
        served.publish(served.adapter(5))
    assert largest(served.score(ref), served.logprobs(full, PROMPT)) < 1e-4
    after, full = published(served, served.adapter(5))
    assert largest(served.score(after), served.logprobs(full, PROMPT)) < 1e-4

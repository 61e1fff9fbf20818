"""What doubles with what, on published models."""

from __future__ import annotations

from areal_lora.config.load import load_config
from areal_lora.config.sizing.memory import job_memory
from areal_lora.config.sizing.what_if import AS_IT_IS, WhatIf, what_if
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import adapter_size
from tests.support.paths import EXAMPLES

MOE = ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {})
EXAMPLE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
CONFIG = load_config([EXAMPLE])


def found() -> dict[str, WhatIf]:
    return {one.change: one for one in what_if(CONFIG, MOE)}


def test_the_first_row_is_the_estimate_itself() -> None:
    first = next(what_if(CONFIG, MOE))
    memory = job_memory(CONFIG, MOE)
    assert first.change == AS_IT_IS
    assert first.rank_device == max(m.device for m in memory if m.role == "trainer")
    assert first.server_host == max(m.host for m in memory if m.role == "rollout")


def test_each_change_moves_what_it_should() -> None:
    rows = found()
    plain = rows[AS_IT_IS]
    larger = rows["adapter rank x 2"]
    adapters = [
        sum(p.device for p in m.parts if p.name in ("adapter weights and gradients", "optimizer moments"))
        for m in job_memory(CONFIG, MOE)
        if m.role == "trainer"
    ]
    more = larger.rank_device - plain.rank_device
    version = 2 * adapter_size(MOE, CONFIG.adapters[0].spec("")).parameters  # in bfloat16, of a node's ranks
    assert max(adapters) + version <= more < 1.2 * max(adapters) + version, "the adapter once more, and its publish"
    assert rows["micro-batch x 2"].rank_device > plain.rank_device
    assert rows["micro-batch x 2"].server_device == plain.server_device
    assert rows["context x 2"].server_device > plain.server_device
    again = {one.change: one for one in what_if(load_config([EXAMPLE], ["trainer.recompute=full"]), MOE)}
    assert rows["full recompute"] == again[AS_IT_IS]._replace(change="full recompute")
    assert again["no recompute"] == plain._replace(change="no recompute")
    assert plain.rank_device > again[AS_IT_IS].rank_device
    assert "no recompute" not in rows
    assert "full recompute" not in again


def test_a_longer_context_needs_no_larger_budget_where_ranks_divide_it() -> None:
    sizes = ["trainer.cp=4", "trainer.max_tokens_per_microbatch=4096", "rollout.max_model_len=8192"]
    rows = {one.change: one for one in what_if(load_config([EXAMPLE], sizes), MOE)}
    assert rows["context x 2"].rank_device == rows[AS_IT_IS].rank_device
    longer = {one.change: one for one in what_if(load_config([EXAMPLE], [*sizes, "rollout.max_model_len=16384"]), MOE)}
    assert longer["context x 2"].rank_device == rows["micro-batch x 2"].rank_device


def test_what_has_no_room_is_left_out() -> None:
    assert "trainer ranks x 2" not in found(), "the nodes of the example are full"
    dense = ModelShape.from_hf(known_config("Qwen/Qwen3-8B") or {})
    assert not [one.change for one in what_if(CONFIG, dense) if "expert" in one.change]


def test_a_service_without_adapters_has_its_estimates() -> None:
    service = load_config([EXAMPLE], ["service={}", "rollout.max_adapters=4"]).model_copy(update={"adapters": []})
    rows = {one.change: one for one in what_if(service, MOE)}
    assert 0 < rows[AS_IT_IS].rank_device < found()[AS_IT_IS].rank_device

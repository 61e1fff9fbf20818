"""Seconds of a simulated run: links of a broadcast, lengths of answers, a run that is too short."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import get_args

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.models import TrainerConfig
from areal_lora.config.sections.run import Recompute
from areal_lora.data.collate import scoring_batch
from areal_lora.engine.common.arena import ParallelLayout
from areal_lora.engine.common.micro_batches import flops_of, plans_of
from areal_lora.errors import ConfigError
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape
from areal_lora.families.sites import PassSizes
from areal_lora.launcher.simulation.cost_model import FLOPS_PER_S, arithmetic, scaled
from areal_lora.obs.metrics.records import RunMetrics
from areal_lora.weight_sync.link.relays import REQUEST_S, relay_tree
from areal_lora.weight_sync.messages import ServerEndpoint
from tests.support.paths import EXAMPLES

CONFIG = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"])
SHAPE = ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {})
COSTS = arithmetic(CONFIG, SHAPE)


def members(n: int) -> list[ServerEndpoint]:
    return [ServerEndpoint(name=f"s{i}", host=f"h{i}", admin_port=1, data_port=1, workers=1) for i in range(n)]


def test_a_root_of_a_tree_sends_once_for_each_level_and_a_ring_once() -> None:
    tree = replace(COSTS, tree=True, sources=1, nbytes=10**9, link_s=1e-9)
    assert [tree.group_s(n, 1) for n in (1, 7, 8, 511)] == pytest.approx([1.0, 3.0, 4.0, 9.0])
    assert [tree.group_s(n, 8) for n in (1, 7, 511)] == pytest.approx([1.0, 2.0, 8.0]), "its first receiver sends most"
    ring = replace(tree, tree=False)
    assert ring.group_s(511, 1) == pytest.approx(1.0 + 510 * 50e-6)


def test_relays_send_all_sources_bytes_while_the_next_bucket_arrives() -> None:
    costs = replace(COSTS, tree=True, sources=4, nbytes=10**9, link_s=1e-9, bucket_bytes=10**6)
    assert costs.wire_s(relay_tree(members(8))) == pytest.approx(3.0)
    # A root group of 32 (6 levels), whose first receiver sends 5 times; then a relay, which sends to 31 (5 levels).
    assert costs.wire_s(relay_tree(members(63))) == pytest.approx(5.0 + 5 * 4e-3)


def test_a_relay_makes_the_requests_to_the_servers_below_it() -> None:
    assert [COSTS.requests_s(relay_tree(members(n))) / REQUEST_S for n in (8, 32, 63, 512)] == [8, 32, 64, 79]


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_the_trainer_computes_what_an_engine_counts(recompute: Recompute) -> None:
    """A sequence of 30 k tokens: attention is more than a third of its layers."""
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"],
        [f"trainer.recompute={recompute}", "adapters.0.sampling.max_new_tokens=30000", "rollout.max_model_len=32768"],
    )
    batch, layout = (
        scoring_batch([[1] * 30_000], "a"),
        ParallelLayout.of(TrainerConfig(world_size=1), layers=1, experts=0),
    )
    sizes = {"a": PassSizes.of(SHAPE, config.adapters[0].spec(""))}
    flops = flops_of(plans_of(batch, layout, 30_000), batch, sizes, recompute).total()
    assert arithmetic(config, SHAPE).trained_token_s * 30_000 * FLOPS_PER_S == pytest.approx(flops, rel=1e-3)


def test_a_server_runs_what_its_kv_cache_holds() -> None:
    """0.85 of 80 GiB, without base, slots, a step and the process, for keys and values of 2 heads of 48 layers."""
    long = ["adapters.0.sampling.max_new_tokens=30000", "rollout.max_model_len=32768"]
    files, seen = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], COSTS.kv_tokens
    bytes_ = 0.85 * 80 * 2**30 - 30.532e9 - 5 * 2.908e9 - 3.6 * 2**30
    assert seen == pytest.approx(bytes_ / (48 * 2 * 2 * 128 * 2), rel=0.01)
    assert COSTS.seats(CONFIG) == CONFIG.rollout.max_num_seqs == 256, "768 tokens each"
    config = load_config(files, [*long, "trainer.max_tokens_per_microbatch=32768"])
    costs = arithmetic(config, SHAPE)
    assert costs.seats(config) == int(seen / 22_500) == 21, "a prompt of 15 k tokens and half of such an answer"
    assert costs.batch_s(config) > 2 * replace(costs, kv_tokens=math.inf).batch_s(config)
    unknown = config.model_copy(update={"cluster": config.cluster.model_copy(update={"device_memory_gib": None})})
    assert arithmetic(unknown, SHAPE).seats(unknown) == 256
    assert replace(costs, kv_tokens=1000).seats(config) == 1


def test_lengths_are_equal_for_equal_keys_and_have_the_mean() -> None:
    law = replace(COSTS, answer_tokens=100.0, sigma=0.5, longest=10_000)
    assert law.lengths("1 7", 4) == law.lengths("1 7", 4) != law.lengths("1 8", 4)
    assert fmean(law.lengths("1", 20_000)) == pytest.approx(100, rel=0.03)
    assert max(replace(law, longest=60).lengths("1", 100)) == 60


def test_a_run_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 2 training steps"):
        scaled(COSTS, RunMetrics(), COSTS, CONFIG)

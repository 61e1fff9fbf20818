"""Seconds of a simulated run: links of a broadcast, lengths of answers, a run that is too short."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import get_args

import pytest
import torch

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
from areal_lora.obs.metrics.records import PublishRecord, RunMetrics, StepRecord
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


PPO = ["adapters.0.algorithm={kind: ppo, kl_coef: 0.01, reference: initial}", "adapters.0.minibatches=2"]


@pytest.mark.parametrize(
    ("recompute", "overrides", "trained", "scored"),
    [
        *((recompute, [], 1, 0) for recompute in get_args(Recompute)),
        ("full", ["adapters.0.minibatches=2"], 1, 1),
        ("none", ["adapters.0.dropout=0.1"], 1, 1),
        ("none", PPO, 2, 3),
        ("selective", PPO, 2, 3),
    ],
)
def test_the_trainer_computes_what_an_engine_counts(
    recompute: Recompute, overrides: list[str], trained: int, scored: int
) -> None:
    """A group of four answers of 15 k tokens to a prompt of 15 k, in passes of `learn.annotate` and of training.

    Attention is more than a third of a layer. The pass of a critic has no logits, which are a twentieth.
    """
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"],
        [
            f"trainer.recompute={recompute}",
            "adapters.0.sampling.max_new_tokens=30000",
            "rollout.max_model_len=32768",
            *overrides,
        ],
    )
    rows = [[1] * 15_000 + [2 + answer] * 15_000 for answer in range(4)]
    mask = torch.tensor([False] * 15_000 + [True] * 15_000).repeat(4)
    batch, layout = (
        replace(scoring_batch(rows, "a"), loss_mask=mask),
        ParallelLayout.of(TrainerConfig(world_size=1), layers=1, experts=0),
    )
    sizes = {"a": PassSizes.of(SHAPE, config.adapters[0].spec(""))}
    passes = [recompute] * trained + [None] * scored
    flops = sum(flops_of(plans_of(batch, layout, 75_000), batch, sizes, kind).total() for kind in passes)
    found = arithmetic(config, SHAPE).trained_token_s * 75_000 * FLOPS_PER_S
    assert found == pytest.approx(flops, rel=0.05 if trained > 1 else 1e-3)


def test_a_reference_that_is_the_base_has_a_pass_without_adapter_and_a_teacher_has_none() -> None:
    [plain, base, served] = (
        arithmetic(load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], keys), SHAPE).trained_token_s
        for keys in (
            [],
            ["adapters.0.algorithm.kl_coef=0.01"],
            ["adapters.0.algorithm={kind: grpo, kl_coef: 0.01, reference: {model: m, url: 'http://127.0.0.1/v1'}}"],
        )
    )
    assert base - plain == pytest.approx(2 * 3.3e9 / FLOPS_PER_S, rel=0.1), (
        "two FLOPs for each weight that a token meets"
    )
    assert served == plain


def test_the_kv_cache_holds_a_prompt_once_while_its_answers_run() -> None:
    """Against groups that follow one another, token by token, on each of four places."""
    law = replace(COSTS, prompt_tokens=300.0, answer_tokens=100.0, sigma=0.0, longest=400, kv_tokens=10_000.0)
    n = CONFIG.adapters[0].sampling.n_samples
    assert law.resident(CONFIG) == pytest.approx(10_000 / (300 / n + 50))
    spread, running, held = replace(law, sigma=0.8), 0, 0
    for group in (spread.lengths(f"other {i}", n) for i in range(1000)):
        for at in range(max(group)):
            alive = sum(length > at for length in group)
            running, held = running + alive, held + 300 + alive * at
    assert spread.resident(CONFIG) == pytest.approx(10_000 * running / held, rel=0.1)
    assert spread.resident(CONFIG) < 0.8 * law.resident(CONFIG)


def test_a_server_runs_what_its_kv_cache_holds() -> None:
    """0.85 of 80 GiB, without base, slots, a step and the process, for keys and values of 2 heads of 48 layers."""
    long = ["adapters.0.sampling.max_new_tokens=30000", "rollout.max_model_len=32768"]
    files, seen = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], COSTS.kv_tokens
    bytes_ = 0.85 * 80 * 2**30 - 30.532e9 - 5 * 2.908e9 - 3.6 * 2**30
    assert seen == pytest.approx(bytes_ / (48 * 2 * 2 * 128 * 2), rel=0.01)
    assert COSTS.seats(CONFIG) == CONFIG.rollout.max_num_seqs == 256, "768 tokens each"
    config = load_config(files, [*long, "trainer.max_tokens_per_microbatch=32768"])
    costs = arithmetic(config, SHAPE)
    assert int(seen / 22_500) == 21 < costs.seats(config) < int(seen / (15_000 / 4 + 7_500)), "of 4 with one prompt"
    assert costs.batch_s(config) > 1.5 * replace(costs, kv_tokens=math.inf).batch_s(config)
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


def a_run(adapters: int, wait_s: float, train_s: float, steps: int) -> RunMetrics:
    """Adapters that wait and train in turn, 100 sequences of 1,000 tokens a step, of which half are the prompt."""
    names = [CONFIG.adapters[0].name, *(f"beside {i}" for i in range(1, adapters))]
    found = [
        StepRecord(
            step=step,
            version=step,
            adapter=name,
            time_s=(wait_s + train_s) * (step * adapters + turn),
            step_s=(wait_s + train_s) * (adapters if step else turn),
            spans={"wait_batch": wait_s * (adapters if step else turn), "train": train_s},
            metrics={"train/n_sequences": 100.0, "train/n_tokens": 1e5, "train/mean_answer_tokens": 500.0},
        )
        for step in range(steps)
        for turn, name in enumerate(names, 1)
    ]
    return RunMetrics(steps=found)


@pytest.mark.parametrize("adapters", [1, 2, 8])
def test_a_measured_step_computed_each_prompt_once_for_one_adapter(adapters: int) -> None:
    """100 sequences are 25 groups of 4. A step of each adapter takes servers and trainer as long as without others."""
    found = scaled(COSTS, a_run(adapters, 60.0, 20.0, 20), COSTS, CONFIG)
    assert found.batch_s(CONFIG) == pytest.approx(80.0, rel=0.01)
    assert found.prompt_tokens == 500
    assert found.trained_token_s == pytest.approx(20 * CONFIG.trainer.world_size / (100 * 500 + 25 * 500))


def test_ranks_merge_their_shares_before_a_version_is_sent() -> None:
    """59.8 GB of Qwen3-30B-A3B over 8 ranks go to the device and back at 10 GB/s; a run's own time takes its place."""
    merged = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], ["rollout.adapter_mode=merged"])
    own = arithmetic(merged, SHAPE)
    assert (COSTS.merge_s, own.merge_s) == (0.0, pytest.approx(2 * 59.8 / 8 / 10, rel=0.01))
    run = a_run(1, 60.0, 20.0, 20)
    publishes = [PublishRecord(version=v, total_ms=4e3, phases_ms={"pack": 3e3}) for v in range(3)]
    run = replace(run, publishes=publishes)
    twice = replace(own, merge_s=2 * own.merge_s)
    assert [scaled(costs, run, own, merged).merge_s for costs in (own, twice)] == pytest.approx([3.0, 6.0])
    assert scaled(COSTS, run, COSTS, CONFIG).merge_s == 0.0

"""Runs in virtual time: the clock, what is conserved, and planted faults, on a small configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.errors import ConfigError, RolloutError
from areal_lora.families.registry import known_config
from areal_lora.families.shape import ModelShape, read_hf_config
from areal_lora.launcher.simulation import simulate as simulate_module
from areal_lora.launcher.simulation.cost_model import FIRST, CostModel, VirtualLoop, arithmetic, scaled
from areal_lora.launcher.simulation.simulate import Scenario, SimulatedRun, SimulationReport, simulate
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import ScoredGroup
from areal_lora.rollout.routing import Router, Server
from tests.support.paths import EXAMPLES

RECORDED = Path(__file__).parent / "recorded_run"
"""Records of 24 steps of examples/math/embedded.yaml on two shared cores, cut to the fields that `scaled` reads."""
SHAPE = ModelShape.from_hf(read_hf_config(EXAMPLES / "tiny_model"))
COSTS = CostModel(
    read_s=0.01,
    sampled_token_s=1e-4,
    prompt_token_s=1e-4,
    trained_token_s=2e-4,
    prompt_tokens=20,
    answer_tokens=40,
    sigma=0.7,
    longest=200,
    nbytes=10**8,
    sources=1,
    link_s=1e-10,
    tree=True,
    activate_s=0.01,
)
FOUR = Scenario(servers=4, ranks=2, steps=16)


def config(**sampling: int) -> Config:
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    sizes = {"prompts_per_step": 16, "n_samples": 4, **sampling}
    return load_config(files, ["rollout.max_num_seqs=16", *(f"adapters.0.sampling.{k}={v}" for k, v in sizes.items())])


def test_hours_pass_at_once_and_timers_fire_in_order() -> None:
    async def sleepers() -> tuple[float, list[int]]:
        ended = list[int]()

        async def sleep(seconds: int) -> None:
            await asyncio.sleep(seconds)
            ended.append(seconds)

        await asyncio.gather(*map(sleep, (7200, 30, 3600)))
        return asyncio.get_running_loop().time(), ended

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(sleepers()) == (pytest.approx(7200), [30, 3600, 7200])


def test_a_wait_without_end_is_an_error() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RolloutError, match="without end"), asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(wait())


def test_a_seed_decides_everything() -> None:
    first, again, other = (simulate(config(), COSTS, replace(FOUR, seed=seed)) for seed in (1, 1, 2))
    assert (first.taken_s, first.trained) == (again.taken_s, again.trained)
    assert first.taken_s != other.taken_s


def test_prompts_are_trained_once_and_within_the_staleness() -> None:
    found = simulate(config(), COSTS, FOUR)
    assert found.stats is not None
    assert len(found.trained) == len(set(found.trained)) == 16 * FOUR.steps
    dropped = sum(found.stats.dropped.values())
    live = found.stats.ready + found.stats.running + found.stats.leased
    assert found.stats.issued == found.stats.consumed + dropped + live
    assert 0 <= min(found.staleness) <= max(found.staleness) <= config().rollout.max_staleness
    assert len(found.publishes) == FOUR.steps


def test_a_publish_that_merges_first_takes_longer_and_no_time_out_counts_it() -> None:
    """Each step waits for the version before, which is merged for longer than a publish may take."""
    merge_s = 2 * config().weight_sync.timeout_s
    plain, merged = (simulate(config(), replace(COSTS, merge_s=s), FOUR) for s in (0.0, merge_s))
    assert merged.phase_s("pack") == (merge_s, merge_s)
    assert merged.phase_s("all")[0] == pytest.approx(merge_s + plain.phase_s("all")[0], rel=0.05)
    assert merged.seconds > (FOUR.steps - 2) * merge_s
    assert not merged.excluded


def test_dropped_groups_cost_places_and_not_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the groups are uniform: of servers with places for twice as many the steps take little longer.

    A batch that was filled in waves, the next one after the drops of the last, would take twice as long at least.
    """
    many, long = replace(FOUR, servers=32, steps=24), replace(COSTS, trained_token_s=1e-6)
    whole = simulate(config(), long, many)
    monkeypatch.setattr(ScoredGroup, "uniform", property(lambda group: group.ticket.prompt.position % 2 == 0))
    monkeypatch.setattr(simulate_module.feed, "AdapterFeed", partial(AdapterFeed, drop_uniform=True))
    half = simulate(config(), long, many)
    assert half.stats is not None
    assert half.stats.dropped["no_variance"] > 15 * many.steps
    assert half.steps_per_hour > 0.8 * whole.steps_per_hour


def test_places_that_short_answers_leave_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 answers the longest has four times the mean: three quarters of the places are free until it ends.

    Servers have at most four times as many sequences as they sample at once, and nothing is trained on twice.
    """
    many, most = config(n_samples=16), list[int]()
    costs, outstanding = replace(COSTS, sigma=0.8, longest=400, trained_token_s=1e-6), Router.figures

    class Noted(Router):
        @asynccontextmanager
        async def lease(self, *request: Any) -> AsyncIterator[Server]:
            async with super().lease(*request) as server:
                most.append(int(outstanding(self)["sequences_outstanding"]))
                yield server

    monkeypatch.setattr(simulate_module, "Router", Noted)
    found = simulate(many, costs, FOUR)
    assert len(found.trained) == len(set(found.trained)) == 16 * FOUR.steps
    assert max(found.staleness) <= many.rollout.max_staleness
    assert 64 + 16 < max(most) <= 4 * 64 + 16
    monkeypatch.setattr(Config, "waits_on_servers", False)
    most.clear()
    whole = simulate(many, costs, FOUR)
    assert max(most) == 64
    assert found.steps_per_hour > 1.25 * whole.steps_per_hour


def test_a_slow_server_shows() -> None:
    # A step's longest answers decide when servers are plenty: the prompts that the slow one gets are late.
    quiet = simulate(config(), COSTS, FOUR)
    slow = simulate(config(), COSTS, replace(FOUR, slow={2: 5.0}))
    assert slow.steps_per_hour < 0.8 * quiet.steps_per_hour
    assert slow.trainer_idle > quiet.trainer_idle


def test_a_server_whose_kv_cache_is_full_takes_longer() -> None:
    """A sequence has 40 tokens on average: 4 fit, a quarter of the seats, and an iteration takes nearly as long."""
    ample, full = (simulate(config(), replace(COSTS, kv_tokens=tokens), FOUR) for tokens in (10_000, 160))
    assert ample.taken_s == simulate(config(), COSTS, FOUR).taken_s
    assert full.steps_per_hour < 0.6 * ample.steps_per_hour
    assert full.trainer_idle > ample.trainer_idle


def test_a_step_takes_the_trainer_one_prompt_of_each_group() -> None:
    """16 prompts of 20 tokens and 64 answers of 40 on two ranks, of which servers have more than enough."""
    found = simulate(config(), replace(COSTS, sigma=0.0, trained_token_s=0.01), FOUR)
    assert found.trainer_idle < 0.05
    assert 3600 / found.steps_per_hour == pytest.approx((16 * 20 + 64 * 40) * 0.01 / 2, rel=0.05)


def test_a_lost_host_is_excluded_and_costs_time() -> None:
    quiet, lost = simulate(config(), COSTS, FOUR), simulate(config(), COSTS, replace(FOUR, lost=2))
    assert quiet.excluded == {}
    assert set(lost.excluded) == {"server-2", "server-3"}
    assert all("does not answer" in reason for reason in lost.excluded.values())
    half = FOUR.steps // 2
    assert lost.taken_s[: half + 1] == quiet.taken_s[: half + 1]
    assert lost.seconds > quiet.seconds
    assert len(set(lost.trained)) == 16 * FOUR.steps
    assert lost.stats is not None
    assert sum(lost.stats.retried.values()) > 0


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_publish_to_512_servers_takes_at_most_half_more_than_to_8(backend: str) -> None:
    """Of the shipped job, with more servers."""
    shipped = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], [f"weight_sync.backend={backend}"])
    costs = arithmetic(shipped, ModelShape.from_hf(known_config("Qwen/Qwen3-30B-A3B") or {}))
    few, many = (simulate(shipped, costs, Scenario(servers=n, ranks=8, steps=3)) for n in (8, 512))
    assert many.phase_s("all")[0] <= 1.5 * few.phase_s("all")[0]


def test_the_steps_of_the_embedded_run_are_predicted() -> None:
    """Within 20 % of what was measured, of which a median of the steps' parts is all that the simulation gets."""
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    embedded, measured = load_config(files), read_metrics(RECORDED)
    own = arithmetic(embedded, SHAPE)
    found = simulate(embedded, scaled(own, measured, own, embedded), Scenario(servers=1, ranks=2, steps=24))
    steps = measured.steps[FIRST:]
    assert found.steps_per_hour == pytest.approx(3600 * len(steps) / sum(step.step_s for step in steps), rel=0.2)


def test_splits_of_the_devices_are_sorted_and_whole() -> None:
    small = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        ["run.steps=4", "adapters.0.sampling.prompts_per_step=8", "adapters.0.sampling.n_samples=2"],
    )
    report = SimulationReport.of(small, COSTS, host=1, gpus=9)
    assert report.after_loss is None, "the only server is lost: the run would wait for it"
    assert sorted((split.ranks, split.servers) for split, _ in report.splits) == [(2, 7), (4, 5), (6, 3), (8, 1)]
    rates = [run.steps_per_hour for _, run in report.splits]
    assert rates == sorted(rates, reverse=True)
    with pytest.raises(ConfigError, match="no 2 trainer ranks and a server"):
        SimulationReport.of(small, COSTS, host=1, gpus=2)


@pytest.mark.parametrize("best", [2, 6, 90, 254, 470, 510])
def test_the_best_split_of_many_devices_is_found_in_few_runs(monkeypatch: pytest.MonkeyPatch, best: int) -> None:
    def one_peak(config: Config, costs: CostModel, scenario: Scenario) -> SimulatedRun:
        simulated.append(scenario.ranks)
        # With fewer ranks the trainer is slower, with more the servers.
        return SimulatedRun(taken_s=[0.0, max(best / scenario.ranks, (512 - best) / (512 - scenario.ranks))])

    simulated = list[int]()
    monkeypatch.setattr(simulate_module, "simulate", one_peak)
    report = SimulationReport.of(config(), COSTS, host=1, gpus=512)
    assert report.splits[0][0].ranks == best
    assert len(simulated) <= 40, "of 255 splits"

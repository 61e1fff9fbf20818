"""The learning rate, the initial adapter and the layout's arithmetic: pure parts of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from areal_lora.config.models import OptimizerConfig, TrainerConfig
from areal_lora.engine.base import AdapterPlan, PlannedTensor
from areal_lora.engine.megatron_engine import initial_tensors
from areal_lora.engine.megatron_utils.layout import Layout
from areal_lora.errors import ConfigError
from areal_lora.platforms.megatron_cpu import install_cpu_patches

from ..distributed.spawn import run_ranks


def layout(world: int, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> Layout:
    config = TrainerConfig(world_size=world, tp=tp, pp=pp, ep=ep, etp=etp)
    return Layout.of(config, layers=4, experts=8)


LAYOUTS = [
    layout(1), layout(2, tp=2), layout(2, ep=2), layout(2, etp=2), layout(2, pp=2), layout(4, tp=2, ep=2),
    layout(8, tp=2, pp=2, ep=2), layout(8, tp=2, ep=2, etp=2), layout(16, tp=2, pp=2, ep=4),
]  # fmt: skip


@pytest.mark.parametrize("where", LAYOUTS)
def test_every_tensor_has_one_owner_that_holds_it(where: Layout) -> None:
    for layer in range(4):
        for expert in (None, *range(8)):
            owner = where.owner(layer, expert)
            holders = [
                rank
                for rank in range(where.world)
                if where.first_layer(rank) <= layer < where.first_layer(rank) + where.layers_per_stage
                and (
                    expert is None
                    or where.first_expert(rank) <= expert < where.first_expert(rank) + where.experts_per_rank
                )
            ]
            # Lowest of the holders, so that replicas stay silent and every rank agrees who speaks.
            assert owner == min(holders)


@pytest.mark.parametrize("where", LAYOUTS)
def test_coordinates_name_each_rank_once(where: Layout) -> None:
    ranks = range(where.world)
    dense = {(where.stage(r), where.dp_rank(r), where.tp_rank(r)) for r in ranks}
    expert = {(where.stage(r), where.edp_rank(r), where.ep_rank(r), where.etp_rank(r)) for r in ranks}
    assert len(dense) == len(expert) == where.world
    assert max(where.dp_rank(r) for r in ranks) == where.dp - 1
    assert max(where.edp_rank(r) for r in ranks) == where.edp - 1


@pytest.mark.parametrize(
    "sizes", [{"tp": 3}, {"pp": 4, "world": 4, "layers": 6}, {"ep": 3, "world": 3}, {"ep": 4, "etp": 2}]
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int]) -> None:
    chosen = dict(sizes)
    layers, world = chosen.pop("layers", 4), chosen.pop("world", 4)
    with pytest.raises(ConfigError):
        Layout.of(TrainerConfig(world_size=world, **chosen), layers=layers, experts=8)


def test_initial_values_depend_on_seed_and_name_only() -> None:
    def tensor(name: str) -> PlannedTensor:
        return PlannedTensor(name=name, shape=(4, 64))

    a, b = (
        tensor("model.layers.0.self_attn.q_proj.lora_A.weight"),
        tensor("model.layers.1.self_attn.q_proj.lora_A.weight"),
    )
    one = initial_tensors(AdapterPlan(sources={0: (a, b)}, aliases={}), seed=1)
    two = initial_tensors(AdapterPlan(sources={3: (b,), 1: (a,)}, aliases={}), seed=1)
    other = initial_tensors(AdapterPlan(sources={0: (a,)}, aliases={}), seed=2)
    assert all(torch.equal(one[n], two[n]) for n in (a.name, b.name))
    assert not torch.equal(one[a.name], one[b.name])
    assert not torch.equal(one[a.name], other[a.name])


def rates(schedules: list[str]) -> dict[str, list[float]]:
    install_cpu_patches()
    from areal_lora.engine.megatron_utils.optimizer import lr_at

    configs = {s: OptimizerConfig(lr=2.0, warmup_steps=4, schedule=s, min_lr_ratio=0.25) for s in schedules}
    return {s: [lr_at(config, step, 24) for step in (*range(25), 1000)] for s, config in configs.items()}


@pytest.mark.slow
def test_learning_rate(tmp_path: Path) -> None:
    # In a process of its own: Megatron's patches replace parts of torch.cuda.
    half = {"constant": 2.0, "linear": 2.0 * (0.25 + 0.75 * 0.5), "cosine": 2.0 * (0.25 + 0.75 * 0.5)}
    quarter = {
        "constant": 2.0,
        "linear": 2.0 * (0.25 + 0.75 * 0.75),
        "cosine": 2.0 * (0.25 + 0.75 * (1 + 0.5**0.5) / 2),
    }
    found = run_ranks(rates, 1, tmp_path, (list(half),), timeout_s=60.0)[0]
    for schedule, values in found.items():
        assert values[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
        assert values[9] == pytest.approx(quarter[schedule])
        assert values[14] == pytest.approx(half[schedule])
        assert values[24] == pytest.approx(2.0 if schedule == "constant" else 0.5)
        assert values[25] == values[24]

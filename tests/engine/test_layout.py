"""Rank arithmetic against a plain enumeration, and the sizes that must divide."""

from __future__ import annotations

import itertools

import pytest

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.megatron_utils.layout import Layout, check_widths
from areal_lora.errors import ConfigError

SIZES = [
    dict(zip(("tp", "pp", "ep", "etp"), sizes, strict=True))
    for sizes in itertools.product((1, 2), repeat=4)
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
def test_ranks_are_numbered_like_megatron(sizes: dict[str, int]) -> None:
    layout = Layout.of(TrainerConfig(world_size=8, **sizes), layers=4, experts=8)
    dense = itertools.product(range(layout.pp), range(layout.dp), range(layout.tp))
    experts = itertools.product(range(layout.pp), range(layout.edp), range(layout.ep), range(layout.etp))
    for rank, ((pp, dp, tp), (epp, edp, ep, etp)) in enumerate(zip(dense, experts, strict=True)):
        assert (layout.stage(rank), layout.dp_rank(rank), layout.tp_rank(rank)) == (pp, dp, tp)
        assert (layout.stage(rank), layout.edp_rank(rank), layout.ep_rank(rank)) == (epp, edp, ep)
        assert layout.etp_rank(rank) == etp


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
def test_every_expert_has_one_owner_that_holds_it(sizes: dict[str, int]) -> None:
    layout = Layout.of(TrainerConfig(world_size=8, **sizes), layers=4, experts=8)
    for layer, expert in itertools.product(range(4), range(8)):
        owner = layout.owner(layer, expert)
        assert layout.first_layer(owner) <= layer < layout.first_layer(owner) + layout.layers_per_stage
        assert layout.first_expert(owner) <= expert < layout.first_expert(owner) + layout.experts_per_rank
        assert layout.etp_rank(owner) == 0 == layout.edp_rank(owner)
        dense = layout.owner(layer, None)
        assert layout.tp_rank(dense) == 0 == layout.dp_rank(dense)
        assert layout.stage(dense) == layout.stage(owner)


@pytest.mark.parametrize(
    ("sizes", "numbers", "key"),
    [
        ({"tp": 2}, {"vocab": 321, "kv_heads": 2, "expert_width": 64}, "trainer.tp"),
        ({"tp": 4}, {"vocab": 320, "kv_heads": 2, "expert_width": 64}, "trainer.tp"),
        ({"etp": 2}, {"vocab": 320, "kv_heads": 2, "expert_width": 63}, "trainer.etp"),
    ],
)
def test_widths_that_do_not_divide_are_refused(sizes: dict[str, int], numbers: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        check_widths(TrainerConfig(world_size=8, **sizes), **numbers)


@pytest.mark.parametrize(("sizes", "model"), [({"ep": 4}, {"experts": 6}), ({"pp": 2}, {"layers": 5})])
def test_layers_and_experts_must_divide(sizes: dict[str, int], model: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Layout.of(TrainerConfig(world_size=8, **sizes), **{"layers": 4, "experts": 8, **model})

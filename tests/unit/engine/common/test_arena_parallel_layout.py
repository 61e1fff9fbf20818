"""Rank arithmetic against a plain enumeration, and the sizes that must divide."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from areal_lora.config.models import TrainerConfig
from areal_lora.engine.common.arena import ParallelLayout, ShardedModel, arrange, check_widths, context_groups
from areal_lora.errors import ConfigError
from areal_lora.families.shape import ModelShape
from areal_lora.types import AdapterSpec, ExpertLayout

SIZES = [
    dict(zip(("tp", "pp", "ep", "etp", "cp"), sizes, strict=True)) for sizes in itertools.product((1, 2), repeat=5)
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "-".join(f"{k}{v}" for k, v in s.items()))
def test_ranks_are_numbered_like_megatron(sizes: dict[str, int]) -> None:
    layout = ParallelLayout.of(TrainerConfig(world_size=8, **sizes), layers=4, experts=8)
    dense = itertools.product(range(layout.pp), range(layout.dp), range(layout.cp), range(layout.tp))
    copies = layout.ranks_per_stage // (layout.ep * layout.etp)
    experts = itertools.product(range(layout.pp), range(copies), range(layout.ep), range(layout.etp))
    for rank, ((pp, dp, cp, tp), (epp, _, ep, etp)) in enumerate(zip(dense, experts, strict=True)):
        assert (rank // layout.ranks_per_stage, layout.dp_rank(rank), layout.tp_rank(rank)) == (pp, dp, tp)
        held = layout.experts_of(rank).start // layout.experts_per_rank
        assert (rank // layout.ranks_per_stage, held, layout.etp_rank(rank)) == (epp, ep, etp)
        (context,) = (ranks for ranks in context_groups(layout) if rank in ranks)
        assert context.index(rank) == cp
        assert context == tuple(r for r in range(8) if place_of(layout, r) == (pp, dp, tp))
        assert (rank in layout.reporting()) == (pp == layout.pp - 1 and cp == tp == 0)


def place_of(layout: ParallelLayout, rank: int) -> tuple[int, int, int]:
    return rank // layout.ranks_per_stage, layout.dp_rank(rank), layout.tp_rank(rank)


def names(sizes: dict[str, int]) -> str:
    return "-".join(f"{k}{v}" for k, v in sizes.items())


@pytest.mark.parametrize("layers", [2, 4, 5, 7])
@pytest.mark.parametrize("sizes", SIZES, ids=names)
def test_owner_is_the_lowest_rank_that_holds_it(sizes: dict[str, int], layers: int) -> None:
    """Replicas send nothing, and all ranks agree on the sender."""
    layout = ParallelLayout.of(TrainerConfig(world_size=8, **sizes), layers=layers, experts=8)
    for layer, expert in itertools.product(range(layers), (None, *range(8))):
        holders = [
            rank
            for rank in range(8)
            if any(layer in chunk for chunk in layout.chunks_of(rank))
            and (expert is None or expert in layout.experts_of(rank))
        ]
        assert layout.owner(layer, expert) == min(holders)
        assert layout.etp_rank(min(holders)) == 0
        assert expert is None or min(holders) % layout.ranks_per_stage < layout.ep * layout.etp, "the first copy"
        assert {rank // layout.ranks_per_stage for rank in holders} == {
            layout.owner(layer, None) // layout.ranks_per_stage
        }


@pytest.mark.parametrize(
    ("layers", "pp", "chosen", "expected"),
    [
        (4, 2, None, (2, 2)),
        (5, 2, None, (3, 2)),
        (7, 4, None, (2, 2, 2, 1)),
        (3, 3, None, (1, 1, 1)),
        (7, 3, [1, 4, 2], (1, 4, 2)),
        (8, 2, [1, 3, 2, 2], (1, 3, 2, 2)),
        (7, 3, [1, 1, 1, 1, 1, 2], (1, 1, 1, 1, 1, 2)),
    ],
)
def test_stages_may_be_uneven(layers: int, pp: int, chosen: list[int] | None, expected: tuple[int, ...]) -> None:
    layout = ParallelLayout.of(TrainerConfig(world_size=2 * pp, pp=pp, pp_layers=chosen), layers=layers, experts=0)
    assert layout.stage_layers == expected
    stages = [number % pp for number, count in enumerate(expected) for _ in range(count)]  # each has every pp-th part
    for rank in range(2 * pp):
        assert [*itertools.chain(*layout.chunks_of(rank))] == [
            layer for layer in range(layers) if stages[layer] == rank // 2
        ]
        assert [len(chunk) for chunk in layout.chunks_of(rank)] == list(expected[rank // 2 :: pp])
    assert [layout.owner(layer, None) // layout.ranks_per_stage for layer in range(layers)] == stages
    assert [layout.owner(layer, None) for layer in range(layers)] == [2 * stage for stage in stages]


@pytest.mark.parametrize("chosen", [[2, 2], [1, 2, 3], [3, 3, 1, 1], [1, 1, 1, 1, 1, 1]])
def test_stages_that_do_not_add_up_are_refused(chosen: list[int]) -> None:
    with pytest.raises(ConfigError, match="pp_layers"):
        ParallelLayout.of(TrainerConfig(world_size=3, pp=3, pp_layers=chosen), layers=7, experts=0)


MOE = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 80,
    "vocab_size": 320,
}


@pytest.mark.parametrize(
    ("sizes", "model", "key"),
    [
        ({"tp": 2}, {"vocab_size": 321}, "trainer.tp"),
        ({"tp": 8}, {"num_attention_heads": 4}, "trainer.tp"),
        ({"tp": 4}, {"num_key_value_heads": 6, "num_attention_heads": 12, "hidden_size": 96}, "trainer.tp"),
        ({"tp": 2}, {"shared_expert_intermediate_size": 81}, "trainer.tp"),
        ({"tp": 2}, {"mlp_only_layers": [0], "intermediate_size": 97}, "trainer.tp"),
        ({"etp": 2}, {"moe_intermediate_size": 63}, "trainer.etp"),
    ],
)
def test_widths_that_do_not_divide_are_refused(sizes: dict[str, int], model: dict[str, Any], key: str) -> None:
    check_widths(TrainerConfig(world_size=8, tp=8, etp=8), ModelShape.from_hf(MOE))
    with pytest.raises(ConfigError, match=key):
        check_widths(TrainerConfig(world_size=8, **sizes), ModelShape.from_hf({**MOE, **model}))


@pytest.mark.parametrize(
    ("sizes", "model"),
    [({"ep": 4}, {"experts": 6}), ({"pp": 8}, {"layers": 5}), ({"tp": 3}, {}), ({"ep": 4, "etp": 4}, {})],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], model: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        ParallelLayout.of(TrainerConfig(world_size=8, **sizes), **{"layers": 4, "experts": 8, **model})


@pytest.mark.parametrize("layout", ExpertLayout)
@pytest.mark.parametrize("sizes", [{"world_size": 6}, {"world_size": 6, "ep": 2}, {"world_size": 6, "tp": 2, "etp": 2}])
def test_every_stack_starts_at_16_bytes_in_16_bits(sizes: dict[str, int], layout: ExpertLayout) -> None:
    """A grouped matrix product on GPUs takes no other address. The last number of a value head is its bias."""
    shape = ModelShape.from_hf({**MOE, "moe_intermediate_size": 60})
    model = ShardedModel(shape=shape, layout=ParallelLayout.of(TrainerConfig(**sizes), layers=shape.layers, experts=8))
    for rank, value_head in itertools.product((1, 3, 16), (False, True)):
        spec = AdapterSpec(
            name="a",
            base_model="m",
            rank=rank,
            alpha=1.0,
            target_modules=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
            expert_layout=layout,
            value_head=value_head,
        )
        for bank in arrange(model, spec, 0).banks:
            assert (bank.a * 2 % 16, bank.b * 2 % 16) == (0, 0), (rank, value_head, bank)

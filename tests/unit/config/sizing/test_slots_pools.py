"""Which process sits on which node and device."""

from __future__ import annotations

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.sizing.slots import pools_of, seats_of
from areal_lora.errors import ConfigError
from tests.support.paths import EXAMPLES

MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
ON_CPUS = ("cluster.device=cpu", "rollout.tp=1")
HETJOB = (
    "cluster.nodes=1",
    "trainer.world_size=16",
    "rollout.servers=4",
    "cluster.slurm.components=[{roles: [trainer], nodes: 2}, {roles: [rollout], nodes: 2, devices_per_node: 4}, "
    "{roles: [controller]}]",
)


def places(*overrides: str) -> tuple[list[int], list[int], int]:
    """Nodes of the trainer ranks, of the servers and of the controller."""
    seats = seats_of(load_config([MOE], list(overrides)))
    return [s.node for s in seats.trainer], [s.node for s in seats.servers], seats.controller.node


@pytest.mark.parametrize(
    ("sizes", "ranks", "servers"),
    [
        ("trainer.world_size=2 rollout.servers=2 cluster.nodes=2", [0, 0], [1, 1]),
        ("trainer.world_size=2 rollout.servers=2 cluster.nodes=1", [0, 0], [0, 0]),
        ("trainer.world_size=4 rollout.servers=2 cluster.nodes=2 cluster.devices_per_node=2", [0, 0, 1, 1], [1, 1]),
        ("trainer.world_size=2 rollout.servers=2 cluster.nodes=3 cluster.devices_per_node=1", [0, 1], [2, 2]),
        ("trainer.world_size=2 rollout.servers=5 cluster.nodes=3", [0, 0], [1, 1, 1, 2, 2]),
        ("trainer.world_size=3 rollout.servers=1 cluster.nodes=1 cluster.devices_per_node=2", [0, 0, 0], [0]),
    ],
)
def test_on_cpus_servers_have_the_nodes_without_ranks(sizes: str, ranks: list[int], servers: list[int]) -> None:
    assert places(*ON_CPUS, *sizes.split()) == (ranks, servers, 0)


def test_six_ranks_and_a_server_of_two_share_a_node() -> None:
    one = ["trainer.world_size=6", "trainer.tp=2", "trainer.ep=2", "rollout.servers=1", "cluster.nodes=1"]
    seats = seats_of(load_config([MOE], one))
    assert [s.devices for s in seats.trainer] == [(i,) for i in range(6)]
    assert [(s.node, s.devices) for s in seats.servers] == [(0, (6, 7))]
    assert seats.local_ranks == tuple(range(6))


def test_components_number_their_nodes_one_after_the_other() -> None:
    config = load_config([MOE], list(HETJOB))
    assert [(p.name, p.first_node, p.nodes, p.devices_per_node) for p in pools_of(config.cluster)] == [
        ("trainer", 0, 2, 8),
        ("rollout", 2, 2, 4),
        ("controller", 4, 1, 0),
    ]
    assert config.cluster.total_nodes == 5
    seats = seats_of(config)
    assert [(s.node, s.devices) for s in seats.servers] == [(2, (0, 1)), (2, (2, 3)), (3, (0, 1)), (3, (2, 3))]
    assert seats.controller.node == 4
    assert seats.local_ranks == (*range(8), *range(8))


def test_what_has_no_room_names_the_nodes_of_its_component() -> None:
    with pytest.raises(ConfigError, match=r"components.1.nodes: server 4 of 2 devices has no room on 2 nodes of 4"):
        seats_of(load_config([MOE], [*HETJOB, "rollout.servers=5"]))

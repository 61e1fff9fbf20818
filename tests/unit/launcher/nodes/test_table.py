"""What node 0 knows of the other nodes, as data: time and reports are passed in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from areal_lora.config.sections.run import ClusterConfig
from areal_lora.errors import ConfigError
from areal_lora.launcher.nodes.table import LOST_S, AgentReport, NodeOrders, NodeTable, node_rank
from areal_lora.launcher.plan import SERVER, TRAINER, ProcessSpec


def spec(index: int = 0, node: int = 1, role: str = SERVER) -> ProcessSpec:
    return ProcessSpec(role=role, index=index, argv=("x", "-m", "y"), env={"A": "1"}, node=node, cpus=2, devices=(0, 1))


def report(node: int = 1, agent: str = "a", ended: dict[int, int] | None = None, leaves: bool = False) -> AgentReport:
    return AgentReport(node=node, agent=agent, host=f"host-{agent}", pid=7, ended=ended or {}, leaves=leaves)


def table(nodes: int = 3) -> NodeTable:
    return NodeTable(nodes, lambda name: Path(f"{name}.log"))


def test_a_start_is_wanted_until_its_end_is_noted_and_that_counts_once() -> None:
    made = table()
    assert made.answer(report(), 0.0) == NodeOrders()
    assert made.missing() == {2}
    made.start(spec(0))
    made.start(spec(1))
    wanted = made.answer(report(), 1.0)
    assert list(wanted.starts.values()) == [spec(0), spec(1)]
    assert msgspec.json.decode(msgspec.json.encode(wanted), type=NodeOrders) == wanted, "as agents read it"
    assert made.answer(report(), 2.0).starts == wanted.starts, "whether or not the last answer arrived"
    first, second = wanted.starts
    assert list(made.answer(report(ended={first: 75}), 3.0).starts) == [second]
    made.answer(report(ended={first: 75}), 3.5)  # the answer was lost
    assert made.take_exits([spec(1)]) == []
    (ended,) = made.take_exits()
    assert (ended.spec, ended.code, ended.log, ended.lost) == (spec(0), 75, Path("server-0.log"), False)
    assert made.take_exits() == []
    assert made.running() == [spec(1)]
    made.start(spec(0))
    assert first not in made.answer(report(), 4.0).starts, "numbers do not recur"


def test_what_is_ended_is_wanted_no_more_and_its_own_end_is_no_news() -> None:
    made = table()
    made.answer(report(), 0.0)
    made.start(spec(0))
    made.start(spec(1))
    _, number = made.answer(report(), 0.5).starts
    made.end([spec(1), spec(5)], "was ended")
    assert number not in made.answer(report(), 1.0).starts
    made.answer(report(ended={number: 0}), 2.0)
    assert [(e.spec, e.code, e.how(), e.lost) for e in made.take_exits()] == [(spec(1), -9, "was ended", False)]


@pytest.mark.parametrize("leaves", [False, True], ids=["silent", "leaves"])
def test_processes_of_a_lost_node_have_ended_and_the_next_agent_gets_the_next_starts_only(leaves: bool) -> None:
    made = table()
    made.answer(report(), 0.0)
    made.answer(report(2, "b"), LOST_S)
    made.start(spec(0))
    made.start(spec(0, node=2, role=TRAINER))
    for now in range(int(LOST_S) + 1):
        made.look(float(now))
    assert made.missing() == set()
    made.answer(report(leaves=True), LOST_S) if leaves else made.look(LOST_S + 0.1)
    assert made.missing() == {1}
    (ended,) = made.take_exits()
    assert ended.lost
    assert ended.how() == "was lost with node 1 (host-a, process 7)"
    assert made.running() == [spec(0, node=2, role=TRAINER)]
    assert made.notes[-1].startswith("node 1 (host-a, process 7) is lost: ")
    assert made.answer(report(agent="c"), LOST_S + 1.0).starts == {}
    made.start(spec(0))
    assert list(made.answer(report(agent="c"), LOST_S + 2.0).starts.values()) == [spec(0)]


def test_an_agent_that_was_lost_and_returns_has_nothing_that_is_wanted() -> None:
    made = table()
    made.answer(report(), 0.0)
    made.start(spec(0))
    (number,) = made.answer(report(), 0.1).starts
    for now in range(int(LOST_S) + 2):
        made.look(float(now))
    assert made.answer(report(ended={number: 0}), LOST_S + 2.0).starts == {}
    assert [e.lost for e in made.take_exits()] == [True], "what it reports afterwards is not news"
    assert made.missing() == {2}


def test_the_end_of_a_connection_is_the_loss_of_its_agent_unless_it_has_another_one() -> None:
    made = table()
    made.answer(report(), 0.0, b"first")
    made.answer(report(2, "b"), 0.0, b"other")
    made.answer(report(), 0.1, b"second")
    made.disconnected(b"first")
    assert made.missing() == set()
    assert made.clients() == [b"second", b"other"]
    made.disconnected(b"second")
    assert made.missing() == {1}


def test_time_in_which_the_launcher_did_not_look_is_no_silence() -> None:
    made = table()
    made.answer(report(), 0.0)
    made.look(0.0)
    made.look(10 * LOST_S)
    assert made.missing() == {2}


def test_of_two_agents_of_one_node_the_first_keeps_it_while_it_is_alive() -> None:
    made = table()
    made.answer(report(agent="a"), 0.0)
    made.start(spec(0))
    assert made.answer(report(agent="b"), 1.0) == NodeOrders(), (
        "neither refused nor given anything: the first may be dead"
    )
    assert len(made.answer(report(agent="a"), 1.2).starts) == 1
    assert made.answer(report(agent="b"), 1.4).refused == "it is that of host-a, process 7"
    for now in range(int(LOST_S) + 3):
        made.look(float(now))
        made.answer(report(agent="c"), float(now))
    assert [e.lost for e in made.take_exits()] == [True]
    assert "node 1 (host-c, process 7) is there" in made.notes


@pytest.mark.parametrize("node", [0, 3])
def test_a_node_that_the_run_does_not_have_is_refused(node: int) -> None:
    assert table().answer(report(node), 0.0).refused == "this run has nodes 0 to 2, and the launcher is on node 0"


def test_the_end_of_the_run_reaches_all_agents_and_is_no_loss() -> None:
    made = table()
    made.answer(report(), 0.0)
    made.start(spec(0))
    made.code, made.now, made.stacks = 70, True, 2
    wanted = made.answer(report(), 1.0)
    assert (wanted.code, wanted.now, wanted.stacks) == (70, True, 2)
    made.answer(report(leaves=True), 2.0)
    assert made.clients() == []
    assert not any("lost" in note for note in made.notes)


def cluster(nodes: int = 3, kind: str = "nodes") -> ClusterConfig:
    return ClusterConfig.model_validate({"kind": kind, "nodes": nodes})


def test_rank_of_a_node_is_that_of_the_first_variable_that_is_set() -> None:
    given = {"JOB_COMPLETION_INDEX": "2", "NODE_RANK": ""}
    assert node_rank(cluster(), given) == 2
    assert node_rank(cluster(), given | {"PET_NODE_RANK": "0"}) == 0
    assert node_rank(cluster(), given | {"PET_NODE_RANK": "0", "AREAL_LORA_NODE_RANK": "1"}) == 1
    assert node_rank(cluster(kind="local"), given) == 0, "an index of another job"


@pytest.mark.parametrize("text", ["3", "-1", "1.0", "²", "one"])
def test_a_rank_that_the_run_does_not_have_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"PET_NODE_RANK: .* is no rank among cluster.nodes = 3") as caught:
        node_rank(cluster(), {"PET_NODE_RANK": text})
    assert "0 to 2" in caught.value.fix


def test_without_a_rank_the_reason_names_all_variables() -> None:
    with pytest.raises(ConfigError, match=r"AREAL_LORA_NODE_RANK: .*NODE_RANK, PET_NODE_RANK, JOB_COMPLETION_INDEX"):
        node_rank(cluster(), {"RANK": "1"})


def test_the_number_of_a_start_does_not_depend_on_the_spec() -> None:
    made = table()
    made.answer(report(), 0.0)
    made.start(spec(0))
    made.start(replace(spec(0), cpus=1))
    assert len(made.answer(report(), 1.0).starts) == 2

"""The agent of a node whose launcher is lost, whose programs cannot be started, or whose run is over."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.errors import ExitCode
from areal_lora.launcher.nodes import agent
from areal_lora.obs.report.summary import write_summary
from tests.support.launcher.driven import Run
from tests.support.launcher.node_programs import WAITS, until
from tests.support.obs.three_adapters import make_three, three_config
from tests.support.paths import EXAMPLES

NODES = ["cluster.kind=nodes", "cluster.nodes=2", "cluster.bind=0.0.0.0"]


def test_an_agent_ends_its_processes_with_their_launcher_and_follows_the_next_one(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SILENT_S", "1")
    processes = (("trainer", 0, until(tmp_path / "go")), ("trainer", 1, WAITS, 1))
    first, follower = begin(*processes, overrides=NODES), begin(overrides=NODES, node=1)
    first.wait_for(lambda: "works" in first.log("trainer-1"))
    first.process.kill()
    first.wait_for(lambda: not first.alive())
    follower.wait_for(lambda: not follower.alive())
    assert follower.process.poll() is None
    before = first.log("trainer-1").count("works")
    second = begin(*processes, overrides=NODES)
    second.wait_for(lambda: second.log("trainer-1").count("works") > before)
    (tmp_path / "go").touch()
    assert [run.end()[0] for run in (second, follower)] == [ExitCode.DONE] * 2


def test_a_program_that_cannot_be_started_ends_the_run_with_the_reason(begin: Callable[..., Run]) -> None:
    launcher = begin(("trainer", 0, WAITS), ("trainer", 1, ["/no/such/python"], 1), overrides=NODES)
    follower = begin(overrides=NODES, node=1)
    code, printed = launcher.end()
    assert code == follower.end()[0] == ExitCode.MISSING
    assert "trainer-1 cannot be started with /no/such/python: No such file or directory" in printed


def test_without_a_launcher_an_agent_ends_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "JOIN_S", 0.5)
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    said = list[str]()
    config = load_config(files, [f"run.root={tmp_path}", *NODES])
    assert agent.run_agent(config, config.run_folder, 1, fresh=False, note=said.append) == ExitCode.TEMPORARY
    assert "start the same command on node 0" in said[-1]
    assert not os.listdir(tmp_path), "it has written nothing"


@pytest.mark.parametrize(("steps", "fresh"), [(3, False), (4, False), (3, True)])
def test_an_agent_of_a_run_that_is_done_ends_well_unless_a_new_one_is_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, fresh: bool
) -> None:
    monkeypatch.setattr(agent, "JOIN_S", 0.5)
    folder, config = make_three(tmp_path / "x"), three_config()
    write_summary(folder, wall_s=1.0, adapters={}, report_path=folder.report)
    wanted = {"alpha": 8, "beta": steps, "gamma": 4}
    adapters = [each.model_copy(update={"steps": wanted[each.name]}) for each in config.adapters]
    code = agent.run_agent(config.model_copy(update={"adapters": adapters}), folder, 1, fresh=fresh, note=print)
    assert code == (ExitCode.DONE if (steps, fresh) == (3, False) else ExitCode.TEMPORARY)

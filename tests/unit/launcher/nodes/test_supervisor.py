"""Runs on three nodes, which are agents on this machine. Their processes are small programs."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.errors import ExitCode
from areal_lora.run_folder.events import count_restarts, last_end
from areal_lora.run_folder.paths import RunFolder
from tests.support.launcher.driven import Run
from tests.support.launcher.node_programs import NODES, TERMED, WAITS, until, works


def test_a_run_starts_when_all_nodes_are_there_and_agents_end_with_its_code(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    processes = (
        ("server", 0, TERMED, 2),
        ("controller", 0, TERMED),
        ("trainer", 0, until(tmp_path / "go")),
        ("trainer", 1, TERMED, 1),
    )
    launcher = begin(*processes, overrides=NODES)
    second = begin(overrides=NODES, node=2)
    launcher.wait_for(lambda: "is there" in launcher.printed)
    assert not list((launcher.folder / "logs").glob("*.log")), "nothing starts without node 1"
    first = begin(overrides=NODES, node=1)
    for name in ("server-0", "controller-0", "trainer-0", "trainer-1"):
        launcher.wait_for(works(launcher, name))
    assert "waits for node 1, 2: start the same command there, with AREAL_LORA_NODE_RANK" in launcher.printed
    assert (len(first.alive()), len(second.alive())) == (2, 2), "a process and the guardian on each node"
    twin, wrong = begin(overrides=NODES, node=1), begin(overrides=NODES, node=7)
    for refused, reason in ((twin, f"process {first.process.pid}"), (wrong, "this run has nodes 0 to 2")):
        code, printed = refused.end()
        assert code == ExitCode.FAILED, "the command line prints the error and exits with 64"
        assert "ConfigError: cluster.kind: node 0 refuses" in printed
        assert reason in printed
    (tmp_path / "go").touch()
    for run in (launcher, first, second):
        assert run.end()[0] == ExitCode.DONE
        assert run.alive() == []
    assert launcher.log("server-0") == "works\nends\n"
    assert not RunFolder(launcher.folder, str(launcher.process.pid)).endpoint("launcher-0").exists()


def test_a_failure_and_a_stop_reach_the_agents(begin: Callable[..., Run], tmp_path: Path) -> None:
    broken = f"{until(tmp_path / 'go')}\nraise SystemExit(65)"
    for trainer, code in ((broken, ExitCode.CONTRADICTION), (TERMED, ExitCode.INTERRUPTED)):
        runs = [
            begin(("controller", 0, WAITS), ("trainer", 0, WAITS), ("trainer", 1, trainer, 2), overrides=NODES),
            *(begin(overrides=NODES, node=node) for node in (1, 2)),
        ]
        before = runs[0].log("trainer-1").count("works")
        runs[0].wait_for(works(runs[0], "trainer-1", before + 1))
        if code == ExitCode.CONTRADICTION:
            (tmp_path / "go").touch()
        else:
            runs[0].process.send_signal(signal.SIGTERM)
        assert [run.end()[0] for run in runs] == [code] * 3, runs[0].printed
        assert not any(run.alive() for run in runs)
    assert "ends" in runs[0].log("trainer-1")


def test_a_lost_node_gets_its_processes_back_and_the_others_of_the_unit_are_restarted(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    processes = (
        ("server", 0, WAITS),
        ("server", 1, WAITS, 2),
        ("controller", 0, WAITS),
        ("trainer", 0, until(tmp_path / "go")),
        ("trainer", 1, "import time; print('works', time.monotonic(), flush=True); time.sleep(600)", 1),
    )
    launcher = begin(*processes, overrides=[*NODES, "cluster.min_servers=2"])
    agents = [begin(overrides=NODES, node=node) for node in (1, 2)]
    for name in ("server-1", "trainer-1"):
        launcher.wait_for(works(launcher, name))
    folder = RunFolder(launcher.folder, str(launcher.process.pid))
    for run in agents:
        run.process.kill()
    agents[1].wait_for(lambda: not agents[1].alive())  # the guardian
    launcher.wait_for(lambda: "is lost: the command there was killed, or its connection closed" in launcher.printed)
    launcher.wait_for(lambda: "server-1 was lost with node 2" in launcher.printed)
    launcher.wait_for(folder.excluded("server-1").exists)
    launcher.wait_for(lambda: "trainer-1 was lost with node 1" in launcher.printed)
    assert works(launcher, "trainer-0")(), "no rank starts without the others"
    agents.append(begin(overrides=NODES, node=1))
    launcher.wait_for(lambda: f"process {agents[2].process.pid}) is there" in launcher.printed)
    time.sleep(1.0)  # in which the ranks would start
    before = time.monotonic()
    agents.append(begin(overrides=NODES, node=2))
    for name in ("server-1", "trainer-0", "trainer-1"):
        launcher.wait_for(works(launcher, name, 2))
    assert float(launcher.log("trainer-1").split()[-1]) > before, "the run needs two servers"
    assert works(launcher, "server-0")()
    assert not folder.excluded("server-1").exists()
    (tmp_path / "go").touch()
    for run in (launcher, *agents[2:]):
        assert run.end()[0] == ExitCode.DONE, launcher.printed
    assert count_restarts(folder) == {"server-1": 1, "trainer": 1}


def test_an_agent_that_is_stopped_leaves_at_once(begin: Callable[..., Run], tmp_path: Path) -> None:
    launcher = begin(("trainer", 0, until(tmp_path / "go")), ("server", 0, TERMED, 1), overrides=NODES)
    agents = [begin(overrides=NODES, node=node) for node in (1, 2)]
    launcher.wait_for(works(launcher, "server-0"))
    agents[0].process.send_signal(signal.SIGTERM)
    assert agents[0].end()[0] == ExitCode.INTERRUPTED
    assert agents[0].alive() == []
    launcher.wait_for(lambda: "is lost: the command there has ended" in launcher.printed)
    agents[0] = begin(overrides=NODES, node=1)
    launcher.wait_for(works(launcher, "server-0", 2))
    (tmp_path / "go").touch()
    assert [run.end()[0] for run in (launcher, *agents)] == [ExitCode.DONE] * 3


def test_a_node_that_never_joins_is_the_recorded_end_of_the_run(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOIN_S", "0.5")
    launcher = begin(("trainer", 0, WAITS), ("server", 0, WAITS, 1), overrides=NODES)
    assert "ProcessFailed: node 1, 2 did not join within" in launcher.end()[1]
    assert (end := last_end(RunFolder(launcher.folder))) is not None
    assert end.code == ExitCode.COMPONENT_FAILED
    assert str(end).startswith("its launcher failed: node 1, 2 did not join within")
    assert launcher.alive() == []

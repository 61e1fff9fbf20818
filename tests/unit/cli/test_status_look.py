"""The status of run folders in all states, without a process or Slurm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from areal_lora.cli import status as module
from areal_lora.cli.app import main
from areal_lora.cli.status import adapter_rows, look
from areal_lora.config.models import Config
from areal_lora.config.recorded import read_config_here
from areal_lora.config.sections.run import ServiceConfig
from areal_lora.errors import ExitCode
from areal_lora.launcher.slurm.job_query import write_hosts
from areal_lora.launcher.slurm.states import JobRecord
from areal_lora.launcher.start import Owner
from areal_lora.library.runs import load_run
from areal_lora.obs.metrics.records import AdapterStateRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.page import write_report
from areal_lora.run_folder.events import EndEvent, RestartEvent, StartEvent, now_utc, write_event
from areal_lora.run_folder.paths import DesiredAdapter, DesiredAdapters, RunFolder, write_desired
from areal_lora.run_folder.rendezvous import publish_endpoint
from areal_lora.run_folder.status import beat, set_status
from areal_lora.types import AdapterPhase
from tests.support.obs.fake_run import make_run
from tests.support.obs.three_adapters import REASON, make_three


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(make_run(tmp_path / "x", steps=12))
    set_status(folder, "trainer", 0, "step 12: training toy")
    write_event(folder, StartEvent(at=now_utc(), resumes=False))
    write_event(folder, RestartEvent(at=now_utc(), process="server-0", how="was killed by SIGKILL"))
    (folder.adapter_checkpoints("toy") / "v000011").mkdir(parents=True)
    return folder


def config(folder: RunFolder, **cluster: object) -> Config:
    plain = read_config_here(folder)
    return plain.model_copy(update={"cluster": plain.cluster.model_copy(update=cluster)})


def test_figures_come_from_the_records(folder: RunFolder) -> None:
    seen = look(folder, config(folder))
    assert (seen.steps_done, seen.steps) == (12, 40)
    assert seen.accuracy_version == 10
    assert seen.checkpoints == {"toy": 11}
    assert seen.restarts["server-0"] >= 1
    assert [p.name for p in seen.processes] == ["trainer-0", "trainer-1", "controller-0", "server-0"]
    assert seen.processes[0].doing == "step 12: training toy"
    assert (seen.state, seen.eta_s) == ("stopped", None)
    assert "areal-lora resume" in seen.why


def test_a_long_run_is_read_from_its_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = look(folder, config(folder))
    read = module.newest_records
    monkeypatch.setattr(module, "newest_records", lambda run: read(run, 6_000))
    assert look(folder, config(folder)).steps_done == whole.steps_done
    assert len(read(folder, 6_000)) < len(read(folder)) / 2


def test_a_run_with_a_launcher_runs_and_has_an_eta(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "holder", lambda run: msgspec.structs.replace(Owner.me(), pid=12))
    monkeypatch.setattr(module, "local_processes", lambda run: {"trainer-0": 13})
    seen = look(folder, config(folder))
    assert (seen.state, seen.launcher_pid) == ("running", 12)
    assert seen.eta_s is not None
    states = {p.name: (p.alive, p.pid) for p in seen.processes}
    assert states["trainer-0"] == (True, 13)
    assert states["server-0"][0] is False


def test_a_watch_shows_the_run_until_its_end(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = [msgspec.structs.replace(Owner.me(), pid=12)] * 2
    monkeypatch.setattr(module, "holder", lambda run: held.pop() if held else None)
    monkeypatch.setattr(module, "local_processes", lambda run: {})
    monkeypatch.setattr(module, "EVERY_S", 0.0)
    assert main(["status", str(folder), "--watch", "--json"]) == ExitCode.DONE
    seen = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert seen == ["running", "running", "stopped"]


def test_the_end_of_a_run_is_told_from_its_summary(folder: RunFolder) -> None:
    folder.summary.write_text("{}")
    assert look(folder, config(folder)).state == "done"


def test_a_run_of_another_machine_shows_by_its_heartbeats(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    beat(folder, "controller", 0)
    assert look(folder, config(folder)).state == "unknown", "its lock cannot be looked at"
    folder.lock.touch()
    assert look(folder, config(folder)).state == "stopped", "a moment after the end: no launcher holds the lock"


def test_a_rank_without_an_address_has_the_number_of_its_node(folder: RunFolder) -> None:
    publish_endpoint(folder, "trainer", 0, {"rank": 1})
    plain = config(folder, kind="nodes", nodes=2)
    assert plain.trainer.world_size == 2
    assert plain.cluster.devices_per_node >= 2
    for per_node, node in ((2, "node 0"), (1, "node 1")):
        cluster = plain.cluster.model_copy(update={"device": "cuda", "devices_per_node": per_node, "nodes": 3})
        seen = look(folder, plain.model_copy(update={"cluster": cluster}))
        nodes = {one.name: one.node for one in seen.processes}
        assert (nodes["trainer-0"], nodes["trainer-1"]) == (os.uname().nodename, node)


@pytest.mark.parametrize(
    ("record", "state", "text"),
    [
        (JobRecord(id="7", state="RUNNING", nodes="n[1-2]"), "running", ""),
        (JobRecord(id="7", state="PENDING", reason="Resources"), "waiting", "the job waits: Resources"),
        (JobRecord(id="7", state="PENDING", reason="BeginTime", restarts=2), "waiting", "start 3"),
        (JobRecord(id="7", state="COMPLETING"), "ending", "awaited"),
        (JobRecord(id="7", state="FAILED", code=65), "stopped", "violated a contract"),
        (JobRecord(id="7", why="it ended some minutes ago"), "stopped", "does not know job 7"),
    ],
    ids=lambda value: f"{value.state}-{value.reason}" if isinstance(value, JobRecord) else None,
)
def test_the_state_of_a_job_is_that_of_the_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, record: JobRecord, state: str, text: str
) -> None:
    folder.job_id.write_text("7\n")
    monkeypatch.setattr(module, "look_up", lambda job: record)
    seen = look(folder, config(folder, kind="slurm"))
    assert seen.job is not None
    assert (seen.state, seen.job.id, seen.requeues) == (state, "7", record.restarts)
    assert text in seen.why


def test_processes_of_a_job_are_where_their_steps_are_and_a_lost_node_is_named(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.job_id.write_text("7\n")
    for step, hosts in (
        ("trainer.9", "n1 n1"),
        ("trainer.10", "n1 n2"),
        ("controller-0.1", "n1"),
        ("server-0.1", "n3"),
    ):
        (folder.steps / step).mkdir(parents=True)
        write_hosts(folder.steps / step, hosts.split())
    monkeypatch.setattr(module, "look_up", lambda job: JobRecord(id="7", state="RUNNING", nodes="n[1-2]"))
    monkeypatch.setattr(module, "lost_nodes", lambda hosts: {"n3"} & hosts)
    beat(folder, "server", 0)
    seen = {one.name: one for one in look(folder, config(folder, kind="slurm")).processes}
    nodes = {name: one.node for name, one in seen.items()}
    assert nodes == {"trainer-0": "n1", "trainer-1": "n2", "controller-0": "n1", "server-0": "n3 (lost)"}
    assert seen["server-0"].alive is False, "however fresh its heartbeat is"
    assert seen["controller-0"].alive is None


def test_several_adapters_have_a_row_each_and_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_three(tmp_path / "x", turns=8)
    (folder.adapter_checkpoints("beta") / "v000002").mkdir(parents=True)
    monkeypatch.setattr(module, "holder", lambda run: msgspec.structs.replace(Owner.me(), pid=12))
    monkeypatch.setattr(module, "local_processes", lambda run: {})
    seen = look(folder, read_config_here(folder))
    assert (seen.steps_done, seen.steps, seen.reward, seen.accuracy) == (3 + 3 + 2, 8 + 8 + 4, None, None)
    assert seen.eta_s == pytest.approx(2.0 * (5 + 2)), "beta has failed: its steps do not come"
    alpha, beta, gamma = seen.adapters
    assert (beta.state, beta.reason, beta.steps_done, beta.steps) == (AdapterPhase.FAILED, REASON, 3, 8)
    assert (beta.checkpoint, alpha.checkpoint) == (2, None)
    assert (gamma.steps_done, gamma.steps, gamma.reward, gamma.accuracy_version) == (2, 4, 0.25, 0)
    assert [round(one.share, 3) for one in seen.adapters] == [0.6, 0.3, 0.1]


def test_an_adapter_that_ended_long_ago_keeps_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_three(tmp_path / "x")
    read = module.newest_records
    monkeypatch.setattr(module, "newest_records", lambda run: read(run, 2_000))
    assert {record.adapter for record in read(folder, 2_000)} == {"alpha"}
    alpha, beta, gamma = look(folder, read_config_here(folder)).adapters
    assert (beta.state, beta.reason, beta.steps_done) == (AdapterPhase.FAILED, REASON, 3)
    assert (gamma.state, gamma.steps_done, gamma.reward) == (AdapterPhase.DONE, 4, None)
    assert (alpha.steps_done, alpha.share) == (8, 1.0)


def test_a_run_that_failed_says_why(folder: RunFolder) -> None:
    [plain] = [look(folder, config(folder))]
    assert plain.failure is None
    assert "recorded no cause" in plain.why
    error = "UserCodeError: TypeError: x (mine.py:9) (fix: correct the code)"
    end = EndEvent(at=now_utc(), code=64, process="trainer-0", how="exited with code 64", error=error)
    write_event(folder, end)
    failed = look(folder, config(folder))
    assert (failed.state, failed.failure) == ("stopped", end)
    assert failed.why == f"trainer-0 exited with code 64: {error} (then: areal-lora resume {folder} continues)"
    assert f"Ended with exit code 64: trainer-0 exited with code 64: {error}" in write_report(folder).read_text()
    assert load_run(folder.path).failure == end
    write_event(folder, StartEvent(at=now_utc(), resumes=True))
    assert look(folder, config(folder)).failure is None, "another start has other reasons"


def test_a_run_with_a_failed_adapter_is_not_done(tmp_path: Path) -> None:
    folder = make_three(tmp_path / "x")
    folder.summary.write_text("{}")
    seen = look(folder, read_config_here(folder))
    assert seen.state == "stopped"
    assert seen.why == f"beta failed (fix: areal-lora resume {folder} tries again)"
    with MetricsWriter(folder) as writer:
        writer.write(AdapterStateRecord(adapter="beta", state=AdapterPhase.DONE, version=8))
    assert look(folder, read_config_here(folder)).state == "done"


def test_adapters_that_joined_have_rows_of_their_own(tmp_path: Path) -> None:
    folder = make_three(tmp_path / "x")
    [first, *_] = read_config_here(folder).model_dump(mode="json")["adapters"]
    section = {key: value for key, value in first.items() if key != "name"}
    client = {"rank": 4, "alpha": 4, "target_modules": ["linear_qkv"], "workflow": {"kind": "client"}}
    new = DesiredAdapter(name="new", incarnation=1, adapter=section | {"steps": 5})
    write_desired(
        folder, DesiredAdapters(generation=1, adapters=(new, DesiredAdapter(name="sdk", incarnation=1, adapter=client)))
    )
    with MetricsWriter(folder) as writer:
        writer.write(AdapterStateRecord(adapter="new.1", state=AdapterPhase.ACTIVE, version=2, steps=5))
    service = read_config_here(folder).model_copy(update={"service": ServiceConfig()})
    seen = look(folder, service)
    assert [one.name for one in seen.adapters] == ["alpha", "beta", "gamma", "new.1", "sdk.1"]
    assert [row[2] for row in adapter_rows(seen.adapters)[-2:]] == ["2/5", "0"]
    alone = look(folder, service.model_copy(update={"adapters": []}))
    assert [(one.name, one.state) for one in alone.adapters] == [("new.1", "active"), ("sdk.1", "pending")]


def test_one_adapter_has_no_row_of_its_own(folder: RunFolder) -> None:
    assert look(folder, config(folder)).adapters == []

"""``areal-lora track`` with the real SDKs: W&B offline, MLflow with an SQLite store; read back without this package."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from areal_lora.cli.find_run import local_processes
from areal_lora.config.recorded import write_config
from areal_lora.obs.metrics.records import CheckpointRecord, Record, ResumeRecord, StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.summary import write_summary
from areal_lora.run_folder.events import StartEvent, write_event
from areal_lora.run_folder.paths import RunFolder
from tests.support.cli.command import COMMAND, areal_lora
from tests.support.clocks import wait_until
from tests.support.obs.fake_run import make_config, make_run
from tests.support.obs.records import step_record
from tests.support.obs.three_adapters import records, three_config
from tests.support.paths import ROOT
from tests.support.sizes import sample
from tests.support.tracking.trackers import Curves, Mlflow, Swanlab, Trackio, Wandb, WandbOnline
from tests.support.tracking.wandb_server import Runs, wandb_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SECRET = "not-for-anyone"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a home")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Runs]]:
    with wandb_server() as both:
        yield both


@pytest.fixture(params=[Wandb, Mlflow, Trackio, Swanlab])
def tracker(request: pytest.FixtureRequest, home: Path) -> Wandb | Mlflow | Trackio | Swanlab:
    made: Wandb | Mlflow | Trackio | Swanlab = request.param(home=home)
    return made


@pytest.fixture(params=sample(["wandb-online", "mlflow", "wandb"], 1))
def any_tracker(request: pytest.FixtureRequest, home: Path, server: tuple[str, Runs]) -> Wandb | WandbOnline | Mlflow:
    if request.param == "wandb-online":
        return WandbOnline(home=home, url=server[0], runs=server[1])
    return Wandb(home=home) if request.param == "wandb" else Mlflow(home=home)


def as_tensorboard(folder: RunFolder, tracker: object) -> Curves:
    """What TensorBoard has, under the names that the tracker takes."""
    events = EventAccumulator(str(folder.tensorboard), size_guidance={"scalars": 0})
    events.Reload()
    at = "_at_" if isinstance(tracker, Mlflow) else "@"
    tags = {tag: tag.removeprefix("toy/").replace("@", at) for tag in events.Tags()["scalars"]}  # of its only adapter
    return {tags[tag]: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags}


def single(curves: Curves) -> Curves:
    """TensorBoard's values have four bytes."""
    return {tag: [(step, float(np.float32(value))) for step, value in found] for tag, found in curves.items()}


def sorted_by_step(curves: Curves) -> Curves:
    return {tag: sorted(found) for tag, found in curves.items()}


def begin(folder: RunFolder) -> None:
    write_event(folder, StartEvent(at="2026-01-01T00:00:00Z", resumes=False))


def test_a_finished_run_has_the_curves_of_tensorboard_its_configuration_and_its_end(
    tracker: Wandb | Mlflow | Trackio | Swanlab, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "a run")
    folder.path.mkdir()
    begin(folder)
    make_run(folder.path)
    config = make_config()
    slurm = config.cluster.slurm.model_copy(update={"setup": [f"export KEY={SECRET}"]})
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"slurm": slurm})})
    write_config(folder, config)
    write_summary(folder, wall_s=80.0, adapters={}, report_path=folder.report)
    done = areal_lora("track", folder, *tracker.options, cwd=tmp_path, env=tracker.env)
    assert done.returncode == 0, done.stderr
    assert "\nthe run is done; everything is sent\n" in done.stdout
    if isinstance(tracker, Wandb | Mlflow):
        assert (done.stderr, len(done.stdout.splitlines())) == ("", 2)

    expected = as_tensorboard(folder, tracker)
    assert len(expected) > 50
    assert sorted_by_step(single(tracker.curves(folder.path))) == expected
    if isinstance(tracker, Wandb):
        of_wandb(folder, tracker.read(folder.path))
    elif isinstance(tracker, Mlflow):
        of_mlflow(folder, tracker, tmp_path)
    secrets = (SECRET.encode(), b"0123456789" * 4)
    files = [path for place in (folder.tracking, tmp_path / "mlruns") for path in place.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if any(secret in path.read_bytes() for secret in secrets)]


def of_wandb(folder: RunFolder, found: dict) -> None:  # type: ignore[type-arg]
    assert (found["project"], found["entity"], found["name"], found["exit"]) == ("a project", "a-team", "a run", 0)
    assert found["id"].startswith("a-run-")
    assert found["config"]["adapters"][0]["rank"] == 8
    assert found["summary"]["state"] == "done"
    assert found["summary"]["summary/steps"] == 40
    assert found["axes"]["*"] == "train/step"
    assert "report.html" in found["files"]
    tables = [row["values"]["samples/held-out"] for row in found["rows"] if "samples/held-out" in row["values"]]
    assert len(tables) == 5
    [folder_of_run] = (folder.tracking / "wandb").glob("offline-run-*")
    table = json.loads((folder_of_run / "files" / tables[0]["path"]).read_text())
    assert table["data"] == [["1+1?", "#### 2", "2", 1.0, None]]
    page = (folder_of_run / "files" / "report.html").read_text()
    assert "&quot;rank&quot;: 8" in page


def of_mlflow(folder: RunFolder, tracker: Mlflow, place: Path) -> None:
    run = tracker.run_id(folder.path)
    [(status,)] = tracker.rows("select status from runs where run_uuid = ?", run)
    assert status == "FINISHED"
    parameters = dict(tracker.rows("select key, value from params where run_uuid = ?", run))
    assert (parameters["adapters.0.rank"], parameters["run.name"]) == ("8", "a run")
    tags = dict(tracker.rows("select key, value from tags where run_uuid = ?", run))
    assert tags["areal_lora.state"] == "done"
    metrics = dict(tracker.rows("select key, value from metrics where run_uuid = ? and key like 'summary/%'", run))
    assert metrics["summary/steps"] == 40
    # Two seconds a step from the recorded start on.
    times = tracker.rows("select step, timestamp from metrics where run_uuid = ? and key = 'train/loss'", run)
    began = 1767225600000
    assert sorted(times) == [(step, began + 2000 * (step + 1)) for step in range(40)]
    assert "&quot;rank&quot;: 8" in next(place.rglob("report.html")).read_text()
    assert json.loads(next(place.glob("mlruns/**/config.json")).read_text())["adapters"][0]["rank"] == 8


def whole_history() -> list[Record]:
    """Of three adapters, each with a checkpoint after every step."""
    found: list[Record] = []
    for record in records():
        found.append(record)
        if isinstance(record, StepRecord):
            found.append(CheckpointRecord(version=record.step + 1, write_s=0.1, adapter=record.adapter))
    return found


@contextmanager
def working(folder: RunFolder) -> Iterator[None]:
    """A launcher holds the folder."""
    with folder.lock.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_a_run_is_followed_over_kill_9_of_the_command_and_a_crash_of_the_trainer(
    any_tracker: Wandb | WandbOnline | Mlflow, tmp_path: Path
) -> None:
    """Three adapters; a half-written line at the end; the step that was undone is in no curve."""
    tracker = any_tracker
    reference, folder = RunFolder(tmp_path / "reference"), RunFolder(tmp_path / "live")
    history = whole_history()
    with MetricsWriter(reference) as writer:
        for record in history:
            writer.write(record)
    lines = reference.metrics.read_bytes().splitlines(keepends=True)
    assert len(lines) == len(history)
    [middle] = [i for i, r in enumerate(history) if isinstance(r, StepRecord) and (r.adapter, r.step) == ("alpha", 4)]
    step = history[middle]
    assert isinstance(step, StepRecord)
    spike = msgspec.structs.replace(step, metrics=step.metrics | {"train/loss": 99.0})
    undone = msgspec.json.encode(spike) + b"\n"
    resumed = msgspec.json.encode(ResumeRecord(version=4, time_s=20.0, adapter="alpha")) + b"\n"

    folder.path.mkdir()
    begin(folder)
    write_config(folder, three_config())
    words = [*COMMAND, "track", folder.path, *tracker.options]
    with working(folder):
        folder.metrics.write_bytes(b"".join(lines[: middle // 2]))
        with subprocess.Popen(words, cwd=tmp_path, env=tracker.env, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert f"{folder} is sent to " in process.stdout.readline()
            wait_until(lambda: tracker.arrived(folder.path) > middle // 4)
            before = tracker.arrived(folder.path)
            with folder.metrics.open("ab") as file:
                file.write(b"".join(lines[middle // 2 : middle]) + undone + lines[middle][:40])
            wait_until(lambda: tracker.arrived(folder.path) > before)
            process.kill()
    whole = folder.metrics.read_bytes().removesuffix(lines[middle][:40])
    folder.metrics.write_bytes(whole + resumed + b"".join(lines[middle:]))
    done = areal_lora("track", folder, *tracker.options, cwd=tmp_path, env=tracker.env)
    assert (done.returncode, done.stderr) == (0, "")
    assert "the run is stopped; everything is sent" in done.stdout
    expected = as_tensorboard(reference, tracker)
    assert {tag.partition("/")[0] for tag in expected} == {"alpha", "beta", "gamma"}
    assert sorted_by_step(single(tracker.curves(folder.path))) == sorted_by_step(expected)


def test_a_dead_tracker_is_one_line(home: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a run", steps=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        env = Mlflow(home=home).env | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        done = areal_lora("track", folder, "--mlflow", address, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith("error: MLflow: "), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_the_process_beside_a_run_is_killed_and_stopped_and_sends_each_line_once(home: Path, tmp_path: Path) -> None:
    """As ``run.trackers`` starts it, with the real Trackio; a stop keeps the step that the resume repeats."""
    tracker, folder = Trackio(home=home), RunFolder(tmp_path / "beside")
    make_run(tmp_path / "other", steps=20)
    lines = RunFolder(tmp_path / "other").metrics.read_bytes().splitlines(keepends=True)
    folder.path.mkdir()
    write_config(folder, make_config())
    words = [sys.executable, "-m", "areal_lora.obs.tracking.main", "--run-folder", folder.path]
    words += ["--index", "0", "--tracker", "trackio"]

    def process() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            words, cwd=ROOT, env=tracker.env | {"PYTHONPATH": f"{tracker.env['PYTHONPATH']}:{ROOT}"}
        )

    folder.metrics.write_bytes(b"".join(lines[:30]))
    with process() as first:
        try:
            wait_until(lambda: tracker.arrived(folder.path) > 5)
            assert local_processes(folder) == {"tracker-0": first.pid}
        finally:
            first.kill()
    last = msgspec.json.encode(step_record(step=40, version=40, time_s=99.0, adapter="toy", loss=99.0)) + b"\n"
    folder.metrics.write_bytes(b"".join(lines[:60]) + last)
    with process() as second:
        try:
            wait_until(lambda: tracker.rows(folder.path)[-1][0] >= 55)
            second.send_signal(signal.SIGTERM)
            assert second.wait(150) == 0
        finally:
            second.kill()
    folder.metrics.write_bytes(b"".join(lines))
    write_summary(folder, wall_s=1.0, adapters={}, report_path=folder.report)
    with process() as third:
        assert third.wait(150) == 0
    rows = [step for step, _ in tracker.rows(folder.path)]
    assert rows == sorted(set(rows))
    single_run = as_tensorboard(RunFolder(tmp_path / "other"), tracker)
    assert sorted_by_step(single(tracker.curves(folder.path))) == single_run


def test_a_missing_package_of_a_tracker_is_one_line_before_anything_starts() -> None:
    files = (f"--config=examples/math/{name}.yaml" for name in ("gsm8k_grpo_megatron_lora_moe", "embedded"))
    done = areal_lora("train", *files, "run.trackers=[swanlab]", cwd=ROOT)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.splitlines()[-1].endswith("(fix: pip install 'areal-lora[swanlab]', or swanlab itself)")

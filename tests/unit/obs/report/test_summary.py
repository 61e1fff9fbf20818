"""The summary against figures counted by hand, and its lines as the last ones printed."""

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from rich.console import Console

from areal_lora.errors import ConfigError
from areal_lora.obs.metrics.records import EvalRecord, PublishRecord, SampleRecord, StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.closing import closing_lines, detail_lines, print_closing
from areal_lora.obs.report.summary import read_summary, write_summary
from areal_lora.run_folder.events import RequeueEvent, RestartEvent, now_utc, write_event
from areal_lora.run_folder.paths import RunFolder
from tests.support.obs.fake_run import make_config
from tests.support.obs.three_adapters import make_three


def small_run(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(make_config().model_dump_json())
    with MetricsWriter(RunFolder(folder)) as writer:
        writer.write(EvalRecord(version=0, step=0, accuracy=0.25, reward_mean=0.5, n=200, tag="before"))
        writer.write(PublishRecord(version=0, total_ms=9.0, probe_mean_abs=1e-7, probe_max_abs=4e-6))
        writer.write(StepRecord(step=0, version=0, time_s=1.0, staleness={0: 10}, dropped={"stale": 1}))
        writer.write(PublishRecord(version=1, total_ms=9.0, probe_mean_abs=3e-7, probe_max_abs=2e-6))
        writer.write(StepRecord(step=1, version=1, time_s=2.0, staleness={1: 4, 2: 0}, dropped={"stale": 3}))
        writer.write(PublishRecord(version=2, total_ms=9.0))
        writer.write(
            EvalRecord(
                version=2,
                step=2,
                accuracy=0.5,
                reward_mean=0.75,
                n=200,
                unscored=3,
                left_out=2,
                tag="after",
                samples=[SampleRecord(prompt="p", completion="c", gold="g", reward=None)],
            )
        )
    for who in ("server-0", "trainer", "server-0"):
        write_event(RunFolder(folder), RestartEvent(at=now_utc(), process=who, how="was killed by SIGKILL"))
    for without in (0, 1):
        write_event(RunFolder(folder), RequeueEvent(at=now_utc(), job="7", why="USR1 arrived", without=without))
    return folder


def write(folder: Path) -> Path:
    return write_summary(
        RunFolder(folder), wall_s=12.3456, adapters={"toy": folder / "adapters" / "toy"}, report_path="r.html"
    )


def test_figures(tmp_path: Path) -> None:
    path = write(small_run(tmp_path))
    values = json.loads(path.read_text())
    digest = values.pop("config_sha256")
    assert len(digest) == 64
    assert values == {
        "run": "fake",
        "model": "tiny/model",
        "seed": 7,
        "steps": 2,
        "wall_s": 12.346,
        "eval_before": 0.25,
        "eval_after": 0.5,
        "eval_reward_before": 0.5,
        "eval_reward_after": 0.75,
        "eval_problems": 200,
        "eval_unscored": 3,
        "eval_left_out": 2,
        "eval_sets": {"held-out": {"accuracy": 0.5, "reward_mean": 0.75, "unscored": 3.0}},
        "publishes": 3,
        "publishes_probed": 2,
        "probe_max_abs_dlogp": 4e-6,
        "probe_mean_abs_dlogp": 3e-7,
        "staleness_histogram": {"0": 10, "1": 4, "2": 0},
        "max_staleness": 1,
        "mean_lag": 0.2857,
        "max_staleness_allowed": 2,
        "dropped": {"stale": 3},
        "restarts": {"server-0": 2, "trainer": 1},
        "requeues": 2,
        "adapter_path": str(tmp_path / "adapters" / "toy"),
        "report_path": "r.html",
    }


def test_the_end_is_five_lines_and_nothing_wraps(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a rather long folder name [with] spaces in it")
    write(folder)
    out = io.StringIO()
    print_closing(RunFolder(folder), Console(file=out, width=30, force_terminal=True))
    result, *lines = out.getvalue().splitlines()
    assert result == "result   2 steps in 0:12, accuracy 0.250 -> 0.500, mean reward 0.500 -> 0.750"
    assert [line.split()[0] for line in lines] == ["adapter", "report", "chat", "resume"]
    chat, resume = (shlex.split(line)[1:] for line in lines[2:])
    assert chat == [sys.executable, "-m", "areal_lora", "chat", str(folder)]  # quoted: the command can be pasted
    assert resume == [sys.executable, "-m", "areal_lora", "resume", str(folder), "run.steps=4"]


def test_details_end_with_the_summary(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a run")
    values = json.loads(write(folder).read_text())
    lines = detail_lines(RunFolder(folder))
    printed = dict(line.split(": ", 1) for line in lines[-len(values) :])
    assert {key: json.loads(value) for key, value in printed.items()} == values
    assert list(printed) == list(values)


def test_nothing_measured_is_null_not_zero(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(make_config().model_dump_json())
    write(tmp_path)
    summary = read_summary(tmp_path)
    assert (summary.eval_before, summary.eval_after, summary.probe_max_abs_dlogp, summary.max_staleness) == (None,) * 4


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no resolved configuration"):
        write(tmp_path)


def test_commands_name_the_interpreters_of_the_roles_and_existing_files(tmp_path: Path) -> None:
    """An activated environment is not needed, and no working folder."""
    folder = small_run(tmp_path / "a folder")
    config = make_config()
    roles = {
        "trainer": config.trainer.model_copy(update={"python": "/opt/train er/bin/python"}),
        "model": config.model.model_copy(update={"snapshot": "/hub/snapshots/abc", "commit": "abc"}),
    }
    (folder / "config.json").write_text(config.model_copy(update=roles).model_dump_json())
    write(folder)
    lines = detail_lines(RunFolder(folder))
    words = ("evaluate", "TensorBoard", "serve")
    commands = {word: shlex.split(line)[1:] for line in lines for word in words if line.startswith(word)}
    assert commands["serve"] == [sys.executable, "-m", "areal_lora", "serve", str(folder)]
    trainer = "/opt/train er/bin/python"
    assert commands["TensorBoard"] == [trainer, "-m", "tensorboard.main", "--logdir", str(folder / "tensorboard")]
    python, script, run = commands["evaluate"]
    assert (python, Path(script).is_file(), run) == (trainer, True, str(folder))
    [load] = [line for line in lines if line.startswith("model = ")]
    assert "'/hub/snapshots/abc'" in load


@pytest.mark.parametrize("several", [False, True])
def test_a_moved_folder_names_the_place_where_it_is(tmp_path: Path, several: bool) -> None:
    old, new = tmp_path / "old place" / "run", tmp_path / "new"
    folder = make_three(old) if several else RunFolder(small_run(old))
    names = ("alpha", "gamma") if several else ("toy",)
    elsewhere = {"beta": tmp_path / "elsewhere"} if several else {}
    adapters = {name: folder.adapter_export(name) for name in names} | elsewhere
    write_summary(folder, wall_s=1.0, adapters=adapters, report_path=folder.report)
    old.rename(new)
    moved = RunFolder(new)
    found = read_summary(moved)
    assert found.report_path == str(moved.report)
    if several:
        paths = {name: part.path for name, part in found.adapters.items()}
        assert paths == {name: str(moved.adapter_export(name)) for name in names} | {"beta": str(elsewhere["beta"])}
    else:
        assert found.adapter_path == str(moved.adapter_export("toy"))
    text = "\n".join([*closing_lines(moved), *detail_lines(moved)])
    assert "old place" not in text
    assert str(moved.report) in text

"""The real command line, in forks: exit codes, one clear line for wrong input, nothing started, run folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_lora.cli.find_run import find_run
from areal_lora.config.load import load_config
from areal_lora.errors import ConfigError
from areal_lora.launcher.start import RunStart, holder, run_lock
from areal_lora.obs.metrics.records import StepRecord
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.summary import write_summary
from areal_lora.run_folder.paths import RunFolder
from tests.support.cli.command import forked_python
from tests.support.paths import EXAMPLES, ROOT

MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
EMBEDDED = EXAMPLES / "embedded.yaml"


SMALL = "adapters.gsm8k.task.n_train=64"


def launch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [forked_python(), "-m", "areal_lora.launch", "--config", str(MOE), "--config", str(EMBEDDED)]
    return subprocess.run(
        [*command, f"run.root={tmp_path / 'runs'}", SMALL, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["adapters.0.rnak=8"], ["adapters.0.rnak", "unknown key", "adapters.0.rank"]),
        (["trainer.ep=3", "trainer.world_size=3"], ["trainer.ep", "3 does not divide", "8 experts"]),
        (["adapters.0.target_modules=[linear_qvk]"], ["linear_qvk", "matches no module", "linear_qkv"]),
        (["adapters.0.rank=16"], ["adapters.0.rank", "max_lora_rank = 8"]),
        (["model.path=no/such/folder"], ["model.path", "no/such/folder"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml", "no such configuration file"]),
        (["--dry-rum"], ["--dry-rum"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_wrong_input_is_one_line_and_nothing_starts(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    done = launch(tmp_path, *arguments)
    assert done.returncode == 64
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert not (tmp_path / "runs").exists()


PLANNED = [
    [MOE],
    [MOE, EMBEDDED],
    [EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"],
    [EXAMPLES / "gsm8k_grpo_megatron_lora_moe_one_node.yaml"],
    [EXAMPLES / "gsm8k_grpo_megatron_lora_72b.yaml"],
]


@pytest.mark.parametrize("paths", PLANNED, ids=lambda paths: paths[-1].stem)
def test_dry_run_shows_the_plan_and_creates_nothing(tmp_path: Path, paths: list[Path]) -> None:
    configs = [word for path in paths for word in ("--config", str(path))]
    options = [f"run.root={tmp_path / 'runs'}", "--dry-run", "--details"]
    command = [forked_python(), "-m", "areal_lora.launch", *configs, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    for title in ("trainer rank", "adapter slots", "KV cache", "Publish of gsm8k"):
        assert title in done.stdout.partition("Processes")[0], "the summary comes first"
    for title in ("Processes", "Trainer ranks", "Ports", "Sizes", "Files", "wire, each publish"):
        assert title in done.stdout
    assert not (tmp_path / "runs").exists()


def test_import_is_light() -> None:
    heavy = ("torch", "vllm", "megatron", "transformers")
    code = f"import sys, areal_lora.launch; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT).stdout == "[]\n"


# --- starting: the roles' interpreters are replaced, so the processes end at once ----------------


def failing_python(tmp_path: Path) -> str:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'out of everything'\nexit 9\n")
    program.chmod(0o755)
    return f"rollout.python={program}"


def test_failing_component_exits_70_and_the_folder_is_complete(tmp_path: Path) -> None:
    done = launch(tmp_path, failing_python(tmp_path), "run.name=x", "adapters.0.target_modules=[linear_fc*]")
    assert done.returncode == 70, done.stderr
    assert "server-0 exited with code 9" in done.stdout
    assert "out of everything" in done.stdout
    folder = tmp_path / "runs" / "x"
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    config = json.loads((folder / "config.json").read_text())
    assert config["adapters"][0]["target_modules"] == ["linear_fc1", "linear_fc2"], "workers see plain names"
    assert config["run"]["root"] == str(tmp_path / "runs")
    secret = (folder / "secret").read_text()
    assert secret not in done.stdout + (folder / "config.json").read_text()


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_fresh_moves_previous_runs_aside(tmp_path: Path) -> None:
    python = failing_python(tmp_path)
    launch(tmp_path, python, "run.name=x", "run.seed=1", "--fresh")
    done = launch(tmp_path, python, "run.name=x", "run.seed=2", "--fresh")
    assert "it is now x.1" in done.stdout
    launch(tmp_path, python, "run.name=x", "run.seed=3", "--fresh")
    folders = tmp_path / "runs"
    seeds = {name: config_of(folders / name)["run"]["seed"] for name in ("x", "x.1", "x.2")}
    assert seeds == {"x": 3, "x.1": 1, "x.2": 2}


def test_the_same_command_goes_on_in_the_same_folder(tmp_path: Path) -> None:
    python, folder = failing_python(tmp_path), tmp_path / "runs" / "x"
    launch(tmp_path, python, "run.name=x")
    secret = (folder / "secret").read_text()
    for name in ("rendezvous", "status", "heartbeats"):
        (folder / name / "server-0").write_text("of the first start")
    (folder / "metrics.jsonl").write_text('{"kind":"eval","version":0,"step":0,"accuracy":0.25,"n":4}\n')
    (folder / "ledger.sqlite").write_text("rows")
    done = launch(tmp_path, python, "run.name=x", "run.steps=99")
    assert done.returncode == 70, done.stderr
    assert "A run in it ended before its first checkpoint: it restarts at step 0." in done.stdout
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".x.lock", "x"]
    assert config_of(folder)["run"]["steps"] == 99
    assert (folder / "secret").read_text() != secret
    assert not [path for name in ("rendezvous", "status", "heartbeats") for path in (folder / name).iterdir()]
    assert '"accuracy":0.25' in (folder / "metrics.jsonl").read_text()
    assert (folder / "ledger.sqlite").read_text() == "rows"
    first, mark, second = (folder / "logs" / "server-0.log").read_text().splitlines()
    assert (first, second) == ("out of everything", "out of everything")
    assert mark.startswith("---- server-0 starts again, 20")


def test_what_cannot_change_is_one_line_and_nothing_starts_or_changes(tmp_path: Path) -> None:
    python, folder = failing_python(tmp_path), tmp_path / "runs" / "x"
    launch(tmp_path, python, "run.name=x")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for arguments in ([python], ["--explain-resume"]):
        done = launch(tmp_path, *arguments, "run.name=x", "run.seed=2", "run.steps=99")
        assert (done.returncode, done.stderr.count("\n")) == (64, 1), done.stderr
        assert "run.seed: it is 2, but the run was started with 1" in done.stderr
        assert "--fresh" in done.stderr
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def finished_run(tmp_path: Path, steps: int) -> Path:
    """The folder of a run that went well."""
    folder = tmp_path / "runs" / "x"
    config = load_config([MOE, EMBEDDED], [f"run.root={tmp_path / 'runs'}", "run.name=x", f"run.steps={steps}", SMALL])
    with RunStart(config) as run:
        run.prepare()
    with MetricsWriter(RunFolder(folder)) as metrics:
        for step in range(steps):
            metrics.write(StepRecord(step=step, version=step, time_s=step, adapter="gsm8k"))
    (folder / "checkpoints" / "gsm8k" / f"v{steps:06d}").mkdir(parents=True)
    adapters = {"gsm8k": folder / "adapters" / "gsm8k"}
    write_summary(RunFolder(folder), wall_s=7.5, adapters=adapters, report_path=folder / "report.html")
    return folder


def test_a_finished_run_says_so_and_starts_nothing(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    done = launch(tmp_path, failing_python(tmp_path), "run.name=x", "run.steps=3")
    assert done.returncode == 0, done.stderr
    assert "This run is done: 3 steps." in done.stdout
    assert "run.steps=6" in done.stdout
    assert "--fresh" in done.stdout
    assert "result   3 steps in 0:08" in done.stdout
    assert not (folder / "logs" / "server-0.log").exists()
    assert "is done: 3 steps" in launch(tmp_path, "--explain-resume", "run.name=x", "run.steps=3").stdout


def test_a_finished_run_goes_on_with_more_steps(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    done = launch(tmp_path, failing_python(tmp_path), "run.name=x", "run.steps=4")
    assert done.returncode == 70, "the stand-in fails, so it was started"
    assert not (folder / "summary.json").exists(), "the run is not finished any more"


def test_steps_without_a_checkpoint_are_an_error_and_nothing_starts_or_changes(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    shutil.rmtree(folder / "checkpoints")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for arguments in ([failing_python(tmp_path)], ["--explain-resume"]):
        done = launch(tmp_path, *arguments, "run.name=x", "run.steps=4")
        assert (done.returncode, done.stderr.count("\n")) == (74, 1), done.stderr
        assert f"{folder / 'checkpoints' / 'gsm8k'}: metrics.jsonl has 3 steps of it" in done.stderr
        assert "--fresh" in done.stderr
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_explain_resume_starts_and_creates_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "--explain-resume", "run.name=x")
    assert (done.returncode, (tmp_path / "runs").exists()) == (0, False), done.stderr
    assert "holds no run" in done.stdout
    launch(tmp_path, failing_python(tmp_path), "run.name=x")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
    done = launch(tmp_path, "--explain-resume", "run.name=x", "rollout.servers=2")
    assert done.returncode == 0, done.stderr
    assert "gsm8k: no checkpoint was written, step 0 of 60 is next" in done.stdout
    assert "changed: rollout.servers 1 -> 2" in done.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


def test_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "thesis.txt").write_text("mine")
    done = launch(tmp_path, failing_python(tmp_path), "run.name=x")
    assert done.returncode == 64
    assert "is not a run folder" in done.stderr
    assert [p.name for p in (tmp_path / "runs" / "x").iterdir()] == ["thesis.txt"]


def test_a_link_to_a_run_folder_is_the_run_that_it_leads_to(tmp_path: Path) -> None:
    """A second launcher is refused, and a fresh start leaves link, folder and lock where they are."""
    there, link = tmp_path / "scratch" / "r", tmp_path / "runs" / "x"
    there.mkdir(parents=True)
    link.parent.mkdir()
    link.symlink_to(there)
    made = load_config([MOE, EMBEDDED], [f"run.root={link.parent}", "run.name=x", SMALL])
    with RunStart(made) as run:
        run.prepare()
        found = find_run(str(link))
        owner = holder(found)
        assert owner is not None
        assert owner.pid == os.getpid()
        with pytest.raises(ConfigError, match="is still going"), run_lock(found):
            pass
    with RunStart(made, fresh=True) as run:
        run.prepare()
        assert run.moved == there.with_name("r.1")
        assert holder(find_run(str(link))) == owner
    assert (link.resolve(), (there / "config.json").is_file()) == (there, True)


def test_folder_of_a_running_run_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    with RunStart(load_config([MOE, EMBEDDED], [f"run.root={folder.parent}", "run.name=x", SMALL])) as run:
        run.prepare()
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        done = launch(tmp_path, failing_python(tmp_path), "run.name=x")
    assert folder / "secret" in before
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert done.returncode == 64
    assert "still going" in done.stderr
    assert not (tmp_path / "runs" / "x.1").exists()

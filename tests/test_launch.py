"""The real command line: exit codes, one clear line for wrong input, nothing started, run folders."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "math"
MOE = EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"
EMBEDDED = EXAMPLES / "embedded.yaml"


def launch(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_lora.launch", "--config", str(MOE), "--config", str(EMBEDDED)]
    return subprocess.run(
        [*command, f"run.root={tmp_path / 'runs'}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


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


def test_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = launch(tmp_path, f"rollout.port={port}")
    assert (done.returncode, done.stderr.count("\n")) == (64, 1)
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("paths", [[MOE], [MOE, EMBEDDED], [EXAMPLES / "gsm8k_grpo_megatron_lora_dense.yaml"]])
def test_dry_run_shows_the_plan_and_creates_nothing(tmp_path: Path, paths: list[Path]) -> None:
    configs = [word for path in paths for word in ("--config", str(path))]
    command = [sys.executable, "-m", "areal_lora.launch", *configs, f"run.root={tmp_path / 'runs'}", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
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


def test_previous_runs_are_moved_aside(tmp_path: Path) -> None:
    python = failing_python(tmp_path)
    launch(tmp_path, python, "run.name=x", "run.seed=1")
    done = launch(tmp_path, python, "run.name=x", "run.seed=2")
    assert "it is now x.1" in done.stdout
    launch(tmp_path, python, "run.name=x", "run.seed=3")
    seeds = {
        name: json.loads((tmp_path / "runs" / name / "config.json").read_text())["run"]["seed"]
        for name in ("x", "x.1", "x.2")
    }
    assert seeds == {"x": 3, "x.1": 1, "x.2": 2}


def test_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "thesis.txt").write_text("mine")
    done = launch(tmp_path, failing_python(tmp_path), "run.name=x")
    assert done.returncode == 64
    assert "is not a run folder" in done.stderr
    assert [p.name for p in (tmp_path / "runs" / "x").iterdir()] == ["thesis.txt"]


def test_folder_of_a_running_run_is_left_alone(tmp_path: Path) -> None:
    from areal_lora.config.load import load_config
    from areal_lora.launch import RunFolder

    with RunFolder(load_config([MOE, EMBEDDED], [f"run.root={tmp_path / 'runs'}", "run.name=x"])):
        done = launch(tmp_path, failing_python(tmp_path), "run.name=x")
    assert done.returncode == 64
    assert "still going" in done.stderr
    assert not (tmp_path / "runs" / "x.1").exists()

"""Status, stop and resume of a run that works: the launcher is real, its roles are small programs."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import psutil
import pytest

from tests.support.cli import held_run
from tests.support.cli.command import areal_lora, command_starter
from tests.support.clocks import wait_until
from tests.support.forks.starter import Fork

pytestmark = pytest.mark.slow


def begin(root: Path, name: str, stop_s: float, **environment: str) -> Fork:
    root.mkdir(exist_ok=True)
    with (root / f"{name}.out").open("wb") as output:
        words = [str(root), name, str(stop_s)]
        return command_starter().start(held_run.__name__, words, os.environ | environment, output)


def started(root: Path, name: str, stop_s: float) -> Fork:
    process = begin(root, name, stop_s)
    wait_until(lambda: held_run.all_up(root / name))
    return process


def status(folder: Path) -> dict[str, object]:
    return json.loads(areal_lora("status", folder, "--json").stdout)


@pytest.mark.parametrize("now", [False, True], ids=["in order", "now"])
def test_a_run_is_seen_refused_a_second_start_and_stopped(tmp_path: Path, now: bool) -> None:
    root, folder = tmp_path / "my runs", tmp_path / "my runs" / "x"
    with started(root, "x", stop_s=600.0 if now else 2.0) as process:
        try:
            seen = status(folder)
            assert (seen["state"], seen["launcher_pid"]) == ("running", process.pid)
            assert {p["name"]: p["alive"] for p in seen["processes"]} == {
                "trainer-0": True,
                "trainer-1": True,
                "controller-0": True,
                "server-0": True,
            }
            refused = areal_lora("resume", folder)
            assert (refused.returncode, refused.stdout) == (64, "")
            assert "is still going" in refused.stderr
            stopped = areal_lora("stop", folder, *(["--now"] if now else []))
            assert stopped.returncode == 0, stopped.stderr
            printed = (
                stopped.stdout.splitlines()[-1]
                .removeprefix("Stopped. ")
                .removesuffix(" continues from the newest checkpoint.")
            )
            program, *words = shlex.split(printed)
            assert program == "areal-lora"
            logs = [path.read_text() for path in (folder / "logs").glob("*-?.log")]
            assert ["stopped in order" in log for log in logs] == [not now] * 4
            assert process.wait(150.0) == 130
            assert f"report: {folder / 'report.html'}\n" in stopped.stdout
            assert "Ended with exit code 130" in (folder / "report.html").read_text()
            assert f"report   {folder / 'report.html'}\n" in (root / "x.out").read_text()
        finally:
            process.kill()
    seen = status(folder)
    assert seen["state"] == "stopped"
    assert not any(p["alive"] for p in seen["processes"])
    assert printed in str(seen["why"]), "both print the same command"
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("tiny_model", "moved"))
    done = areal_lora(*words)
    assert (done.returncode, "model.path" in done.stderr) == (64, True), "the command as printed begins a start"
    again = areal_lora("stop", folder)
    assert (again.returncode, again.stdout) == (0, f"No launcher works in {folder}: nothing to stop.\n")


def test_a_killed_launcher_leaves_a_run_that_status_and_stop_understand(tmp_path: Path) -> None:
    with started(tmp_path, "x", stop_s=2.0) as process:
        [guardian] = [
            p for p in psutil.Process(process.pid).children() if "areal_lora.launcher.guardian" in p.cmdline()
        ]
        guardian.suspend()  # what it ends is still there then
        process.kill()
        process.wait()
        assert status(tmp_path / "x")["state"] == "ending"
        guardian.resume()
        done = areal_lora("stop", tmp_path / "x")
        assert done.returncode == 0, done.stderr
    assert status(tmp_path / "x")["state"] == "stopped"


@pytest.mark.parametrize("number", [1, 3])
def test_a_launcher_killed_while_it_starts_a_process_leaves_none(tmp_path: Path, number: int) -> None:
    """The guardian has not been told of the ``number``-th process, which exists."""
    with begin(tmp_path, "x", 2.0, AREAL_LORA_FAULT=f"launcher.process_started:{number}:kill") as process:
        assert process.wait(150.0) == -signal.SIGKILL
        assert len(list((tmp_path / "x" / "logs").glob("*-?.log"))) == number
        done = areal_lora("stop", tmp_path / "x")
        assert done.returncode == 0, done.stderr
    assert not any(p["alive"] for p in status(tmp_path / "x")["processes"])

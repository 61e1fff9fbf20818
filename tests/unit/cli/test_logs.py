"""The merged logs of a run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from areal_lora.cli.logs import Tail, chosen
from tests.support.cli.command import COMMAND, areal_lora
from tests.support.clocks import wait_until
from tests.support.obs.fake_run import make_run
from tests.support.paths import ROOT


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "x", steps=1)
    (folder / "logs").mkdir()
    for name in ("trainer-0", "trainer-1", "trainer-10", "server-0"):
        (folder / "logs" / f"{name}.log").write_text("".join(f"{name} line {i}\n" for i in range(30)))
    return folder


def test_roles_and_processes_are_chosen_by_name(run: Path) -> None:
    def names(role: str | None) -> list[str]:
        return [path.stem for path in chosen(run / "logs", role)]

    assert names(None) == ["server-0", "trainer-0", "trainer-1", "trainer-10"]
    assert names("trainer") == ["trainer-0", "trainer-1", "trainer-10"]
    assert names("trainer-1") == ["trainer-1"]
    assert names("train") == []


def test_several_logs_have_a_prefix_and_one_has_none(run: Path) -> None:
    done = areal_lora("logs", run, "trainer", "-n", "1")
    assert done.stdout.splitlines() == [
        "trainer-0  | trainer-0 line 29",
        "trainer-1  | trainer-1 line 29",
        "trainer-10 | trainer-10 line 29",
    ]
    assert areal_lora("logs", run, "server-0", "-n", "2").stdout == "server-0 line 28\nserver-0 line 29\n"
    done = areal_lora("logs", run, "judge")
    assert (done.returncode, done.stdout) == (64, "")
    assert "no log of 'judge' (fix: name one of server-0, trainer-0" in done.stderr


def test_a_log_does_not_steer_the_terminal(run: Path) -> None:
    (run / "logs" / "server-0.log").write_bytes(b"\x1b]52;c;Yg==\x07 90%\rdone \xc2\x9b2J\n")
    shown = areal_lora("logs", run, "server-0", "-n", "1").stdout
    assert shown == "\\x1b]52;c;Yg==\\x07 90%\\x0ddone \\x9b2J\n"


@pytest.mark.parametrize("count", [0, 1, 3, 5, 9])
@pytest.mark.parametrize("text", ["", "a\n", "a\nb\nc\nd\ne\n", "a\nb\nc\nd\nno end"])
def test_the_last_lines_are_found(tmp_path: Path, text: str, count: int) -> None:
    path = tmp_path / "x.log"
    path.write_text(text)
    tail = Tail(path)
    tail.start(count)
    assert list(tail.read_new()) == (text.splitlines()[-count:] if count else [])


def test_following_shows_new_lines_also_of_new_processes(run: Path) -> None:
    command = [*COMMAND, "logs", str(run), "-f", "-n", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = [process.stdout.readline() for _ in range(4)]
            assert first[0] == "server-0   | server-0 line 29\n"
            with (run / "logs" / "server-0.log").open("a") as file:
                file.write("a new line\n")
            assert process.stdout.readline() == "server-0   | a new line\n"
            (run / "logs" / "server-1.log").write_text("up\n")
            assert process.stdout.readline() == "server-1   | up\n"
        finally:
            process.kill()
    wait_until(lambda: process.poll() is not None)

"""Named fault points, each in a process of its own: they kill."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from areal_lora.processes import watched
from areal_lora.processes.watched import VARIABLE, parse, reached

CODE = """
import sys
from areal_lora.processes.watched import reached
for _ in range(3):
    for point in ("a.one", "a.two"):
        print(point, flush=True)
        reached(point)
print("end", flush=True)
"""


def run(fault: str | None) -> tuple[list[str], int, str]:
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE} | ({VARIABLE: fault} if fault else {})
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=150)
    return done.stdout.split(), done.returncode, done.stderr


def test_without_the_variable_nothing_happens() -> None:
    reached("a.one")
    lines, code, _ = run(None)
    assert (len(lines), lines[-1], code) == (7, "end", 0)


def test_the_nth_time_kills_without_a_last_word() -> None:
    lines, code, errors = run("a.two:2:kill")
    assert lines == ["a.one", "a.two", "a.one", "a.two"]
    assert code == -signal.SIGKILL
    assert "kill at a.two (2)" in errors


def test_an_errno_is_raised_where_the_point_is() -> None:
    lines, code, errors = run("a.one:3:ENOSPC")
    assert (lines, code) == (["a.one", "a.two"] * 2 + ["a.one"], 1)
    assert f"[Errno {errno.ENOSPC}]" in errors
    assert "'a.one'" in errors


def test_the_first_of_several_points_wins() -> None:
    lines, code, _ = run("a.two:3:kill,a.one:2:kill")
    assert (lines, code) == (["a.one", "a.two", "a.one"], -signal.SIGKILL)


def test_once_in_all_processes(tmp_path: Path) -> None:
    fault = f"once={tmp_path}:a.one:1:kill,a.two:1:kill"
    assert [run(fault)[:2] for _ in range(3)] == [
        (["a.one"], -signal.SIGKILL),
        (["a.one", "a.two"], -signal.SIGKILL),
        (["a.one", "a.two"] * 3 + ["end"], 0),
    ]


def test_a_hang_lasts() -> None:
    environment = os.environ | {VARIABLE: "a.two:1:hang"}
    process = subprocess.Popen([sys.executable, "-c", CODE], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline().strip() for _ in range(2)] == ["a.one", "a.two"]
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    finally:
        process.kill()
        process.communicate(timeout=120)


def test_several_threads_count_together(tmp_path: Path) -> None:
    plan = parse(f"once={tmp_path}:a.one:200:EIO")
    raised: list[OSError] = []

    def count() -> None:
        for _ in range(50):
            try:
                plan.reached("a.one")
            except OSError as error:
                raised.append(error)
            time.sleep(0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [error.errno for error in raised] == [errno.EIO]


@pytest.mark.parametrize("text", ["a.one", "a.one:1", "a.one:x:kill", "a.one:1:EWHATEVER", "a.one:1:kill:more", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"errno|invalid literal|unpack"):
        parse(text)


@pytest.mark.parametrize(
    ("action", "want"),
    [("wrong_prefix", "base_model.model.layers.0.x"), ("other_layer", "model.layers.1.x"), (None, "model.layers.0.x")],
)
def test_names_are_altered_at_their_point_only(monkeypatch: pytest.MonkeyPatch, action: str | None, want: str) -> None:
    monkeypatch.setattr(watched, "_plan", watched.parse(f"a:1:{action}") if action else None)
    assert watched.renamed("a", "model.layers.0.x") == want
    assert watched.renamed("b", "model.layers.0.x") == "model.layers.0.x"
    assert watched.renamed("a", "norm") == ("base_model.norm" if action == "wrong_prefix" else "norm")

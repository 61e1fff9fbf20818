"""Which line of a log says why its process ended, and whether it was to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.launcher.plan import ProcessSpec
from areal_lora.launcher.restarts import ProcessExit, last_lines, left_in_turn, with_error
from areal_lora.run_folder.paths import RunFolder

SPEC = ProcessSpec(role="trainer", index=0, argv=("x",), env={})
EARLIER = "12:00:00.000 trainer-0 ERROR trainer.audit: the audit of a batch\n    ValueError: no such row\n"
LAST = (
    "12:00:09.000 trainer-0 ERROR trainer.main: RolloutError: refused (fix: look)\n    Traceback\n    RolloutError: x\n"
)
AGAIN = "---- trainer-0 starts again, 2026-11-23 10:00:00 UTC ----\n"
RAISED = 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nareal_lora.errors.EnvironmentError_: none\n'


@pytest.mark.parametrize(
    ("log", "code", "error"),
    [
        (EARLIER + LAST, 75, "RolloutError: refused (fix: look)"),
        ("12:00:00.000 server-0 INFO x: Error: not one\n" + RAISED, 1, "areal_lora.errors.EnvironmentError_: none"),
        (LAST + AGAIN + "12:00:10.000 trainer-0 INFO x: loads\n", 1, ""),
        (LAST, -9, ""),  # an error before a kill is not its reason
        ("", 1, ""),
    ],
)
def test_the_last_error_since_the_start_is_the_cause(tmp_path: Path, log: str, code: int, error: str) -> None:
    path = tmp_path / "trainer-0.log"
    path.write_text(log)
    ended = with_error(ProcessExit(spec=SPEC, code=code, log=path))
    assert ended.error == error
    assert ended.cause == (f"exited with code {code}: {error}" if error else ended.how())
    assert with_error(ProcessExit(spec=SPEC, code=code, log=path, why="was ended")).cause == "was ended"


LEAKS = (
    ["nanobind: leaked 64 types!"]
    + [' - leaked type "triton._C.libtriton.ir.location"'] * 40
    + [" - ... skipped remainder", "nanobind: this is likely caused by a reference counting issue in the binding code."]
    + ["See https://nanobind.readthedocs.io/en/latest/refleaks.html"]
)


def test_the_last_lines_have_none_of_what_triton_prints_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(["early", " - a list", "See below", *LEAKS]))
    assert last_lines(tmp_path / "log", 3) == ["early", " - a list", "See below"]


@pytest.mark.parametrize(
    ("code", "asked", "lost", "planned"),
    [(0, True, False, True), (0, False, False, False), (1, True, False, False), (0, True, True, False)],
)
def test_a_server_that_was_to_leave_and_did_left_in_its_turn(
    tmp_path: Path, code: int, asked: bool, lost: bool, planned: bool
) -> None:
    folder = RunFolder(tmp_path)
    folder.leaves.mkdir()
    if asked:
        (folder.leaves / SPEC.name).write_text("7\n")
    ended = left_in_turn(folder, ProcessExit(spec=SPEC, code=code, log=tmp_path / "log", lost=lost))
    assert ended.planned is planned
    assert not (folder.leaves / SPEC.name).exists(), "the next process is not to leave"

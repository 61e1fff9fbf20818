"""What shares a lane of the suite, and in which order groups are given out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.lanes import LONG, TIMED, TOGETHER, WHOLE_RUNS, Lanes, clash, group, turn
from tests.support.paths import ROOT


class Lane:
    """A worker of pytest-xdist, and the tests that it was given."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.shutting_down = False
        self.gateway = SimpleNamespace(id="a lane")

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += [COLLECTED[index] for index in indices]

    def shutdown(self) -> None:
        self.shutting_down = True


COLLECTED = [
    "tests/e2e/test_a.py::test_1",
    "tests/e2e/test_a.py::test_2",
    "tests/e2e/test_a.py::test_3",
    "tests/e2e/test_b.py::test_1",
    *(f"tests/unit/test_c.py::test_{n}" for n in range(4)),
    *(f"tests/unit/test_d.py::test_{n}" for n in range(4)),
]


def test_places_exist() -> None:
    named = [*WHOLE_RUNS, *TIMED, *LONG, *(path for paths in TOGETHER.values() for path in paths)]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("path", "name", "number"),
    [
        ("tests/e2e/test_stops.py", "tests/e2e/test_stops.py", 0),
        ("tests/e2e/test_three_adapters.py", "three adapters", 0),
        ("tests/process/launcher/test_slurm_states.py", "slurm", 1),
        ("tests/unit/tasks/test_box.py", "tests/unit/tasks/test_box.py", 4),
        ("tests/unit/test_launch.py", "tests/unit/test_launch.py", 6),
    ],
)
def test_the_group_of_a_file_and_its_turn(path: str, name: str, number: int) -> None:
    assert (group(path), turn(path)) == (name, number)


def test_a_group_keeps_its_lane_and_whole_runs_are_not_side_by_side(pytestconfig: pytest.Config) -> None:
    lanes, (one, other) = scheduled(pytestconfig)
    assert one.given == COLLECTED[:3]
    assert other.given == COLLECTED[4:8], "not the other whole run"
    for index in (4, 5):
        lanes.mark_test_complete(other, index)
    assert other.given == COLLECTED[4:], "the next file, before this one's last tests"
    lanes.mark_test_complete(one, 0)
    assert one.given == COLLECTED[:4], "a lane with a whole run may get another one"
    assert one.shutting_down is other.shutting_down is False
    lanes.mark_test_complete(one, 1)
    assert one.shutting_down, "nothing remains to be given"


def test_a_whole_run_is_not_kept_back_where_nothing_else_remains(pytestconfig: pytest.Config) -> None:
    lanes, (one, other) = scheduled(pytestconfig)
    for index in (4, 5, 6, 7, 8, 9):
        lanes.mark_test_complete(other, index)
    assert one.given == COLLECTED[:3]
    assert other.given == [*COLLECTED[4:], COLLECTED[3]]


def scheduled(config: pytest.Config) -> tuple[Lanes, tuple[Lane, Lane]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config.option, "tx", ["popen", "popen"])
        patch.setattr(config.option, "loadscopereorder", False)
        lanes, both = Lanes(config), (Lane(), Lane())
        for lane in both:
            lanes.add_node(lane)  # type: ignore[arg-type]
        for lane in both:
            lanes.add_node_collection(lane, COLLECTED)  # type: ignore[arg-type]
        lanes.schedule()
    return lanes, both


@pytest.mark.parametrize(
    ("one", "other", "found"),
    [
        ("tests/e2e/test_stops.py", "tests/e2e/test_faults.py", True),
        ("tests/e2e/test_stops.py", "tests/process/weight_sync/test_groups.py", True),
        ("tests/process/launcher/test_stops.py", "tests/soak/test_publishes.py", True),
        ("tests/process/launcher/test_stops.py", "tests/process/weight_sync/test_groups.py", False),
        ("tests/e2e/test_stops.py", "tests/unit/test_launch.py", False),
        ("tests/unit/test_launch.py", "tests/process/launcher/test_stops.py", False),
    ],
)
def test_what_is_not_run_side_by_side(one: str, other: str, found: bool) -> None:
    assert clash({f"{one}::test": True, f"{one}::test_2": False}, {f"{other}::test": False}) is found


def test_a_lane_that_dies_fails_its_test_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(
        "import os\ndef test_1(): pass\ndef test_dies(): os._exit(0)\ndef test_3(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-p", "tests.conftest", "--rootdir", "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "crashed while running 'test_dies.py::test_dies'" in done.stdout
    assert "1 failed, 2 passed" in done.stdout.splitlines()[-1]

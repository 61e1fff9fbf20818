"""Two lanes of the suite (``pytest -n 2``): what shares a lane, what is begun first, and what is not run side by side.

A file is a group, so what its fixtures hold is made once; files that share a session's fixture are one group. Groups
of whole runs take both cores: while one lane has one, the other gets neither a whole run nor a test that measures
time, as long as there are other groups.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER = {
    "slurm": ("tests/process/launcher/test_real_slurm.py", "tests/process/launcher/test_slurm_states.py"),
    "three adapters": (
        "tests/e2e/test_three_adapters.py",
        "tests/e2e/test_adapters_come_and_go.py",
        "tests/e2e/test_sweep_run.py",
        "tests/e2e/test_clients_operations.py",
    ),
    "environments": ("tests/e2e/test_environments_run.py", "tests/process/rollout/test_openenv.py"),
}
WHOLE_RUNS = (
    "tests/e2e",
    "tests/process/doctor",
    "tests/process/launcher/test_namespaces.py",
    "tests/soak/test_publishes.py",
)
TIMED = (
    "tests/process/launcher/test_stalls.py",
    "tests/process/launcher/test_stops.py",
    "tests/process/weight_sync",
    "tests/soak/test_fast_producer.py",
)
"""Tests with deadlines of a few seconds."""
LONG = ("tests/process", "tests/soak", "tests/repository/test_types.py", "tests/unit/tasks", "tests/unit/launcher")
"""Groups outside of whole runs that are begun first: at the end of the suite only short ones are to be waited for."""


def group(path: str) -> str:
    """The group of a test file; ``path`` from the repository's root."""
    return next((name for name, paths in TOGETHER.items() if path in paths), path)


def is_in(path: str, places: tuple[str, ...]) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in places)


def turn(path: str) -> int:
    """Groups are given out in this order, and among equals in that of their names."""
    if is_in(path, WHOLE_RUNS):
        return 0
    return next((1 + n for n, place in enumerate(LONG) if is_in(path, (place,))), 1 + len(LONG))


class Lanes(LoadScopeScheduling):
    """Give a lane the next group once it has nearly finished one. Tests are collected in the order of ``turn``."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = [work for other, work in self.assigned_work.items() if other is not node]
        beside = [tests for work in others for tests in work.values() if not all(tests.values())]
        scope = next((s for s, tests in self.workqueue.items() if not any(clash(tests, b) for b in beside)), None)
        if scope is not None:
            self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: WorkerController) -> str | None:
        """The test in which a lane has died, if it has; it fails, is not run again, and another lane runs the rest."""
        work = self.assigned_work[node]
        died_in = next((test for tests in work.values() for test, done in tests.items() if not done), None)
        for scope, tests in list(work.items()):
            if died_in in tests:
                tests[died_in] = True
            if all(tests.values()):
                del work[scope]
        super().remove_node(node)
        return died_in


def clash(one: dict[str, bool], other: dict[str, bool]) -> bool:
    """Whether two groups of tests should not run side by side."""
    whole = [contains(tests, WHOLE_RUNS) for tests in (one, other)]
    timed = [contains(tests, TIMED) for tests in (one, other)]
    return all(whole) or (any(whole) and any(timed))


def contains(tests: dict[str, bool], places: tuple[str, ...]) -> bool:
    return any(is_in(nodeid.partition("::")[0], places) for nodeid in tests)

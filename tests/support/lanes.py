"""Two lanes of the suite (``pytest -n 2``): what shares a lane, what is begun first, and what is not run side by side.

A file is a group, so what its fixtures hold is made once; files that share a session's fixture are one group. Groups
of whole runs take both cores: a lane gets none while the other one has one, as long as there are other groups.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER = {
    "slurm": ("tests/process/launcher/test_real_slurm.py", "tests/process/launcher/test_slurm_states.py"),
    "three adapters": ("tests/e2e/test_three_adapters.py", "tests/e2e/test_adapters_come_and_go.py"),
}
WHOLE_RUNS = ("tests/e2e", "tests/process/doctor", "tests/process/launcher/test_namespaces.py", "tests/soak")
LONG = ("tests/process", "tests/unit/tasks", "tests/unit/launcher")
"""Groups outside of whole runs that are begun first: at the end of the suite only short ones are to be waited for."""


def group(path: str) -> str:
    """The group of a test file; ``path`` from the repository's root."""
    return next((name for name, paths in TOGETHER.items() if path in paths), path)


def is_whole_run(path: str) -> bool:
    return any(PurePosixPath(path).is_relative_to(place) for place in WHOLE_RUNS)


def turn(path: str) -> int:
    """Groups are given out in this order, and among equals in that of their names."""
    if is_whole_run(path):
        return 0
    return next((1 + n for n, place in enumerate(LONG) if PurePosixPath(path).is_relative_to(place)), 1 + len(LONG))


class Lanes(LoadScopeScheduling):
    """Give a lane the next group once it has nearly finished one. Tests are collected in the order of ``turn``."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = [work for other, work in self.assigned_work.items() if other is not node]
        if any(whole_run(tests) and not all(tests.values()) for work in others for tests in work.values()):
            scope = next((scope for scope, tests in self.workqueue.items() if not whole_run(tests)), None)
            if scope is not None:
                self.workqueue.move_to_end(scope, last=False)
        super()._assign_work_unit(node)


def whole_run(tests: dict[str, bool]) -> bool:
    """Whether the tests of a group are of whole runs."""
    return any(is_whole_run(nodeid.partition("::")[0]) for nodeid in tests)

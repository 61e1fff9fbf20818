"""The groups of tests that share a lane of the suite."""

import pytest

from tests.support.lanes import group


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tests/e2e/test_stops.py", "stack"),
        ("tests/soak/test_publishes.py", "stack"),
        ("tests/process/engine/vllm_ext/test_server.py", "server"),
        ("tests/soak/test_exactly_once.py", "tests/soak/test_exactly_once.py"),
        ("tests/unit/test_launch.py", "tests/unit/test_launch.py"),
    ],
)
def test_the_group_of_a_file(path: str, name: str) -> None:
    assert group(path) == name

"""A run that several files compare with."""

from __future__ import annotations

import pytest

from tests.support.e2e.several_adapters import STEPS, Ended, entries, run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The adapter ``attention`` in a run of its own."""
    ended = run(tmp_path_factory.mktemp("alone"), "alone", entries("attention"))
    assert ended.code == 0, ended.output
    assert len(ended.states["attention"]) == 1 + STEPS["attention"]
    digests = {tuple(digest) for digest in ended.states["attention"].values()}
    assert len(digests) == 1 + STEPS["attention"], "comparisons can fail: versions differ"
    return ended

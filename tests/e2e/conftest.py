"""A run that several files compare with."""

from __future__ import annotations

import pytest

from tests.support.e2e.several_adapters import Ended, entries, run


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The adapter ``attention`` of ten steps in a run of its own."""
    ended = run(tmp_path_factory.mktemp("alone"), "alone", entries("attention"))
    assert ended.code == 0, ended.output
    assert len(ended.states["attention"]) == 11
    digests = {tuple(digest) for digest in ended.states["attention"].values()}
    assert len(digests) == 11, "comparisons can fail: versions differ"
    return ended

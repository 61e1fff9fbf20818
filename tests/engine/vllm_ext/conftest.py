"""One real server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .serving import RunningServer, connect, make_model, start


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny model"))


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("server") / "run folder"
    process = start(folder, tiny_model)
    try:
        running = connect(folder, tiny_model, process)
        yield running
        running.source.close()
    finally:
        process.terminate()
        process.wait(20)

"""What all tests share: a tiny model, a server that serves it. torch and vLLM are imported on first use."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.engine.vllm_ext.serving import RunningServer
    from tests.support.launcher.driven import Run
    from tests.support.rollout.running import Running


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.engine.vllm_ext.serving import make_model

    return make_model(tmp_path_factory.mktemp("tiny model"))


@pytest.fixture(scope="session")
def even_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token goes to all experts.

    Where two experts are equally good for a token, a rounding error chooses between them, and of
    200,000 tokens one sequence differed by 0.05 for that reason alone.
    """
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("even") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": config["num_local_experts"]}))
    return folder


@pytest.fixture(scope="session")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    from tests.support.engine.vllm_ext.serving import connect, start

    folder = tmp_path_factory.mktemp("server") / "run folder"
    process = start(folder, tiny_model)
    try:
        running = connect(folder, tiny_model, process)
        yield running
        running.source.close()
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start launchers of small programs in the run folder ``run``."""
    from tests.support.launcher.driven import beginning

    with beginning(tmp_path / "run") as start:
        yield start


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start controllers with fake servers."""
    from tests.support.rollout.running import controllers

    with controllers(tmp_path) as start:
        yield start

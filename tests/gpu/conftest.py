"""Tests that need a CUDA GPU: ``make test-gpu``. Elsewhere all of them are skipped with one reason.

Each test writes its figures as JSON into the folder AREAL_LORA_GPU_RESULTS (default: gpu_results).
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

REASON = "needs a CUDA GPU: run make test-gpu on a machine that has one"
HERE = Path(__file__).parent

Record = Callable[[str, dict[str, float | str | bool]], None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Record:
    """Write figures with what they must show; call it before the assertions."""

    def write(must: str, figures: dict[str, float | str | bool]) -> None:
        folder = Path(os.environ.get("AREAL_LORA_GPU_RESULTS", "gpu_results"))
        folder.mkdir(parents=True, exist_ok=True)
        about = {
            "test": request.node.name,
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
        }
        file = folder / f"{request.node.name}.json"
        file.write_text(json.dumps({**about, "must": must, "figures": figures}, indent=2) + "\n")
        print(must, figures)

    return write

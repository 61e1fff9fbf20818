"""Types of the package: `make check` without its fast parts, beside other tests in place of before them."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.paths import ROOT


@pytest.mark.timeout(900)
def test_mypy_finds_no_error() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "types"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=880
    )
    assert done.returncode == 0, done.stdout + done.stderr

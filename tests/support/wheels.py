"""Packages that are no dependency of the package, installed for a test into folders of their own."""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

OFFLINE = re.compile(r"Could not find a version|No matching distribution|Connection|Temporary failure|timed out")


@cache
def installed(*packages: str) -> Path:
    """A folder with ``packages`` and nothing they depend on. Skips where no package index is reached."""
    folder = Path(tempfile.mkdtemp(prefix="some wheels "))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-compile",
        "--target",
        str(folder),
        *packages,
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder

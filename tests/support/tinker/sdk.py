"""The unmodified SDK, each version in a folder of its own: no dependency of the package."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

VERSIONS = ("0.24.1", "0.38.0")
BESIDE = ("pyqwest", "orjson", "distro", "zstandard", "h2", "hpack", "hyperframe", "sniffio")
"""What the SDK needs beside the packages of the tests' environment."""
OFFLINE = re.compile(r"Could not find a version|No matching distribution|Connection|Temporary failure|timed out")


@cache
def sdk_path(version: str) -> str:
    """``PYTHONPATH`` of programs that import this version. Skips where no package index is reached."""
    return f"{_installed(f'tinker=={version}')}{os.pathsep}{_installed(*BESIDE)}"


@cache
def _installed(*packages: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tinker sdk "))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    done = subprocess.run(pip, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode and OFFLINE.search(done.stderr):
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder


def environment(version: str) -> dict[str, str]:
    """Of a program that uses the SDK; nothing of the user's own settings reaches it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    more = {"PYTHONPATH": sdk_path(version), "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return own | more

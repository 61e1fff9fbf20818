"""Packages that are no dependency of the package, installed for tests into folders of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

import pytest

OFFLINE = re.compile(r"Could not find a version|No matching distribution|Connection|Temporary failure|timed out")
FOLDER = Path(sys.prefix, "wheels of tests")
"""Kept from session to session with what Python has compiled: that takes longer than most tests. Remove it to renew."""


@cache
def installed(*packages: str) -> Path:
    """A folder with ``packages`` and nothing they depend on. Skips where no package index is reached."""
    folder = FOLDER / blake2b(repr((sys.version, packages)).encode(), digest_size=8).hexdigest()
    if folder.exists():
        return folder
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as made:
        target = Path(made, "whole")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(target)]
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False, timeout=240)
        if done.returncode and OFFLINE.search(done.stderr):
            pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
        with suppress(OSError):  # another lane was faster
            os.rename(target, folder)
    return folder

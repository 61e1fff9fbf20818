"""Packages that are no dependency of the package, installed for tests into folders of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

import pytest

OFFLINE = re.compile(r"Could not find a version|No matching distribution|Connection|Temporary failure|timed out")
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64", "any")
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


def unpacked(package: str, version: str, folder: Path, *, whole: bool = False) -> Path:
    """The Python files of a wheel for GPUs, or the ``whole`` wheel. Skips the test where no package index is reached.

    AREAL_LORA_WHEELS names a folder that keeps wheels between sessions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    cache = Path(os.environ.get("AREAL_LORA_WHEELS") or tempfile.mkdtemp(dir=folder))
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(cache.glob(pattern)):
        platforms = [f"--platform={p}" for p in PLATFORMS]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.12", "--implementation=cp", *platforms, f"--dest={cache}"]
        try:
            done = subprocess.run(
                [*command, f"{package}=={version}"], capture_output=True, text=True, timeout=240, check=False
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"{package} {version} was not downloaded within 240 s")
        if done.returncode:
            pytest.skip(f"no package index with {package} {version}: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(cache.glob(pattern))) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if whole or name.endswith(".py")])
    return folder

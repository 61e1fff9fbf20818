"""The unmodified SDK, each version in a folder of its own: no dependency of the package."""

from __future__ import annotations

import os
from functools import cache

from tests.support.wheels import installed

VERSIONS = ("0.24.1", "0.38.0")
BESIDE = ("pyqwest", "orjson", "distro", "zstandard", "h2", "hpack", "hyperframe", "sniffio")
"""What the SDK needs beside the packages of the tests' environment."""


@cache
def sdk_path(version: str) -> str:
    """``PYTHONPATH`` of programs that import this version. Skips where no package index is reached."""
    return f"{installed(f'tinker=={version}')}{os.pathsep}{installed(*BESIDE)}"


def environment(version: str) -> dict[str, str]:
    """Of a program that uses the SDK; nothing of the user's own settings reaches it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    more = {"PYTHONPATH": sdk_path(version), "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return own | more

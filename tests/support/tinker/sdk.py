"""The unmodified SDK, each version in a folder of its own: no dependency of the package."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from tests.support.forks.starter import session, starter_of
from tests.support.wheels import installed

VERSIONS = ("0.24.1", "0.38.0")
BESIDE = ("pyqwest", "orjson", "distro", "zstandard", "h2", "hpack", "hyperframe", "sniffio")
"""What the SDK needs beside the packages of the tests' environment."""
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""Which huggingface_hub reads at its import."""
PRELOAD = "tests.support.tinker.preload"


@cache
def sdk_path(version: str) -> str:
    """``PYTHONPATH`` of programs that import this version. Skips where no package index is reached."""
    return f"{installed(f'tinker=={version}')}{os.pathsep}{installed(*BESIDE)}"


def environment(version: str) -> dict[str, str]:
    """Of a program that uses the SDK; nothing of the user's own settings reaches it."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    more = {"PYTHONPATH": sdk_path(version), "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    return own | more | OFFLINE


@cache
def _forked_python() -> str:
    return str(starter_of(PRELOAD).interpreter(session() / f"sdk-{os.getpid()}"))


def sdk_program(file: Path, *words: str) -> list[str]:
    """The command that runs ``file`` with the SDK of its ``PYTHONPATH``, in a fork."""
    return [_forked_python(), "-m", PRELOAD, str(file), *words]

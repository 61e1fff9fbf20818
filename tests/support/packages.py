"""Programs of Debian's packages, for tests that need them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence


def search_path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def missing(programs: Sequence[str], packages: Sequence[str]) -> str:
    """Which of ``programs`` are not here; empty for none. As root, the packages are installed first where apt is."""

    def absent() -> list[str]:
        return [program for program in programs if shutil.which(program, path=search_path()) is None]

    if absent() and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (("apt-get", "update"), ("apt-get", "install", "-y", *packages)):
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(command, env=environment, capture_output=True, check=False, timeout=240)
    return f"not installed: {', '.join(absent())} (Debian: {', '.join(packages)})" if absent() else ""

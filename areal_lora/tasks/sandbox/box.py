"""Start a process inside bubblewrap: process ids, IPC and network of its own, all files read-only.

A scorer process that may start others runs in it where bubblewrap works. All of its processes end with it, and it
sees no other process of the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from areal_lora.run_folder.paths import RunFolder

PROBE_S = 10.0
PARENT_PID = 1
"""Parent of the boxed process, as it sees it."""


def boxed(argv: Sequence[str], *, network: bool, hidden: Path | None, scratch: Path | None) -> list[str] | None:
    """``argv`` inside bubblewrap, without the content of ``hidden``; None where it is not installed or not usable.

    Of ``hidden``, a run folder, the folder with the user's own code stays visible.
    """
    tool = shutil.which("bwrap")
    if tool is None or is_root() or not usable(tool):
        return None
    arguments = _arguments(network=network)
    if hidden is not None and hidden.is_dir():
        code = str(RunFolder(hidden).code)
        arguments += ["--tmpfs", str(hidden), "--ro-bind-try", code, code]
    if scratch is not None:
        arguments += ["--bind", str(scratch), str(scratch)]
    return [tool, *arguments, "--", *argv]


def is_root() -> bool:
    """Whether the kernel would not limit the number of processes inside: then the fence changes the user instead."""
    return os.geteuid() == 0


@cache
def usable(tool: str) -> bool:
    """Whether this user may make namespaces here; many containers forbid it."""
    try:
        tried = subprocess.run(
            [tool, *_arguments(network=False), "--", "/bin/true"], capture_output=True, timeout=PROBE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return tried.returncode == 0


def _arguments(*, network: bool) -> list[str]:
    alone = ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    if not network:
        alone.append("--unshare-net")
    return [*alone, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]

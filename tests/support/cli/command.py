"""``python -m areal_lora`` as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shlex import quote

from tests.support.forks.starter import Starter, session, starter_of
from tests.support.paths import ROOT

COMMAND = (sys.executable, "-m", "areal_lora")


def command_starter() -> Starter:
    return starter_of("tests.support.forks.commands")


@cache
def forked_python() -> str:
    """An interpreter for ``-m`` of commands and launchers: forks of a process that has their imports."""
    return str(command_starter().interpreter(session() / f"python-{os.getpid()}"))


def programs(folder: Path) -> None:
    """Make ``folder`` the ``bin`` of this environment, in which commands of this package are forks."""
    folder.mkdir(parents=True)
    for program in Path(sys.prefix, "bin").iterdir():
        (folder / program.name).symlink_to(program)
    forked = {
        "python": f'[ "${{2%%.*}}" = areal_lora ] || exec {quote(sys.executable)} "$@"',
        "areal-lora": 'set -- -m areal_lora "$@"',
    }
    for name, command in forked.items():
        (folder / name).unlink()
        (folder / name).write_text(f'#!/bin/sh\n{command}\nexec {quote(forked_python())} "$@"\n')
        (folder / name).chmod(0o755)


def areal_lora(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout_s: float = 150.0
) -> subprocess.CompletedProcess[str]:
    """In a fork; with an environment of its own (which may have other packages) in an interpreter of its own."""
    command = [forked_python(), *COMMAND[1:]] if env is None else COMMAND
    return subprocess.run(
        [*command, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )

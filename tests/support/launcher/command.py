"""The command line of a run of the shipped example on this machine."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from areal_lora.launcher.plan import MODULES
from tests.support.cli.command import forked_python
from tests.support.forks.starter import starter_of
from tests.support.paths import EXAMPLES


def plain_run(*arguments: str) -> list[str]:
    """Command that launches the embedded example in new interpreters; ``arguments`` follow its two configurations.

    A server that is stalled for 20 s is not lost.
    """
    both = configs("gsm8k_grpo_megatron_lora_moe", "embedded")
    return [sys.executable, "-m", "areal_lora.launch", *both, *arguments, "weight_sync.timeout_s=120"]


def embedded_run(*arguments: str) -> list[str]:
    """``plain_run`` whose launcher is a fork."""
    return [forked_python(), *plain_run(*arguments)[1:]]


def forked_run(folder: Path, *arguments: str) -> list[str]:
    """``embedded_run`` whose roles are forks, too, written into ``folder``."""
    return [*embedded_run(*arguments), *forked_roles(folder)]


def configs(*names: str, folder: Path = EXAMPLES) -> list[str]:
    """``--config`` options for example files by name."""
    return [part for name in names for part in ("--config", str(folder / f"{name}.yaml"))]


ROLES = {
    "trainer.python": "tests.support.distributed.preload",
    "cluster.controller_python": "tests.support.distributed.preload",
    "rollout.python": "tests.support.forks.server",
}


def forked_roles(folder: Path, *interpreters: str) -> list[str]:
    """Overrides for a run whose trainer ranks, controller and servers are forks of processes with their imports.

    For runs that are not about their start. The executables are written into ``folder``. ``interpreters``, if given,
    are the keys of the only roles that are forks.
    """
    chosen = {key: ROLES[key] for key in interpreters or ROLES}
    return [f"{key}={starter_of(preload).interpreter(folder / key)}" for key, preload in chosen.items()]


def with_forked_roles(folder: Path, script: str) -> list[str]:
    """Command that runs a script whose run's roles are forks; what else it starts are new interpreters."""
    python, cases = folder / "python of roles", []
    for role, key in zip(("trainer", "controller", "server"), ROLES, strict=True):
        executable = starter_of(ROLES[key]).interpreter(folder / key)
        cases.append(f'{MODULES[role]}) exec {shlex.quote(str(executable))} "$@" ;;')
    other = f'*) exec {shlex.quote(sys.executable)} "$@" ;;'
    python.write_text("\n".join(["#!/bin/sh", 'case "$2" in', *cases, other, "esac"]))
    python.chmod(0o755)
    code = f"import runpy, sys; sys.executable = {str(python)!r}; runpy.run_path({script!r}, run_name='__main__')"
    return [sys.executable, "-c", code]

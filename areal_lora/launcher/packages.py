"""Whether the packages of a run's roles are installed, before any process starts."""

from __future__ import annotations

import importlib.util
import sys

from areal_lora.config.models import Config
from areal_lora.errors import EnvironmentError_

ENGINES = {"megatron": ("megatron.core", "megatron.bridge"), "fsdp": ("transformers",)}
"""Modules of the trainer role by engine; its other packages are dependencies of these or of areal_lora."""
SERVERS = ("vllm",)


def check_packages(config: Config) -> None:
    """Raise EnvironmentError_ for a missing package of a role that this interpreter runs; imports nothing.

    Roles with an interpreter of their own are examined by `areal-lora doctor`.
    """
    own = {"trainer": config.trainer.python, "rollout": config.rollout.python}
    for role, modules in {"trainer": ENGINES[config.trainer.engine], "rollout": SERVERS}.items():
        if own[role] not in (None, sys.executable):
            continue
        for module in modules:
            if not _is_here(module):
                fix = f"see 'Install' in docs/en/quickstart.md, or set {role}.python to an interpreter that has it"
                raise EnvironmentError_(f"{role}: {sys.executable} has no package {module} (fix: {fix})")


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False

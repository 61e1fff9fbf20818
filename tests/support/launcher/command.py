"""The command line of a run of the shipped example on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.paths import EXAMPLES


def embedded_run(*arguments: str) -> list[str]:
    """Command that launches the embedded example; ``arguments`` follow its two configurations."""
    return [sys.executable, "-m", "areal_lora.launch", *configs("gsm8k_grpo_megatron_lora_moe", "embedded"), *arguments]


def configs(*names: str, folder: Path = EXAMPLES) -> list[str]:
    """``--config`` options for example files by name."""
    return [part for name in names for part in ("--config", str(folder / f"{name}.yaml"))]

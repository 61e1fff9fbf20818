"""The environment of processes with the emulated device."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.wheels import installed

TRANSFORMER_ENGINE = "transformer-engine==2.18.0"


def emulating(folder: Path, *packages: Path, transformer_engine: bool = True) -> dict[str, str]:
    """The environment in which each Python process has the device. ``packages`` stand before the installed ones.

    Writes to ``folder``. Skips where no C++ compiler is; with ``transformer_engine`` where no package index is, too.
    """
    if shutil.which("g++") is None:
        pytest.skip("needs g++, for the device")
    lines = ["from tests.support.gpu.emulated import cuda", "cuda.load()"]
    if transformer_engine:
        lines += ["from tests.support.gpu.emulated import transformer_engine", "transformer_engine.install()"]
        packages = (*packages, installed(TRANSFORMER_ENGINE))
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
    path = os.pathsep.join(map(str, (folder, *packages, ROOT)))
    return os.environ | {"PYTHONPATH": path, "EMULATED": "cuda"}

"""Put the examples into the package where it is not installed from a checkout; all else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    def run(self) -> None:
        super().run()
        examples = Path(__file__).parent / "examples"
        if not self.editable_mode and examples.is_dir():
            target = Path(self.build_lib) / "areal_lora" / "examples"
            shutil.copytree(examples, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": BuildWithExamples})

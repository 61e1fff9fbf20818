"""What the distribution says of itself."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

APACHE_2 = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
"""sha256 of www.apache.org/licenses/LICENSE-2.0.txt."""


def test_the_license_is_apache_2_in_the_file_the_readme_and_the_metadata(tmp_path: Path) -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == APACHE_2
    assert "[Apache License 2.0](LICENSE)" in (ROOT / "README.md").read_text()
    (tmp_path / "areal_lora").mkdir()
    for name in ("pyproject.toml", "LICENSE", "areal_lora/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    code = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('out'))"
    (tmp_path / "out").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    folder = tmp_path / "out" / done.stdout.strip().splitlines()[-1]
    fields = (folder / "METADATA").read_text().splitlines()
    assert "License-Expression: Apache-2.0" in fields
    assert "License-File: LICENSE" in fields
    assert (folder / "licenses" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()

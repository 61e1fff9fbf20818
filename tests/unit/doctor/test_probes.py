"""The doctor looks at the code that processes of a run would import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_lora.doctor.probes import probe_role


@pytest.mark.parametrize("by", ["working folder", "PYTHONPATH"])
def test_a_role_is_examined_where_its_process_would_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    place = tmp_path / "another checkout"
    (place / "areal_lora").mkdir(parents=True)
    (place / "areal_lora" / "__init__.py").write_text("")
    (tmp_path / "empty").mkdir()
    if by == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.chdir(place if by == "working folder" else tmp_path / "empty")
    facts = probe_role("trainer", sys.executable)
    # As the launcher starts a process: `python -m` in the working folder, with the environment.
    show = [sys.executable, "-c", "import areal_lora; print(areal_lora.__path__[0])"]
    imported = subprocess.run(show, capture_output=True, text=True, check=True).stdout.strip()
    assert facts.location == imported == str(place / "areal_lora")

"""The script of docs/en/your_own_task.md and the notebook, as they stand: real Megatron, real vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from areal_lora.library.runs import load_run
from tests.support.docs import blocks
from tests.support.launcher.command import with_forked_roles
from tests.support.paths import ROOT, SUPPORT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_twenty_lines_train_with_their_own_reward_and_the_notebook_goes_on(tmp_path: Path) -> None:
    away = tmp_path / "a folder"
    away.mkdir()
    page = ROOT / "docs" / "en" / "your_own_task.md"
    [script] = [block.text for block in blocks(page, "From Python") if block.language == "python"]
    assert len([line for line in script.splitlines() if line]) <= 20
    (away / "script.py").write_text(script)
    done = python(away, *with_forked_roles(tmp_path, "script.py"))
    assert done.returncode == 0, done.stdout + done.stderr
    run = load_run(away / "runs" / "python")
    assert [step.step for step in run.steps] == [0, 1, 2]
    for step in run.steps:
        assert set(step.reward_components) == {"right", "brief"}
        assert step.reward_mean == pytest.approx(sum(step.reward_components.values()), abs=1e-5)
    assert done.stdout.splitlines()[-1] == f"{run.summary.eval_before} {run.summary.eval_after} {run.adapter}"
    assert run.adapter.joinpath("adapter_model.safetensors").is_file()
    assert run.versions[-1] == 3

    # The notebook's run is the same one: it is done, so its cells need no further training.
    (away / "script.py").unlink()
    done = python(away, sys.executable, str(SUPPORT / "notebook.py"), str(ROOT / "examples" / "python.ipynb"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "This run is done: 3 steps." in done.stdout
    assert done.stdout.splitlines()[-1] == f"{run.versions} {run.adapter}"
    exported = load_run(run.folder).export("newest", away / "exported")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (exported / name).read_bytes() == (run.adapter / name).read_bytes()


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)

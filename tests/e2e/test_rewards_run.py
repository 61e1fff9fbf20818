"""A run whose reward fails on every answer; a stand-in for the server makes them up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from areal_lora.library.runs import load_run
from tests.support.e2e.elastic import made_up_roles
from tests.support.launcher.command import configs, embedded_run
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_reward_that_fails_on_every_answer_ends_the_run_once_and_with_its_line(tmp_path: Path) -> None:
    """It passes the check of gold answers, which have one token."""
    file = tmp_path / "rewards.py"
    file.write_text("def reward(completion, n_tokens):\n    return 1.0 if n_tokens == 1 else None.upper()\n")
    (tmp_path / "broken.yaml").write_text(f"adapters: [{{reward: {{kind: function, path: '{file}:reward'}}}}]\n")
    command = embedded_run(
        *configs("broken", folder=tmp_path),
        f"run.root={tmp_path}",
        "run.name=broken",
        "run.steps=2",
        "eval.every_steps=0",
        "adapters.gsm8k.sampling.prompts_per_step=8",
        "adapters.gsm8k.task.n_eval=8",
        *made_up_roles(tmp_path),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 64, done.stdout + done.stderr
    error = f"AttributeError: 'NoneType' object has no attribute 'upper' ({file}:2)"
    [line] = [line for line in done.stdout.splitlines() if "exited with code 64: " in line]
    assert line.startswith("trainer-"), "every rank ends alike"
    assert error in line
    assert "restarted in" not in done.stdout
    failure = load_run(tmp_path / "broken").failure
    assert failure is not None
    assert failure.code == 64
    assert error in failure.error
    log = (tmp_path / "broken" / "logs" / "controller-0.log").read_text()
    assert log.count("in reward") == 1, "one traceback"

"""The doctor looks at the code that processes of a run would import."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from areal_lora.config.sections.run import SlurmConfig
from areal_lora.doctor.probes import NoAnswer, answer_of, probe_role
from tests.support.clocks import seen


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


def test_a_command_without_an_answer_is_told_to_end(tmp_path: Path) -> None:
    """As srun must be, whose step else continues."""
    told = tmp_path / "told"
    script = f"trap 'touch {shlex.quote(str(told))}; exit 1' TERM; while :; do sleep 0.05; done"

    def run() -> bool:
        with pytest.raises(NoAnswer, match=r"no answer within 1 s"):
            answer_of(["bash", "-c", script], 1.0)
        return told.exists()

    assert seen(run, bool)


def test_what_a_wrapper_prints_is_no_answer_and_a_line_of_setup_that_fails_is_named() -> None:
    greeting = ["bash", "-c", 'echo welcome; exec "$@"', "bash"]
    slurm = SlurmConfig(setup=["export SET=1; echo printed", 'test "$SET" = 1'], wrapper={"trainer": greeting})
    facts = probe_role("trainer", sys.executable, slurm.prefix("trainer", KEY="1"))
    assert (facts.problem, bool(facts.version)) == ("", True)
    failing = SlurmConfig(setup=["true", "false"]).prefix("trainer")
    facts = probe_role("trainer", sys.executable, failing)
    assert "it ended with code 69: error: cluster.slurm.setup: false ended with code 1 on " in facts.problem

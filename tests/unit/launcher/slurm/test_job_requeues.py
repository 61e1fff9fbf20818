"""Requeues without a new checkpoint are counted over the job's lifetimes."""

from __future__ import annotations

import errno
import io
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from areal_lora.config.facts import Facts
from areal_lora.config.load import load_config
from areal_lora.errors import ExitCode
from areal_lora.families.registry import known_config
from areal_lora.launcher.plan import make_plan
from areal_lora.launcher.slurm import job
from areal_lora.launcher.slurm.job import Lifetime, next_lifetime, read_lifetime, too_many, write_lifetime
from areal_lora.launcher.slurm.job_query import Allocation
from areal_lora.launcher.slurm.states import JobOutcome
from areal_lora.run_folder.paths import RunFolder
from tests.support.paths import EXAMPLES

NONE: dict[str, int] = {}


def test_lifetimes_without_progress_add_up_and_a_checkpoint_begins_the_count_again() -> None:
    life = next_lifetime(None, "17", 0, NONE)
    counts = [life.without]
    for restarts, newest in enumerate([NONE, NONE, {"math": 3}, {"math": 3}, {"math": 4}, {"math": 4, "code": 1}], 1):
        life = next_lifetime(life, "17", restarts, newest)
        counts.append(life.without)
    assert counts == [0, 1, 2, 0, 1, 0, 0]


def test_a_job_that_was_submitted_again_begins_to_count_again() -> None:
    last = Lifetime(job="17", restarts=3, newest=NONE, without=3)
    assert next_lifetime(last, "18", 0, NONE).without == 0


def test_a_restart_of_the_same_lifetime_is_no_requeue() -> None:
    last = Lifetime(job="17", restarts=1, newest=NONE, without=1)
    assert next_lifetime(last, "17", 1, NONE).without == 0


def test_the_bound() -> None:
    assert not too_many(2, 2)
    assert "3 times in a row without a new checkpoint (run.max_restarts is 2" in too_many(3, 2)
    assert "requeued once in a row" in too_many(1, 0)


def test_the_record_survives_and_a_broken_one_counts_from_the_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    assert read_lifetime(folder) is None
    life = Lifetime(job="17", restarts=1, newest={"math": 3}, without=1, reason="USR1 arrived")
    write_lifetime(folder, life)
    assert read_lifetime(folder) == life
    folder.job_requeues.write_text("{")
    assert read_lifetime(folder) is None


def lifetime(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restarts: int,
    code: int,
    state: str,
    result: JobOutcome | None = None,
) -> tuple[int, str]:
    """A lifetime of job 17 in which the file system fails: the code, and what was printed or run.

    With a ``result`` it fails when the steps are stopped.
    """
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], [f"run.root={tmp_path}", "run.max_restarts=2"]
    )
    plan, out = make_plan(config, Facts(hf_config=known_config(config.model.path))), io.StringIO()
    plan.run_folder.path.mkdir(exist_ok=True)

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code), "/shared/runs/x/events.jsonl")

    monkeypatch.setattr(job, "SlurmSteps", lambda *_: nullcontext(SimpleNamespace(stop=fail)))
    monkeypatch.setattr(job.SlurmJob, "_watch", fail if result is None else lambda *_: result)
    monkeypatch.setattr(job, "look", lambda *_: SimpleNamespace(state=state))
    monkeypatch.setattr(job, "run", lambda *words: out.write(f"{' '.join(words)}\n"))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(fileno=lambda: 0))
    it = Allocation(job="17", components=("17",), restarts=restarts, hosts=("n0", "n1", "n2"))
    return job.SlurmJob(config, plan, it, Console(file=out, width=300)).run(), out.getvalue()


def test_an_error_of_the_file_system_requeues_the_job_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for restarts in range(2):
        code, printed = lifetime(tmp_path, monkeypatch, restarts, errno.ESTALE, "RUNNING")
        assert code == ExitCode.TEMPORARY
        assert "The job is requeued: the supervisor failed: [Errno 116] Stale file handle: '/shared" in printed
        assert "scontrol requeue 17" in printed
    code, printed = lifetime(tmp_path, monkeypatch, 2, errno.ESTALE, "RUNNING")
    assert code == ExitCode.COMPONENT_FAILED
    assert "3 times in a row without a new checkpoint" in printed
    assert "scontrol requeue" not in printed


def test_a_cancelled_job_and_one_with_a_full_disk_are_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, printed = lifetime(tmp_path, monkeypatch, 0, errno.ESTALE, "COMPLETING")
    assert "scontrol requeue" not in printed
    with pytest.raises(OSError, match="No space left"):
        lifetime(tmp_path, monkeypatch, 0, errno.ENOSPC, "RUNNING")


def test_an_error_while_steps_are_stopped_does_not_change_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, printed = lifetime(tmp_path, monkeypatch, 0, errno.ESTALE, "RUNNING", JobOutcome(code=0))
    assert code == 0
    assert "scontrol requeue" not in printed

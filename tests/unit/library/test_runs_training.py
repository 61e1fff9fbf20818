"""``train``: the launcher's run with its ends as results and errors; its processes are replaced."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import areal_lora
from areal_lora.config.sections.task import FunctionReward
from areal_lora.errors import ConfigErrors, ExitCode, RunFailed, RunInterrupted
from areal_lora.launcher import run as running
from areal_lora.launcher.restarts import RunEnd
from areal_lora.obs.metrics.writer import MetricsWriter
from areal_lora.obs.report.summary import write_summary
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.rewards import numeric_match
from tests.support.obs.records import step_record
from tests.support.obs.three_adapters import make_three

EMBEDDED = ["gsm8k_grpo_megatron_lora_moe.yaml", "embedded.yaml"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def handlers() -> Iterator[None]:
    """SIGINT and SIGTERM end as they began, also if a test finds them changed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def finish(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_local(config: areal_lora.Config, plan: Any, out: object) -> RunEnd:
        folder: RunFolder = plan.run_folder
        assert folder.config.is_file(), "the run folder is prepared before processes start"
        with MetricsWriter(folder) as metrics:
            metrics.write(step_record(step=0, version=0, time_s=0, adapter="gsm8k", reward_mean=0.5))
        for name in ("v000001", "v000003"):
            folder.adapter_checkpoints("gsm8k").joinpath(name).mkdir(parents=True)
        folder.adapter_export("gsm8k").mkdir(parents=True)
        write_summary(folder, wall_s=1.0, adapters={"gsm8k": "adapter"}, report_path="report")
        return RunEnd(code=ExitCode.DONE)

    monkeypatch.setattr(running, "run_local", run_local)


def failing(tmp_path: Path, code: int = 9, command: str = "") -> str:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{command}\nexit {code}\n")
    program.chmod(0o755)
    return f"rollout.python={program}"


def test_files_and_mappings_give_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finish(monkeypatch)
    given = {"run": {"name": "x", "steps": 7, "root": tmp_path / "here"}, "trainer": {"max_tokens_per_microbatch": 512}}
    run = areal_lora.train([*EMBEDDED, given], overrides=["run.steps=1"])
    assert given["run"]["steps"] == 7, "what the caller gave is not changed"
    assert (run.folder, run.finished) == (tmp_path / "here" / "x", True)
    assert (run.config.run.steps, run.config.trainer.max_tokens_per_microbatch) == (1, 512)
    assert [step.reward_mean for step in run.steps] == [0.5]
    assert run.steps is run.metrics.steps
    assert next(run.records()) == run.steps[0]
    assert (run.summary.steps, run.versions, run.adapter) == (1, [1, 3], run.folder / "adapters" / "gsm8k")
    assert run.adapters == {"gsm8k": run.adapter}
    assert run.report().is_file()
    again = areal_lora.train(run.config)
    assert again.summary == run.summary, "a finished run is found, not repeated"
    with pytest.raises(areal_lora.ConfigError, match=r"rank: it is 2, but the run was started with"):
        areal_lora.train(run.config, overrides=["adapters.gsm8k.rank=2"])


def test_a_copied_run_is_read_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    finish(monkeypatch)
    run = areal_lora.train(EMBEDDED, overrides=["run.name=x", "run.steps=1"])
    run.folder.rename(tmp_path / "moved")
    moved = areal_lora.load_run("moved")
    assert (moved.folder, moved.config.run.name) == (tmp_path / "moved", "moved")
    assert moved.versions == [1, 3]
    for missing, words in (("nowhere", "no such folder"), (".", "not a run folder")):
        with pytest.raises(areal_lora.ConfigError, match=words):
            areal_lora.load_run(missing)


def test_an_object_is_in_the_run_folder_and_in_its_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finish(monkeypatch)
    reward = numeric_match  # of a package in a checkout, which other processes need not find
    run = areal_lora.train(EMBEDDED, overrides=["run.name=x", "run.steps=1"], reward=reward)
    saved = run.config.adapters[0].reward
    assert isinstance(saved, FunctionReward)
    assert saved.path == f"{run.folder}/code/areal_lora_reward.py:numeric_match"
    assert "import numeric_match" in (run.folder / "code" / "areal_lora_reward.py").read_text()
    areal_lora.train(EMBEDDED, overrides=["run.name=x", "run.steps=1"], reward=reward, fresh=True)
    assert (run.folder / "code" / "areal_lora_reward.py").is_file()
    assert (tmp_path / "runs" / "x.1" / "code" / "areal_lora_reward.py").is_file()


def test_all_that_the_guardrails_refuse(tmp_path: Path) -> None:
    wrong = ["trainer.tp=3", "adapters.gsm8k.rank=64", "rollout.max_lora_rank=7"]
    with pytest.raises(ConfigErrors) as caught:
        areal_lora.train(EMBEDDED, overrides=wrong)
    assert {"trainer.tp", "adapters.0.rank", "rollout.max_lora_rank"} <= {e.path for e in caught.value.errors}
    assert not (tmp_path / "runs").exists()


def test_a_failed_process_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"server-0 exited with code 65; its log is .*server-0\.log") as caught:
        areal_lora.train(EMBEDDED, overrides=["run.name=x", failing(tmp_path, 65)])
    assert (caught.value.exit_code, caught.value.folder) == (65, tmp_path / "runs" / "x")
    assert not areal_lora.load_run(caught.value.folder).finished


def test_ctrl_c_stops_the_run_and_the_next_one_can_be_stopped_too(tmp_path: Path, handlers: None) -> None:
    waiting = failing(tmp_path, command="exec sleep 600")
    for name in ("first", "second"):
        folder = tmp_path / "runs" / name
        began = threading.Thread(target=interrupt_when, args=(folder / "logs" / "server-0.log",))
        began.start()
        mine = signal.getsignal(signal.SIGINT)
        with pytest.raises(RunInterrupted) as caught:
            areal_lora.train(EMBEDDED, overrides=[f"run.name={name}", waiting, waiting.replace("rollout", "trainer")])
        assert caught.value.exit_code == ExitCode.INTERRUPTED
        assert signal.getsignal(signal.SIGINT) is mine, "Ctrl-C works in the script as before"
        began.join()


def interrupt_when(file: Path) -> None:
    deadline = time.monotonic() + 120
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_and_for_slurm_it_says_so(tmp_path: Path) -> None:
    found: list[BaseException] = []

    def start() -> None:
        try:
            areal_lora.train(EMBEDDED)
        except areal_lora.ConfigError as error:
            found.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert "call it in the main thread" in str(found[0])
    with pytest.raises(areal_lora.ConfigError, match="submit it with areal-lora train"):
        areal_lora.train("gsm8k_grpo_megatron_lora_moe.yaml")


def test_one_of_several_adapters_is_named(tmp_path: Path) -> None:
    folder = make_three(tmp_path / "x")
    for version in (2, 4):
        folder.adapter_checkpoints("gamma").joinpath(f"v{version:06d}").mkdir(parents=True)
    run = areal_lora.load_run(folder.path)
    assert run.versions_of("gamma") == [2, 4]
    assert run.adapters == {name: folder.adapter_export(name) for name in ("alpha", "gamma")}
    for ask in (lambda: run.versions, lambda: run.adapter, lambda: run.export("newest", tmp_path / "out")):
        with pytest.raises(areal_lora.ConfigError, match="the run has several: alpha, beta, gamma"):
            ask()
    with pytest.raises(areal_lora.ConfigError, match="holds no whole checkpoint"):
        run.export("newest", tmp_path / "out", "beta")
    assert [record.adapter for record in run.metrics.states if record.state == "failed"] == ["beta"]

"""A controller or server that was stopped is found and started again: the real ones, a server without vLLM.

The launcher's clock is put forward once they are stopped.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lora.config.load import load_config
from areal_lora.launcher.plan import CONTROLLER, MODULES
from areal_lora.launcher.restarts import LONGEST_LOOK_S
from areal_lora.run_folder.events import count_restarts
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret, read_endpoint
from areal_lora.run_folder.status import HEARTBEAT_TIMEOUT_S, last_beats
from tests.support.engine.vllm_ext import stand_in
from tests.support.forks.starter import starter_of
from tests.support.launcher.command import ROLES
from tests.support.launcher.drive import LATER
from tests.support.launcher.driven import Run
from tests.support.paths import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BOTH = ("controller-0", "server-0")
TRAINER = "import pathlib, time\nwhile not (pathlib.Path({folder!r}) / 'enough').exists(): time.sleep(0.05)"


def test_a_stopped_controller_and_a_stopped_server_are_started_again(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, folder = tmp_path / "later", tmp_path / "run"
    monkeypatch.setenv(LATER, f"{HEARTBEAT_TIMEOUT_S + 10}:{LONGEST_LOOK_S - 1}:{later}")
    overrides = ["adapters.gsm8k.task.n_train=64", "adapters.gsm8k.task.n_eval=8"]
    config = load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        [f"run.root={tmp_path}", "run.name=run", *overrides],
    )
    folder.mkdir()
    (folder / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    create_secret(RunFolder(folder))
    python = str(starter_of(ROLES["trainer.python"]).interpreter(tmp_path / "python"))
    run = begin(
        ("server", 0, [python, "-m", stand_in.__name__, "--run-folder", str(folder), "--index", "0"]),
        ("controller", 0, [python, "-m", MODULES[CONTROLLER], "--run-folder", str(folder)]),
        ("trainer", 0, TRAINER.format(folder=str(folder))),
        overrides=overrides,
    )
    run.wait_for(lambda: last_beats(RunFolder(folder)).keys() == set(BOTH))
    for _ in range(3):
        wait_beats(run, RunFolder(folder))
    assert count_restarts(RunFolder(folder)) == {}, "both beat without any request"
    old = {name: pid_of(folder, name) for name in BOTH}
    for pid in old.values():
        os.kill(pid, signal.SIGSTOP)
    later.touch()
    for name in BOTH:
        run.wait_for(lambda name=name: count_restarts(RunFolder(folder)).get(name) == 1)  # type: ignore[misc]
    run.wait_for(lambda: all(pid_of(folder, name) not in (0, old[name]) for name in BOTH))
    run.wait_for(lambda: last_beats(RunFolder(folder)).keys() == set(BOTH))
    (folder / "enough").touch()
    code, output = run.end()
    assert code == 0, output
    for name in BOTH:
        found = re.search(rf"{name} sent no heartbeat for (\d+) s; it is restarted in 0\.1 s \(1 of 3\)", output)
        assert found
        assert HEARTBEAT_TIMEOUT_S <= int(found[1]) < 3 * HEARTBEAT_TIMEOUT_S
    assert count_restarts(RunFolder(folder)) == dict.fromkeys(BOTH, 1)
    assert run.alive() == []


def wait_beats(run: Run, folder: RunFolder) -> None:
    """Until each has beaten again."""
    before = last_beats(folder)
    run.wait_for(lambda: all(last_beats(folder).get(name, 0) > before[name] for name in BOTH))


def pid_of(folder: Path, name: str) -> int:
    """Of the life that has published its ports, 0 if there is none."""
    role, _, index = name.partition("-")
    endpoint = read_endpoint(RunFolder(folder), role, int(index))
    return 0 if endpoint is None else endpoint.pid

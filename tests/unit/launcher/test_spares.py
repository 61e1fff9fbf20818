"""Spare servers of a run: when they are started, restarted and ended. Their processes are small programs."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_lora.config.load import load_config
from areal_lora.config.models import Config
from areal_lora.config.recorded import write_config
from areal_lora.errors import ConfigError, ExitCode
from areal_lora.launcher import spares
from areal_lora.launcher.slurm import job_query
from areal_lora.launcher.slurm.job_steps import SpareJob
from areal_lora.launcher.slurm.states import JobRecord, Phase
from areal_lora.launcher.spares import RunState, add_servers, own_devices, phase_of_run, run_spares
from areal_lora.launcher.start import holder, run_lock
from areal_lora.launcher.supervise import Supervisor
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret
from areal_lora.run_folder.status import last_beats
from tests.support.clocks import wait_until
from tests.support.launcher.cached_mount import CACHE_S, CachedMount
from tests.support.launcher.other_host import look_from_elsewhere
from tests.support.paths import EXAMPLES

RUNNING, OVER = (RunState(phase=g, session="", secret_ns=1) for g in (Phase.RUNNING, Phase.OVER))
SERVER = """\
import os, pathlib, signal, sys, time
run, index = sys.argv[sys.argv.index("--run-folder") + 1], sys.argv[sys.argv.index("--index") + 1]
log = pathlib.Path(run, "seen")
def note(what):
    with log.open("a") as f: f.write(f"{{index}}{{os.environ['AREAL_LORA_SESSION']}} {{what}}\\n")
terms = []
def term(*_):
    terms.append(0); note("TERM")
    if len(terms) == 2: os._exit(0)
signal.signal(signal.SIGTERM, term)
pathlib.Path(run, "heartbeats").mkdir(exist_ok=True)
pathlib.Path(run, "heartbeats", f"server-{{index}}").touch()
note("start")
end = time.monotonic() + 300
while time.monotonic() < end and not terms:
    time.sleep(0.02)
    if pathlib.Path(run, "crash").exists():
        pathlib.Path(run, "crash").unlink(); os._exit(75)
while not pathlib.Path(run, "leave").exists():
    time.sleep(0.02)
note("left"); os._exit(0)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    python = tmp_path / "python"
    (tmp_path / "server.py").write_text(SERVER.format())
    program = shlex.join([sys.executable, str(tmp_path / "server.py")])
    python.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "run").mkdir()
    monkeypatch.setitem(spares.LOOK_S, "local", 0.1)
    monkeypatch.setattr(spares, "END_S", 60.0)
    return load_config(
        [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"],
        [f"rollout.python={python}", "rollout.servers=2", f"run.root={tmp_path}"],
    )


class Spares(threading.Thread):
    """``run_spares`` in a thread; ``states`` is what it sees of the run."""

    def __init__(self, config: Config, folder: Path, n: int) -> None:
        super().__init__(daemon=True)
        self.state, self.code, self.looks = RUNNING, -1, 0
        self.signals = list[tuple[float, float]]()  # when each was sent, and handled by all
        self._work = (config, RunFolder(folder, ""), n)

    def run(self) -> None:
        config, folder, n = self._work
        terminate = Supervisor.terminate

        def handled(supervisor: Supervisor) -> None:
            """Wait for the handlers: two signals are one to a process that is stalled between them."""
            wanted, sent = n_signals(folder.path) + len(supervisor.running()), time.monotonic()
            terminate(supervisor)
            wait_until(lambda: n_signals(folder.path) >= wanted)
            self.signals.append((sent, time.monotonic()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Supervisor, "terminate", handled)
            patch.setattr(spares, "Interrupts", Quiet)  # signals are for main threads
            self.code = run_spares(config, folder, n, grace_s=60.0, console=Console(quiet=True), state=self._look)

    def _look(self) -> RunState:
        self.looks += 1
        return self.state

    def look_on(self) -> None:
        """Wait until it has looked at the run a few times."""
        before = self.looks
        wait_until(lambda: self.looks > before + 4)


class Quiet:
    count = 0

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


def seen(folder: Path) -> list[str]:
    return (folder / "seen").read_text().splitlines() if (folder / "seen").exists() else []


def n_signals(folder: Path) -> int:
    return sum(line.endswith("TERM") for line in seen(folder))


def test_servers_end_with_the_run_at_once_and_are_restarted_before(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    work = Spares(config, folder, 2)
    work.start()
    wait_until(lambda: sorted(seen(folder)) == ["2 start", "3 start"])
    (folder / "crash").touch()
    wait_until(lambda: len([s for s in seen(folder) if s.endswith("start")]) == 3)
    work.state = OVER
    work.join(120)
    assert work.code == ExitCode.DONE
    said = seen(folder)
    assert said.count("2 TERM") == said.count("3 TERM") == 2, "no grace for a run that is over"
    (_, handled), (sent, _) = work.signals[:2]
    assert sent - handled >= spares.POLL_S, "two signals are two, not one"
    assert not any("left" in s for s in said)
    assert not list((folder / "spares").glob("local-*"))


def test_servers_follow_the_run_into_its_next_session(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    work = Spares(config, folder, 1)
    work.start()
    wait_until(lambda: seen(folder) == ["2 start"])
    work.state = RunState(phase=Phase.WAITING, session="", secret_ns=1)  # the job is requeued
    wait_until(lambda: seen(folder).count("2 TERM") == 2)
    work.look_on()
    assert not (folder / "spares" / "server-3").exists(), "its place is claimed before it is started"
    work.state = RunState(phase=Phase.RUNNING, session="9-1", secret_ns=2)
    wait_until(lambda: "39-1 start" in seen(folder))
    work.state = OVER
    work.join(120)


def test_servers_that_left_by_themselves_are_not_restarted(config: Config, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    work = Spares(config, folder, 1)
    work.start()
    wait_until(lambda: seen(folder) == ["2 start"])
    (folder / "leave").touch()
    Quiet.count = 1
    try:
        work.join(120)
    finally:
        Quiet.count = 0
    assert work.code == ExitCode.DONE
    assert seen(folder)[-1] == "2 left", "in order: one TERM and a grace"


def test_servers_that_leave_do_not_wait_for_a_run_that_is_over(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    work = Spares(config, folder, 1)
    work.start()
    wait_until(lambda: seen(folder) == ["2 start"])
    monkeypatch.setattr(Quiet, "count", 1)
    wait_until(lambda: seen(folder) == ["2 start", "2 TERM"])
    work.look_on()
    assert seen(folder).count("2 TERM") == 1, "the run may still dismiss it"
    work.state = OVER
    work.join(50)
    assert work.code == ExitCode.DONE, "before its grace of 60 s"
    assert seen(folder) == ["2 start", "2 TERM", "2 TERM"]


def test_on_a_mount_that_caches_attributes_for_long_only_a_stuck_server_is_ended(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, looks = RunFolder(tmp_path / "run", ""), list[float]()
    session = spares._Session(config, folder, 2, 60.0, Console(quiet=True))
    mount: Any = CachedMount(folder, session._specs, monkeypatch)

    def counted(run_folder: RunFolder) -> dict[str, int]:
        looks.append(mount.clock.now)
        return last_beats(run_folder)

    monkeypatch.setattr(spares, "last_beats", counted)
    while mount.clock.now < 400.0:
        if mount.clock.now == 200.0:
            mount.stuck.add("server-3")
        assert session._tick(mount, mount.clock.now) == 0
        mount.sleep(0.25)
    assert mount.ended.keys() == {"server-3"}
    assert 244.0 <= mount.ended["server-3"] <= 246.0 + CACHE_S
    assert mount.opened.total() <= 2 * 400 / 45
    assert len(looks) <= 401


def test_a_run_that_is_over_gets_none(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is in progress"):
        run_spares(config, RunFolder(tmp_path / "run", ""), 1, grace_s=1.0, console=Console(quiet=True))
    assert not (tmp_path / "run" / "spares").exists()


def test_a_launcher_holds_its_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    folder.path.mkdir()
    assert not holder(folder)
    with run_lock(folder):
        assert holder(folder)
    assert not holder(folder)


def test_each_start_of_a_run_is_another_state(config: Config, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    with run_lock(folder):
        create_secret(folder)
        first = spares.run_state(config, folder)
        assert first.phase is Phase.RUNNING
        create_secret(folder)
        assert spares.run_state(config, folder) != first


def test_a_run_on_another_host_of_the_file_system_is_in_progress(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run", "")
    with run_lock(folder):
        look_from_elsewhere(monkeypatch, tmp_path)
        assert spares.run_state(config, folder).phase is Phase.RUNNING
    assert spares.run_state(config, folder).phase is Phase.OVER


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        ("RUNNING", Phase.RUNNING),
        ("RESIZING", Phase.RUNNING),
        ("PENDING", Phase.WAITING),
        ("COMPLETING", Phase.WAITING),
        ("SUSPENDED", Phase.WAITING),
        ("CONFIGURING", Phase.WAITING),
        ("FAILED", Phase.OVER),
    ],
)
def test_states_of_a_job(state: str, phase: Phase) -> None:
    assert phase_of_run(JobRecord(id="7", state=state)) is phase


def test_a_job_of_unknown_state_may_be_running_and_a_forgotten_one_is_over() -> None:
    assert phase_of_run(JobRecord(id="7", why="scontrol is not on this machine")) is Phase.RUNNING
    assert phase_of_run(JobRecord(id="7", why="it ended", forgotten=True)) is Phase.OVER


def test_devices_are_those_given(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_devices(config, 2) == [(), ()]
    gpu = load_config([EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml"], ["rollout.tp=2"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert own_devices(gpu, 2) == [("4", "5"), ("6", "7")]
    with pytest.raises(ConfigError, match="need 6, 4 are given"):
        own_devices(gpu, 3)


def test_servers_elsewhere_are_not_added_to_a_run_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would load, publish an address of their own host and never join."""
    submitted: list[str] = []

    def submit(script: str) -> str:
        submitted.append(script)
        return "7"

    monkeypatch.setattr(job_query, "submit", submit)
    monkeypatch.setattr(spares, "run_state", lambda *_: RUNNING)
    monkeypatch.setattr(spares, "run_spares", lambda *_, **__: ExitCode.DONE)
    folder, job = RunFolder(tmp_path / "run", ""), SpareJob(servers=1, grace_s=1.0)
    refusal = r"cluster.bind: .*127.0.0.1 \(fix: areal-lora stop, then areal-lora resume .*run cluster.bind=0.0.0.0\)"

    def add(*overrides: str, here: bool = False) -> int:
        example = EXAMPLES / "gsm8k_grpo_megatron_lora_moe_one_node.yaml"
        write_config(folder, load_config([example], [f"run.root={tmp_path}", *overrides]))
        return add_servers(folder, job, here=here, console=Console(quiet=True))

    folder.path.mkdir()
    with pytest.raises(ConfigError, match=refusal):
        add("cluster.kind=slurm")
    assert submitted == []
    assert add("cluster.kind=slurm", here=True) == ExitCode.DONE, "perhaps on its node"
    assert add("cluster.kind=slurm", "cluster.bind=0.0.0.0") == ExitCode.DONE
    assert len(submitted) == 1
    with run_lock(folder):
        assert add() == ExitCode.DONE
        look_from_elsewhere(monkeypatch, tmp_path)
        with pytest.raises(ConfigError, match=refusal):
            add()
        assert add("cluster.bind=0.0.0.0") == ExitCode.DONE

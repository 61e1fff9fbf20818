"""The controller as a real process: how it starts and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_lora.config.sections.adapter import AlgorithmConfig
from areal_lora.config.sections.task import BuiltInReward
from areal_lora.errors import EnvironmentError_
from areal_lora.network.api_client import ApiLimits
from areal_lora.rollout import main
from areal_lora.rollout.channel.channel_messages import Batch
from areal_lora.rollout.ledger.ledger import GroupState, LedgerFile
from areal_lora.rollout.ledger.reconcile import group_counts
from areal_lora.rollout.workflow import WorkflowContext
from areal_lora.rollout.workflow_loading import Teacher
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import create_secret, read_endpoint, read_secret, wait_endpoint
from areal_lora.types import AdapterRef
from tests.support.clocks import wait_until
from tests.support.forks.starter import Fork, starter_of
from tests.support.launcher.command import ROLES
from tests.support.paths import TINY_MODEL
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME, config
from tests.support.rollout.patient_client import PatientClient

MODULE = "areal_lora.rollout.main"


@contextmanager
def served() -> Iterator[dict[str, str]]:
    """A server, in a thread, that keeps all requests but the first four for ten minutes."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, object]) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(120)

    server = FakeServer(models={"math@v0"}, delay_s=lambda k: 0.0 if k < 4 else 600.0)
    run(server.__aenter__())
    try:
        yield {"server-0": server.url}
    finally:
        run(server.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def start(folder: Path, processes: ExitStack) -> Fork:
    """How a controller starts in a new interpreter is seen by `test_it_dies_with_its_parent` and every whole run."""
    starter, environment = starter_of(ROLES["cluster.controller_python"]), os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "log").open("ab") as log:
        process = starter.start(MODULE, ["--run-folder", str(folder)], environment, log)
    processes.callback(process.wait)
    processes.callback(process.kill)
    return process


def prepare(folder: Path) -> None:
    create_secret(RunFolder(folder))
    (folder / "config.json").write_text(config(str(TINY_MODEL)).model_dump_json())


def ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.slow
@pytest.mark.skipif(not TINY_MODEL.is_dir(), reason="the tiny model is not there")
def test_sigterm_ends_it_at_once_and_leaves_no_child(tmp_path: Path) -> None:
    prepare(tmp_path)
    with served() as servers, ExitStack() as processes:
        process = start(tmp_path, processes)
        endpoint = wait_endpoint(RunFolder(tmp_path), "controller", 0, 200, lambda: process.poll() is None)
        client = PatientClient(lambda: endpoint, read_secret(RunFolder(tmp_path)))
        client.hello({NAME: 0}, {})
        client.announce(AdapterRef(name=NAME, version=0), servers)
        assert len(client.next_batch(NAME, 0).groups) == 4
        client.close()
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "the scorer has a child"
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert all(map(ended, children))
    with closing(LedgerFile(RunFolder(tmp_path).ledger, "t")) as file:
        head = file.read_head(NAME)
    assert head is not None
    assert head.sampled == "temperature 1, top_p 1, top_k 0, min_p 0"


@pytest.mark.slow
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    prepare(tmp_path)
    command = [sys.executable, "-m", MODULE, "--run-folder", str(tmp_path)]
    code = f"import subprocess, time; print(subprocess.Popen({command!r}).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    status = tmp_path / "status" / "controller-0.txt"
    wait_until(status.exists, 200.0)
    parent.kill()
    parent.communicate()
    wait_until(lambda: ended(child))


@pytest.mark.slow
@pytest.mark.skipif(not TINY_MODEL.is_dir(), reason="the tiny model is not there")
def test_a_killed_controller_is_waited_for_and_goes_on(tmp_path: Path) -> None:
    """SIGKILL with a step leased, groups on their way and an evaluation owed: nothing is lost, nothing repeated."""
    prepare(tmp_path)
    client = PatientClient(
        lambda: read_endpoint(RunFolder(tmp_path), "controller", 0), read_secret(RunFolder(tmp_path))
    )
    ref = AdapterRef(name=NAME, version=0)
    with served() as servers, ExitStack() as processes:
        processes.callback(client.close)
        process = start(tmp_path, processes)
        client.hello({NAME: 0}, {})
        client.announce(ref, servers)
        first = client.next_batch(NAME, 0)
        wait_until(lambda: client.lacking(NAME, 1).running == 4)  # the next four
        client.request_eval(ref, "owed")
        process.kill()
        process.wait()
        asked: list[Batch] = []
        asking = threading.Thread(target=lambda: asked.append(client.next_batch(NAME, 0)))
        asking.start()
        time.sleep(1.0)
        start(tmp_path, processes)
        asking.join(200)
        assert asked
        assert (asked[0].groups, asked[0].snapshot) == (first.groups, first.snapshot)
        client.commit(NAME, 0)
        client.commit(NAME, 0)
        wait_until(lambda: client.lacking(NAME, 1).running == 4)

        def counted() -> tuple[int, int]:
            states = group_counts(RunFolder(tmp_path), ended=False)[NAME].states
            return sum(states.values()), states.get(GroupState.CONSUMED, 0)

        wait_until(lambda: counted() == (4 + 4, 4))  # every COUNTS_S
        assert asked[0].stats.tokens_generated == first.stats.tokens_generated
        assert client._session.reminders.pending, "requested again"


def test_a_teacher_that_does_not_answer_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    limits = ApiLimits(attempt_s=60.0, attempts=2, backoff_s=0.01, concurrency=1)
    monkeypatch.setattr(main, "Teacher", partial(Teacher, limits=limits))
    reference = {"url": "http://127.0.0.1:9/v1", "model": "large"}
    chosen, plain = AlgorithmConfig(kind="distill", reference=reference), config(str(TINY_MODEL))
    run = plain.model_copy(update={"adapters": [plain.adapters[0].model_copy(update={"algorithm": chosen})]})
    data = main.load_data(run, RunFolder(tmp_path))
    with pytest.raises(EnvironmentError_, match=r"the teacher large at http://127\.0\.0\.1:9/v1 .*fix: start it"):
        asyncio.run(main.serve(run, RunFolder(tmp_path), data, asyncio.Event()))


@pytest.mark.parametrize(("kinds", "wanted"), [(["none"], False), (["none", "numeric_match"], True)])
def test_workflows_know_whether_a_reward_is_configured(
    kinds: list[Any], wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of training and those of evaluations."""
    prepare(tmp_path)
    made, stop = list[WorkflowContext](), asyncio.Event()
    monkeypatch.setattr(main, "WorkflowContext", lambda **of: made.append(WorkflowContext(**of)) or made[-1])
    plain = config(str(TINY_MODEL))
    adapter = plain.adapters[0].model_copy(update={"reward": [BuiltInReward(kind=kind) for kind in kinds]})
    run = plain.model_copy(update={"adapters": [adapter]})
    stop.set()
    asyncio.run(main.serve(run, RunFolder(tmp_path), main.load_data(run, RunFolder(tmp_path)), stop))
    assert [context.has_reward for context in made] == [wanted] * 2
    assert [context.evaluating for context in made] == [False, True]


@pytest.mark.parametrize(
    ("before", "replay", "page_bytes"), [("", "off", 4096), ("", "rollout", 65536), ("off", "rollout", 4096)]
)
def test_a_new_ledger_of_routes_has_large_pages(before: str, replay: str, page_bytes: int, tmp_path: Path) -> None:
    prepare(tmp_path)
    folder, stop, plain = RunFolder(tmp_path), asyncio.Event(), config(str(TINY_MODEL))
    stop.set()
    for chosen in filter(None, (before, replay)):
        behaviour = plain.behaviour.model_copy(update={"router_replay": chosen})
        run = plain.model_copy(update={"behaviour": behaviour})
        asyncio.run(main.serve(run, folder, main.load_data(run, folder), stop))
    with closing(sqlite3.connect(folder.ledger)) as file:
        assert file.execute("PRAGMA page_size").fetchone() == (page_bytes,)


def test_it_imports_neither_torch_nor_numba() -> None:
    """A controller shares a machine with others: torch would cost it seconds and hundreds of MiB."""
    code = "import areal_lora.rollout.main, sys; sys.exit(bool({'torch', 'numba'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], timeout=150, check=False).returncode == 0

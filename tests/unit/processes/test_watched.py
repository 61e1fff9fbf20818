"""A dead thread or task ends its process with a reason; only listed places start threads and tasks."""

from __future__ import annotations

import ast
import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import areal_lora
from areal_lora.errors import BackgroundFailed, ExitCode, RecordError
from areal_lora.processes import watched
from areal_lora.processes.watched import watched_task, watched_thread
from tests.support.docs import section
from tests.support.sources import trees

PACKAGE = Path(areal_lora.__file__).parent
PAGE = PACKAGE.parent / "docs" / "en" / "design" / "running.md"
STARTERS = {
    "Thread",
    "Timer",
    "start_new_thread",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "create_task",
    "ensure_future",
    "run_in_executor",
    "to_thread",
    "run_coroutine_threadsafe",
    "AsyncioAuthenticator",
}
SHORT = {
    "processes/watched.py:end_process": "the mechanism itself",
    "processes/watched.py:watched_thread": "the mechanism itself",
    "processes/watched.py:watched_task": "the mechanism itself",
    "weight_sync/trainer/fleet.py:_Line.__init__": "one request at a time; the leader waits for its Future",
    "weight_sync/trainer/fleet.py:Fleet._ping_all": "one round of pings; the caller waits for their Futures",
    "weight_sync/server/receiver.py:AdapterReceiver.join": "the groups of one request; it waits for their Futures",
    "weight_sync/link/broadcast_groups.py:start_leaving": "one group each; close_all waits for their ends",
    "launcher/simulation/simulate.py:_World.outcome": "a simulated controller's leases in a TaskGroup that is awaited",
    "launcher/simulation/simulate.py:_World._train": "one simulated publish; the next step awaits it",
    "rollout/agent_api/endpoint.py:_events": "the next event of one stream, which awaits it and cancels it at its end",
    "weight_sync/trainer/fleet.py:Fleet.dismiss": "one request to each server; else it waits for its grace",
    "weight_sync/admin_client.py:RequestRelay.send": "one request to each server below; it waits for their answers",
    "engine/vllm_ext/server/admin_routes.py:AdminPlane.relay": "the requests of one relay request; it is awaited",
    "engine/vllm_ext/server/leaving.py:leave_in_order": "one look for a request to leave; it is awaited",
    "weight_sync/trainer/membership.py:ServerWatcher.__init__": "one round of pings; the watcher waits",
    "engine/vllm_ext/worker/extension.py:_WorkerAdapters._handle": "one join request; errors are its answer",
    "trainer/audit.py:Auditor.__init__": "one comparison at a time; the next step waits for its Future",
    "doctor/examine.py:_bandwidth": "two processes of one measurement; their results are the caller's",
    "rollout/agent_api/replies.py:ReplyStream.__init__": "one answer of an agent; the stream that it feeds awaits it",
    "rollout/channel/tunnel.py:Tunnel._start": "one connection of code in a worker; it ends with the worker",
    "rollout/main.py:SharedResources.open": "one newcomer's rows; the request that joins it awaits them",
    "tasks/check.py:_reward_problem": "the scores of a few answers; the caller waits for its Future",
    "service/acceptance.py:Acceptance.take_in": "the checks of one adapter; they are awaited",
    "service/queue/queue.py:RequestQueue.create_model": "the checks of one adapter; they are awaited",
    "service/queue/queue.py:RequestQueue._serve": "the checks of one adapter; they are awaited",
    "service/queue/queue.py:RequestQueue.keep": "the removal of one state's files; it is awaited",
    "service/download.py:Downloads.opened": "the export of one version or state; it is awaited",
    "service/queue/queue.py:RequestQueue.serve": "one look-up; the samples that share it await it",
    "service/download.py:downloaded": "one piece of a file; it is awaited",
    "service/tinker/sample_tasks.py:Sampling.start": "one sample; its outcome is kept until it is fetched",
    "service/tinker/sample_tasks.py:Sampling.sample": "one sample; its outcome is kept until it is fetched",
    "tasks/scorer.py:_patient": "one scoring; it is awaited",
    "tasks/scorer.py:_Child.spawn": "one look at what this machine allows; it is awaited",
    "tasks/scorer.py:ScorerPool.__aenter__": "the removal of abandoned folders; it is awaited",
    "tasks/judge.py:LlmJudge.__call__": "one question to the judge; every answer that asked it awaits it",
    "rollout/worker_process.py:WorkerProcess._called": "one call of a sample's code; the sample awaits it",
    "rollout/controller/evaluation.py:Evaluator._set": "the figures of one set; they are awaited",
    "rollout/workflow.py:all_samples": "samples of one group in a TaskGroup that is awaited",
    "rollout/agents.py:AgentWorkflow._played": "one agent's run; it is awaited",
    "rollout/agents.py:AgentWorkflow._keep": "one conversation that is written; it is awaited",
    "rollout/environment_workers.py:_Worker.ready": "one start; it is awaited, and the next sample starts again",
    "rollout/environment_child.py:serve": "samples, whose ends are answered; the input, whose end kills the process",
    "rollout/environment_kinds.py:called": "blocking code of one sample; it is awaited",
    "rollout/controller/controller.py:Controller._evaluate": "one evaluation in the controller's TaskGroup",
    "rollout/controller/controller.py:Controller._start": "one rollout in the controller's TaskGroup",
    "rollout/controller/controller.py:Controller._forget": "the end of one adapter in the controller's TaskGroup",
    "rollout/channel/channel_messages.py:ControlSocket.serve": "one request in the controller's TaskGroup",
    "engine/vllm_ext/server/sampling.py:all_of": "the answers of one request in a TaskGroup that is awaited",
    "engine/vllm_ext/server/sampling.py:_merged": "the streams of one request; they are awaited",
    "network/http_server.py:unless_disconnected": "one request; it is awaited",
    "rollout/agent_api/endpoint.py:_answer": "one request; it is awaited",
    "engine/vllm_ext/server/leaving.py:Door.__call__": "one request; it is awaited",
    "engine/vllm_ext/remote/remote_seat.py:StayGroups.__init__": "one join or transfer of each source; it is awaited",
    "engine/vllm_ext/remote/remote_seat.py:ShardSpool.frames": "one frame; it is awaited",
    "engine/vllm_ext/remote/remote_seat.py:StayGroups.in_thread": "one join or transfer; it is awaited",
    "engine/vllm_ext/remote/shards.py:ShardStore.put": "one upload; the transfers that need it await it",
    "engine/vllm_ext/remote/shards.py:ShardStore._call": "one call of a file system; it is awaited",
    "engine/vllm_ext/remote/remote_server.py:RemoteServer._work": "one request in a TaskGroup that is awaited",
    "engine/vllm_ext/remote/remote_server.py:_until_ended": "the stay in the run; it is awaited",
    "engine/vllm_ext/remote/remote_server.py:serve_remote": "the wait for the server process; it is awaited",
}
"""Where the package starts a thread or task that ends with one piece of work that a caller waits for."""


def starts(tree: ast.AST, scope: str = "", in_function: bool = False) -> Iterator[tuple[str, int]]:
    """(class and function, line) of every call that starts a thread or task; nested functions count as their outer."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not in_function
        inner = f"{scope}.{node.name}".lstrip(".") if named else scope
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in STARTERS:
                yield scope, node.lineno
        yield from starts(node, inner, in_function or is_function)


def found(folder: Path) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for path, tree in trees(folder, STARTERS):
        for scope, line in starts(tree):
            places.setdefault(f"{path.relative_to(folder)}:{scope}", []).append(line)
    return places


def test_long_lived_threads_and_tasks_are_started_by_the_mechanism_alone() -> None:
    every = found(PACKAGE)
    bare = {place: lines for place, lines in every.items() if place not in SHORT}
    assert not bare, f"use watched_thread or watched_task, or state in SHORT which caller waits for its end: {bare}"
    assert not SHORT.keys() - every.keys(), "these start nothing any more"


@pytest.mark.parametrize(
    "code",
    [
        "import threading\nthreading.Thread(target=print).start()\n",
        "from threading import Thread\nclass A:\n    def f(self):\n        Thread(target=print).start()\n",
        "import asyncio\nasync def f():\n    def g():\n        asyncio.create_task(h())\n",
        "async def f(loop):\n    return loop.run_in_executor(None, print)\n",
    ],
)
def test_a_bare_start_is_seen(tmp_path: Path, code: str) -> None:
    (tmp_path / "new.py").write_text(code)
    assert len(found(tmp_path)) == 1
    assert set(found(tmp_path)) <= {"new.py:", "new.py:A.f", "new.py:f"}


def test_the_list_in_the_documentation_names_every_watched_thread() -> None:
    names = set()
    for path, tree in trees(PACKAGE, ("watched_thread", "watched_task")):
        for node in ast.walk(tree):
            called = getattr(node, "func", None)
            if isinstance(node, ast.Call) and getattr(called, "id", "") in ("watched_thread", "watched_task"):
                assert isinstance(node.args[0], ast.Constant), f"{path}:{node.lineno}: the name is not a plain string"
                names.add(node.args[0].value)
    assert names
    items = [line for line in section(PAGE, "Threads and tasks").splitlines() if line.startswith("- ")]
    assert sorted(name for line in items for name in re.findall(r"`([^`]+)`", line)) == sorted(names)


BLOCKED = {
    "an event": "threading.Event().wait()",
    "a lock held by itself": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "zmq": "import zmq; s = zmq.Context().socket(zmq.PULL); s.bind_to_random_port('tcp://127.0.0.1'); s.recv()",
    "a sleep in C": "time.sleep(600)",
}


@pytest.mark.parametrize("blocked", BLOCKED)
def test_a_dead_thread_ends_a_process_whose_main_thread_is_blocked(blocked: str) -> None:
    code = f"""
import threading, time
from areal_lora.processes.log import setup_logging
from areal_lora.processes.watched import watched_thread
setup_logging("trainer", 3)
def look_at_servers():
    time.sleep(0.2)
    raise KeyError("no such server")
watched_thread("server-watch", look_at_servers)
{BLOCKED[blocked]}
"""
    done = run(code)
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "trainer-3 CRITICAL" in done.stderr
    assert "thread server-watch died, so this process ends with exit code 1: KeyError: 'no such server'" in done.stderr
    assert "in look_at_servers" in done.stderr, "the traceback"


def test_the_exit_code_is_that_of_the_error_and_an_unread_log_does_not_hold_up_the_end() -> None:
    code = """
import os, sys, threading
from areal_lora.errors import RecordError
from areal_lora.processes import watched
from areal_lora.processes.log import setup_logging
reading, writing = os.pipe()
os.set_blocking(writing, False)
try:
    while True: os.write(writing, b"x" * 4096)
except BlockingIOError: pass
os.set_blocking(writing, True)
os.dup2(writing, 2)
setup_logging("trainer", 0)
watched.FINAL_LOG_TIMEOUT_S = 0.3
def die(): raise RecordError("disk full")
watched.watched_thread("saver", die)
threading.Event().wait()
"""
    assert run(code).returncode == ExitCode.DISK


def test_a_dead_task_ends_the_process_although_its_group_would_wait_for_others() -> None:
    code = """
import asyncio
from areal_lora.processes.log import setup_logging
from areal_lora.processes.watched import watched_task
setup_logging("controller", 0)
async def stubborn():
    while True:
        try: await asyncio.sleep(60)
        except asyncio.CancelledError: pass
async def serve():
    await asyncio.sleep(0.1)
    raise ValueError("not a frame")
async def main():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stubborn())
        watched_task("control-socket", serve, tasks)
asyncio.run(main())
"""
    done = run(code)
    assert done.returncode == ExitCode.FAILED, done.stderr
    assert "task control-socket died" in done.stderr
    assert "ValueError: not a frame" in done.stderr


def test_returning_and_being_cancelled_are_no_deaths() -> None:
    deaths: list[BackgroundFailed] = []
    watched_thread("short", lambda: None, deaths.append).join(120)

    async def main() -> None:
        async def forever() -> None:
            await asyncio.sleep(60)

        async def cancelled_by_nobody() -> None:
            raise asyncio.CancelledError

        task = watched_task("endless", forever, on_death=deaths.append)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert deaths == []
        await asyncio.wait({watched_task("odd", cancelled_by_nobody, on_death=deaths.append)})

    before = watched._tasks.copy()  # other tests may have left theirs
    asyncio.run(main())
    assert [str(d).partition(",")[0] for d in deaths] == ["task odd died"]
    assert watched._tasks <= before


def test_a_death_carries_name_cause_and_code() -> None:
    deaths: list[BackgroundFailed] = []
    heard = threading.Event()

    def die() -> None:
        raise RecordError("no room")

    def on_death(failed: BackgroundFailed) -> None:
        deaths.append(failed)
        heard.set()

    watched_thread("saver", die, on_death)
    assert heard.wait(120)
    assert (deaths[0].exit_code, type(deaths[0].__cause__)) == (ExitCode.DISK, RecordError)
    assert "thread saver died" in str(deaths[0])


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, cwd=PACKAGE.parent, check=False
    )

"""Workers with real processes and pipes; completions come from the real endpoint, with a fake server behind it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from pydantic import TypeAdapter

from areal_lora.config.models import ClusterConfig, WorkflowConfig
from areal_lora.errors import ConfigError
from areal_lora.network.addresses import NODES_VARIABLE
from areal_lora.rollout import environment_child, environment_workers, worker_process
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.agents import AgentResult, AgentTask
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.environment_workers import EnvironmentWorkers, worker_launchers
from areal_lora.rollout.worker_process import PlayResult
from areal_lora.rollout.workflow import Episode, WorkerLost
from areal_lora.rollout.workflow_loading import build_workflow
from areal_lora.types import Cause, Outcome
from tests.support.agents import plain_agents
from tests.support.rollout import gym_classes
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import EOS, FIELDS, MAX_MODEL_LEN, SAMPLING, V1, Graded, prompt_of, served

PROMPT = prompt_of("1+1=")


def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
    """The first answer to a prompt has two upper-case letters, the second one."""
    text = "AB" if EOS not in prompt else "Cd"
    return [*map(ord, text), EOS], text


def gym(name: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "gym", "env": f"{gym_classes.__file__}:{name}"} | keys


def agent(name: str, **keys: Any) -> dict[str, Any]:
    return {"kind": "agent", "path": f"{plain_agents.__file__}:{name}"} | keys


def run(
    chosen: dict[str, Any], *, groups: int = 1, timeout_s: float = 300.0, launchers: Mapping[str, Sequence[str]] = {}
) -> list[Episode | BaseException]:
    """Groups of two samples at once."""
    config: Any = TypeAdapter(WorkflowConfig).validate_python(chosen)

    async def main() -> list[Episode | BaseException]:
        sampling = SAMPLING.model_copy(update={"timeout_s": timeout_s, "n_samples": 2})
        async with (
            served(FakeServer(models={str(V1)}, answer=answer), Graded(), sampling) as context,
            agent_gateway() as sessions,
            EnvironmentWorkers(config, FIELDS, launchers) as workers,
        ):
            workflow = build_workflow(config, context, sessions, workers=workers)
            runs = [workflow.run(PROMPT, V1, seed=7) for _ in range(groups)]
            return await asyncio.gather(*runs, return_exceptions=True)

    return asyncio.run(main())


def episode(chosen: dict[str, Any]) -> Episode:
    (found,) = run(chosen)
    assert isinstance(found, Episode), found
    return found


def test_a_gym_class_is_one_trajectory_per_sample_of_the_tokens_that_were_sampled() -> None:
    made = episode(gym("Letters", args={"greeting": "Hi "}))
    assert [t.sample for t in made.group.trajectories] == [0, 1]
    for t in made.group.trajectories:
        text = "<user:Hi 42>AB\2<user:more>Cd\2"
        assert t.token_ids == [ord(c) for c in text]
        assert [chr(i) for i, on in zip(t.token_ids, t.loss_mask, strict=True) if on] == list("AB\2Cd\2")
        assert (t.reward, t.outcome) == (3.0, Outcome.OK)
        assert t.turn_rewards == ((text.index("\2"), 2.0), (len(text) - 1, 1.0))


@pytest.mark.parametrize(
    ("args", "max_turns", "finish_reason"),
    [({}, 1, "max_turns"), ({}, 2, "stop"), ({"greeting": "x" * (MAX_MODEL_LEN - 15)}, None, "length")],
)
def test_a_limit_of_the_run_that_ends_an_episode_is_its_finish_reason(
    args: dict[str, Any], max_turns: int | None, finish_reason: str
) -> None:
    """The long greeting leaves room for the first answer, not for the message after it."""
    for t in episode(gym("Letters", args=args, max_turns=max_turns)).group.trajectories:
        assert (t.finish_reason, t.truncated) == (finish_reason, finish_reason != "stop")
        assert t.reward == (3.0 if finish_reason == "stop" else 2.0)


@pytest.mark.parametrize(
    ("name", "reward", "correct", "components"),
    [
        ("blocks", 2.0, None, {}),
        ("right", 1.0, True, {}),
        ("unscored", 2.0, None, {}),
        ("no_number", None, None, {}),
        ("parts", 2.25, True, {"letters": 2.0, "brief": 0.25}),
        ("parts_and_reward", 0.25, False, {"letters": 2.0}),
        ("wrong_parts", None, None, {}),
    ],
)
def test_an_agent_returns_what_a_reward_function_may(
    name: str, reward: float | None, correct: bool | None, components: dict[str, float]
) -> None:
    for t in episode(agent(name)).group.trajectories:
        assert t.outcome is (Outcome.ERROR if reward is None else Outcome.OK)
        assert reward is None or t.reward == reward
        assert (t.correct, dict(t.components)) == (correct, components)


def test_blocking_samples_have_a_thread_each() -> None:
    config: Any = TypeAdapter(WorkflowConfig).validate_python(agent("meets"))
    task = AgentTask(base_url="http://127.0.0.1:1/v1", api_key="", model="", sample=PROMPT.sample, timeout_s=300.0)

    async def main() -> list[AgentResult]:
        async with EnvironmentWorkers(config, FIELDS) as workers:
            return await asyncio.gather(*(workers.play(task) for _ in range(plain_agents.MEET)))

    assert [result.reward.reward for result in asyncio.run(main())] == [1.0] * plain_agents.MEET


def test_an_agents_client_reaches_the_endpoint_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert [t.reward for t in episode(agent("blocks")).group.trajectories] == [2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "detail", "cause"),
    [
        ("fails", r"agent: ValueError: no idea of s \(plain_agents\.py, line \d+\)", Cause.OTHER),
        ("text", "agent: TypeError: the reward is of type str", Cause.CODE),
        ("undecodable", r"agent: ValueError: caf\? \(plain_agents\.py", Cause.OTHER),
        ("exits", "agent: RuntimeError: SystemExit: no such model", Cause.OTHER),
        ("is_its_own_cause", "agent: ValueError: no answer", Cause.OTHER),
        ("unspeakable", r"agent: Unspeakable \(plain_agents\.py", Cause.OTHER),
    ],
)
def test_what_an_agent_raises_is_a_fault_of_its_group(name: str, detail: str, cause: Cause) -> None:
    (fault,) = run(agent(name), timeout_s=60.0)
    assert isinstance(fault, GenerationFault)
    assert re.match(detail, str(fault))
    assert fault.cause is cause


def test_a_worker_needs_nothing_of_its_interpreter_but_the_standard_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # modules of the working folder can be imported
    venv.create(tmp_path / "venv")
    chosen = gym("Elsewhere", args={"prefix": f"{tmp_path}/venv"}, python=f"{tmp_path}/venv/bin/python")
    assert [t.reward for t in episode(chosen).group.trajectories] == [3.0, 3.0]


def test_a_worker_runs_under_python_3_10() -> None:
    file = Path(environment_child.__file__)
    sources = [path.read_text(encoding="utf-8") for path in (file, file.with_name("environment_kinds.py"))]
    tree = ast.parse("\n".join(sources), feature_version=(3, 10))
    named = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    named += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in named} <= sys.stdlib_module_names


def test_a_killed_worker_loses_no_sample(tmp_path: Path) -> None:
    """Eight samples run in it. None of the groups fails, and nothing of the first attempts is trained on."""
    found = run(gym("Killed", args={"marks": str(tmp_path)}), groups=4)
    assert all(isinstance(one, Episode) for one in found), found
    for one in found:
        assert isinstance(one, Episode)
        assert [(t.sample, t.reward) for t in one.group.trajectories] == [(0, 3.0), (1, 3.0)]
        assert all("".join(map(chr, t.token_ids)).count("AB") == 1 for t in one.group.trajectories)
    started = Counter(mark.name.partition("-")[0] for mark in tmp_path.iterdir())
    assert len(started) == 2, "a second process"
    assert sum(started.values()) > 8, "samples are repeated"


EDITED = """
import os
from pathlib import Path

def agent(task):
    with Path(__file__).open("a") as file:
        file.write("#")
    os._exit(3)
"""


def test_a_file_that_is_edited_during_a_run_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned = list[str]()
    monkeypatch.setattr(environment_workers.log, "warning", lambda text, *args: warned.append(text % args))
    (tmp_path / "mine.py").write_text(EDITED)
    run({"kind": "agent", "path": f"{tmp_path}/mine.py:agent", "workers": 1})
    assert [text.partition(":")[0] for text in warned] == [f"{tmp_path}/mine.py has changed"]


@pytest.mark.parametrize("child", [False, True])
def test_a_worker_with_too_much_memory_is_started_again_and_loses_no_sample(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], child: bool
) -> None:
    found = run(gym("Grows", args={"marks": str(tmp_path), "child": child}, memory_gib=0.3), groups=4)
    for one in found:
        assert isinstance(one, Episode), found
        assert [(t.sample, t.reward) for t in one.group.trajectories] == [(0, 3.0), (1, 3.0)]
    started = Counter(mark.name.partition("-")[0] for mark in tmp_path.iterdir())
    assert len(started) == 2, "a second process, which is below the limit"
    printed = capfd.readouterr().err
    assert re.search(r"has \d\.\d\d GiB, workflow\.memory_gib is 0\.3: it is started again", printed)


FORKED_LATE = """
import os, runpy, sys, time
fork, worker = os.fork, os.getpid()

def late():
    if fork():
        os._exit(0)
    while os.getppid() == worker:
        time.sleep(0.01)
    return 0

os.fork = late
runpy.run_path(sys.argv[1])["bound_memory"](1e9, ())
"""


def test_the_bound_of_a_worker_that_has_ended_ends() -> None:
    """Also where the worker ends before the process beside it has run."""
    words = [sys.executable, "-I", "-c", FORKED_LATE, environment_child.__file__]
    both = subprocess.Popen(words, stdout=PIPE, start_new_session=True)
    try:
        both.communicate(timeout=60)  # until both have closed the output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(both.pid, signal.SIGKILL)


NO_NETWORK = ("unshare", "--user", "--map-root-user", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "bash")
"""A loopback of its own, as on another node."""


@pytest.mark.parametrize("launcher", [("env", "SOME=1"), NO_NETWORK], ids=["env", "no network"])
def test_code_on_another_node_calls_the_endpoint_over_the_pipe(launcher: Sequence[str]) -> None:
    if (tried := subprocess.run([*launcher, "true"], capture_output=True, text=True, check=False)).returncode:
        pytest.skip(f"namespaces are not permitted here: {tried.stderr.strip()}")
    for one in run(gym("Letters", args={"greeting": "Hi "}, workers=2), groups=6, launchers={"there": launcher}):
        assert isinstance(one, Episode), one
        for t in one.group.trajectories:
            assert t.token_ids == [ord(c) for c in "<user:Hi 42>AB\2<user:more>Cd\2"]
            assert (t.reward, t.outcome) == (3.0, Outcome.OK)


LOST = ("false",)


def test_the_first_worker_starts_on_any_node_that_is_not_lost() -> None:
    (found,) = run(gym("Letters"), launchers={"a": LOST, "b": LOST, "c": ("env",)})
    assert isinstance(found, Episode), found
    with pytest.raises(ConfigError, match=r"on a: it does not start.*; its worker on b: it does not start"):
        run(gym("Letters"), launchers={"a": LOST, "b": LOST})


def test_a_worker_on_another_node_ends_with_its_controller() -> None:
    """Its pipe stays open: srun that is killed leaves its task running."""
    file = environment_child.__file__
    worker = subprocess.Popen([sys.executable, "-I", file], stdin=PIPE, stdout=PIPE, start_new_session=True)
    assert worker.stdin is not None
    settings = TypeAdapter[Any](WorkflowConfig).validate_python(gym("Letters")).model_dump(mode="json")
    search_path = [place or "." for place in sys.path]
    setup = {"settings": settings, "search_path": search_path, "silence_s": 0.5}
    environment_child.write(worker.stdin, setup)
    assert worker.wait(timeout=300) == -signal.SIGKILL


def test_workers_on_other_nodes_get_messages_that_need_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interpreter that writes what it gets into a file."""
    monkeypatch.setattr(environment_workers, "SILENCE_S", 0.06)
    program, got, ready = tmp_path / "python", tmp_path / "got", '{"type": "result", "number": 0}'
    program.write_text(f"#!/bin/sh\nprintf '\\000\\000\\000\\{len(ready):03o}%s' '{ready}'\nexec 3>&1 cat > '{got}'\n")
    program.chmod(0o755)
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Letters", python=str(program)))

    async def main() -> None:
        async with EnvironmentWorkers(config, FIELDS, {"there": ("env",)}):
            while not got.exists() or got.read_bytes().count(b'"number":0,"task":null') < 3:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 300))


def test_workers_on_other_nodes_end_together(tmp_path: Path) -> None:
    """Interpreters that end as soon as all three are to end."""
    program, ready = tmp_path / "python", '{"type":"result","number":0}'
    program.write_text(
        f"#!/bin/sh\ncd '{tmp_path}'\n"
        "trap 'touch told$$; until [ -e \"$(ls told* | sed -n 3p)\" ]; do sleep 0.05; done; touch ended$$; exit' TERM\n"
        f"printf '\\000\\000\\000\\{len(ready):03o}%s' '{ready}'\nwhile :; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Letters", python=str(program), workers=3))

    async def main() -> None:
        async with EnvironmentWorkers(config, FIELDS, {"there": ("env",)}) as workers:
            samples = [asyncio.create_task(workers.run({"sample": {}})) for _ in range(3)]
            while not all(worker._processes for worker in workers._workers):
                await asyncio.sleep(0.01)
        assert all(isinstance(each, WorkerLost) for each in await asyncio.gather(*samples, return_exceptions=True))

    asyncio.run(asyncio.wait_for(main(), 300))
    assert len([*tmp_path.glob("ended*")]) == 3


def test_a_worker_that_starts_again_gets_no_message_while_the_one_before_still_ends(tmp_path: Path) -> None:
    """The first interpreter closes its output, as a lost node does, and takes its time; the second one never starts."""
    program, second, end, ready = tmp_path / "python", tmp_path / "2", tmp_path / "end", '{"type":"result","number":0}'
    program.write_text(
        f"#!/bin/sh\ncd '{tmp_path}'\ntrap '' TERM\n"
        f"if mkdir 1; then\nprintf '\\000\\000\\000\\{len(ready):03o}%s' '{ready}'\n"
        "exec >&-\nelse touch 2\nfi\nwhile [ ! -e end ]; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Letters", python=str(program)))

    async def main() -> None:
        async with EnvironmentWorkers(config, FIELDS, {"there": ("env",)}) as workers:
            try:
                while not second.exists():
                    with contextlib.suppress(TimeoutError, WorkerLost):
                        await asyncio.wait_for(workers.run({"sample": {}}), 0.1)
                workers._workers[0].beat()
            finally:
                end.touch()

    asyncio.run(asyncio.wait_for(main(), 300))


def test_workers_are_on_the_nodes_of_their_component() -> None:
    """The real commands are those of tests/process/launcher/test_real_slurm.py."""
    components = [{"roles": ["trainer", "rollout", "controller"], "nodes": 2}, {"roles": ["environment"], "nodes": 2}]
    slurm = {"components": components, "wrapper": {"environment": ["apptainer", "exec", "it.sif"]}}
    cluster = ClusterConfig.model_validate({"kind": "slurm", "slurm": slurm})
    of_the_job = {"SLURM_JOB_ID": "8", "SLURM_JOB_ID_HET_GROUP_0": "7", NODES_VARIABLE: "a b c d"}
    found = worker_launchers(cluster, of_the_job)
    assert list(found) == ["c", "d"]
    assert all({"--jobid=7", "--het-group=1", f"--nodelist={node}"} <= {*words} for node, words in found.items())
    assert all(words[-3:] == ["apptainer", "exec", "it.sif"] for words in found.values())
    assert worker_launchers(ClusterConfig(), {}) == {}


TURNS = """
import os, pathlib, signal

class Turns:
    def __init__(self, marks):
        self.marks, self.turns = pathlib.Path(marks), 0
    async def reset(self, sample):
        return f"Hi {sample.answer}"
    def step(self, text):
        self.turns += 1
        if self.turns == 2 and not list(self.marks.iterdir()):
            (self.marks / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"text": f"<{text}>", "done": self.turns == 2 or None, "reward": 0.5, "metrics": {"loss": float("nan")}}
"""


def test_an_environments_killed_worker_loses_no_episode_and_needs_no_package(tmp_path: Path) -> None:
    """Two episodes of each of four groups are repeated in a second process."""
    (tmp_path / "turns.py").write_text(TURNS)
    marks = tmp_path / "marks"
    marks.mkdir()
    venv.create(tmp_path / "venv")
    chosen = {"kind": "multi_turn", "env": f"{tmp_path}/turns.py:Turns", "args": {"marks": str(marks)}}
    for one in run(chosen | {"python": f"{tmp_path}/venv/bin/python"}, groups=4):
        assert isinstance(one, Episode), one
        for t in one.group.trajectories:
            text = "1+1=Hi 42AB\2<AB>Cd\2"
            assert t.token_ids == [ord(c) for c in text]
            assert [chr(i) for i, on in zip(t.token_ids, t.loss_mask, strict=True) if on] == list("AB\2Cd\2")
            assert (t.reward, t.outcome) == (1.0, Outcome.OK)
    assert len(list(marks.iterdir())) == 1


def test_a_class_of_a_package_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console script does not have this folder in sys.path."""
    package = tmp_path / "package_of_workers_test"
    package.mkdir()
    (package / "letters.py").write_text(Path(gym_classes.__file__).read_text())
    folders = [folder for folder in sys.path if folder not in ("", str(tmp_path))]
    monkeypatch.setattr(sys, "path", [*folders, str(Path.cwd())])  # that of the tests' own modules
    monkeypatch.chdir(tmp_path)
    for name in (f"{package.name}.letters", f"{package.name}/letters.py"):
        made = episode({"kind": "gym", "env": f"{name}:Letters"})
        assert [t.reward for t in made.group.trajectories] == [3.0, 3.0]


VERIFIERS = """
import contextlib
from types import SimpleNamespace

class Taskset(list):
    bounded = True

class Environment:
    taskset = Taskset(range(5))
    @contextlib.asynccontextmanager
    async def serving(self):
        yield
    def slots(self, task):
        return [task]
    async def run_slot(self, slot, context):
        metrics = {"task": slot, "loss": float("nan"), "ratio": float("inf")}
        trace = SimpleNamespace(rewards={}, metrics=metrics, reward=float("nan"), errors=[])
        return SimpleNamespace(ok=True, errors=[], traces=[trace])

def resolve_env_config(chosen):
    return chosen

def load_environment(config):
    return Environment()

EvalClientConfig = ModelContext = SimpleNamespace
"""


def verified(uids: Sequence[str], held_out: Mapping[str, int]) -> list[PlayResult]:
    config: Any = TypeAdapter(WorkflowConfig).validate_python({"kind": "verifiers", "env": "x"})
    fields = {"api_key": "", "base_url": "http://127.0.0.1:1/v1", "model": ""}

    async def main() -> list[PlayResult]:
        async with EnvironmentWorkers(config, FIELDS, held_out=held_out) as workers:
            return await asyncio.gather(*(workers.run(fields | {"sample": {"uid": uid}}) for uid in uids))

    return asyncio.run(main())


@pytest.fixture
def verifiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "v1.py").write_text(VERIFIERS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("verifiers")
def test_metrics_that_are_no_numbers_cost_no_worker() -> None:
    (played,) = verified(["d/train/0"], {})
    assert (played.reward, played.metrics) == ("nan", {"task": 0.0})


@pytest.mark.usefixtures("verifiers")
def test_no_task_of_a_held_out_row_is_trained_on() -> None:
    """The rows held out of one file are not its first ones, and there are more rows than tasks."""
    held_out = {"d/eval/9": 0, "d/eval/2": 1}
    played = verified([*held_out, *(f"d/train/{row}" for row in range(20) if row not in (2, 9))], held_out)
    tasks = [each.metrics["task"] for each in played]
    assert tasks[:2] == [0, 1]
    assert set(tasks[2:]) == {2, 3, 4}
    with pytest.raises(ConfigError, match="the taskset has 5 tasks, held-out rows are 5: lower n_eval"):
        verified(["d/train/0"], {f"d/eval/{i}": i for i in range(5)})


def test_a_sample_that_hangs_costs_its_worker_and_its_own_group_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "CANCEL_S", 0.1)
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Hangs", args={"marks": str(tmp_path)}))

    async def main() -> None:
        sampling = SAMPLING.model_copy(update={"n_samples": 1, "timeout_s": 600.0})
        async with (
            served(FakeServer(models={str(V1)}, answer=answer), Graded(), sampling) as context,
            agent_gateway() as sessions,
            EnvironmentWorkers(config, FIELDS) as workers,
        ):
            workflow = build_workflow(config, context, sessions, workers=workers)
            first = asyncio.create_task(workflow.run(PROMPT, V1, seed=1))
            while not any(tmp_path.iterdir()):
                await asyncio.sleep(0.01)
            first.cancel()
            while len({mark.name.partition("-")[0] for mark in tmp_path.iterdir()}) < 2:  # until it was killed
                (made,) = (await workflow.run(PROMPT, V1, seed=2)).group.trajectories
                assert made.reward == 3.0

    asyncio.run(main())


def test_samples_beside_one_that_hangs_end_where_they_run_and_new_ones_run_in_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_process, "CANCEL_S", 0.1)
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Beside", args={"marks": str(tmp_path)}))

    async def main() -> tuple[int, float]:
        sampling = SAMPLING.model_copy(update={"n_samples": 1, "timeout_s": 600.0})
        async with (
            served(FakeServer(models={str(V1)}, answer=answer), Graded(), sampling) as context,
            agent_gateway() as sessions,
            EnvironmentWorkers(config, FIELDS) as workers,
        ):
            workflow = build_workflow(config, context, sessions, workers=workers)
            started = list[asyncio.Task[Episode]]()
            for number in ("0", "1"):
                started.append(asyncio.create_task(workflow.run(PROMPT, V1, seed=1)))
                while not (tmp_path / number).exists():
                    await asyncio.sleep(0.01)
            hung, other = started
            hung.cancel()
            process, last, number = (tmp_path / "0").read_text(), "", 1
            while last in ("", process):
                number += 1
                await workflow.run(PROMPT, V1, seed=2)
                last = (tmp_path / str(number)).read_text()
            assert not other.done()
            (tmp_path / "go").touch()
            (made,) = (await other).group.trajectories
            while Path("/proc", process).exists():
                await asyncio.sleep(0.01)
            return len(list(tmp_path.iterdir())) - number, made.reward

    assert asyncio.run(main()) == (2, 3.0), "no sample is repeated: a file for each, and one to continue"


def test_a_process_that_answers_no_cancellation_is_killed_with_all_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code blocks its event loop: no other sample of it would end."""
    monkeypatch.setattr(worker_process, "CANCEL_S", 0.1)
    program, ready = tmp_path / "python", '{"type":"result","number":0}'
    program.write_text(f"#!/bin/sh\nprintf '\\000\\000\\000\\{len(ready):03o}%s' '{ready}'\nexec sleep 1000\n")
    program.chmod(0o755)
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Letters", python=str(program)))

    async def main() -> None:
        async with EnvironmentWorkers(config, FIELDS) as workers:
            one, other = (asyncio.create_task(workers.run({"sample": {}})) for _ in range(2))
            (process,) = workers._workers[0]._processes
            while len(process.samples) < 2:
                await asyncio.sleep(0.01)
            one.cancel()
            with pytest.raises(WorkerLost, match="ended with status -9"):
                await other

    asyncio.run(asyncio.wait_for(main(), 300))


def test_a_process_that_still_ends_costs_none_that_its_worker_drains(tmp_path: Path) -> None:
    """Three processes: one with a hung sample beside another one, one that was killed and has not ended, a new one."""
    program, ready = tmp_path / "python", '{"type":"result","number":0}'
    program.write_text(
        f"#!/bin/sh\ncd '{tmp_path}'\ntrap 'touch told$$; [ ! -e end ] || exit' TERM\n"
        f"printf '\\000\\000\\000\\{len(ready):03o}%s' '{ready}'\nwhile [ ! -e end ]; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Letters", python=str(program), workers=1))

    async def main() -> None:
        async with EnvironmentWorkers(config, FIELDS, {"there": ("env",)}) as workers:
            (worker,), samples = workers._workers, list[asyncio.Task[PlayResult]]()

            async def start() -> worker_process.WorkerProcess:
                samples.append(asyncio.create_task(workers.run({"sample": {}})))
                while not (worker._processes and worker._processes[-1].samples):
                    await asyncio.sleep(0.01)
                return worker._processes[-1]

            drained = await start()
            drained.hung.add(0)
            killed = await start()
            while killed is drained:
                killed = worker._processes[-1]
                await asyncio.sleep(0.01)
            killed.hung.add(0)
            killed.kill()
            while not (tmp_path / f"told{killed.process.pid}").exists():
                await asyncio.sleep(0.01)
            samples.append(asyncio.create_task(workers.run({"sample": {}})))
            while worker._processes[-1] is killed:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert not (tmp_path / f"told{drained.process.pid}").exists()
            (tmp_path / "end").touch()
        await asyncio.gather(*samples, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 300))


def test_a_worker_on_another_node_reaches_several_endpoints() -> None:
    """Its samples have sessions in different processes."""
    config: Any = TypeAdapter(WorkflowConfig).validate_python(gym("Letters", workers=1))

    async def main() -> None:
        sampling = SAMPLING.model_copy(update={"n_samples": 1, "timeout_s": 120.0})
        async with (
            served(FakeServer(models={str(V1)}, answer=answer), Graded(), sampling) as context,
            agent_gateway() as one,
            agent_gateway() as other,
            EnvironmentWorkers(config, FIELDS, {"there": ("env",)}) as workers,
        ):
            assert one.port != other.port
            workflows = [build_workflow(config, context, each, workers=workers) for each in (one, other, one)]
            made = await asyncio.gather(*(workflow.run(PROMPT, V1, seed=1) for workflow in workflows))
        assert [each.group.trajectories[0].reward for each in made] == [3.0] * 3

    asyncio.run(main())


def test_an_error_of_the_class_is_a_fault_of_the_environment_with_its_line() -> None:
    (fault,) = run(gym("Wrong"))
    assert isinstance(fault, GenerationFault)
    assert (fault.kind, fault.cause) == (FaultKind.ENVIRONMENT, Cause.CODE)
    assert "gym_classes.py, line " in fault.detail


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        (gym("Missing"), "has no attribute 'Missing'"),
        (agent("missing"), "has no attribute 'missing'"),
        (agent("NOT_CALLABLE"), "is a int, which cannot be called"),
        (gym("Letters", python="/no/python"), "cannot be started"),
        ({"kind": "verifiers", "env": "x", "python": "/bin/false"}, "does not start"),
        ({"kind": "verifiers", "env": "x"}, "No module named 'verifiers'"),
    ],
)
def test_what_cannot_be_loaded_is_reported_before_the_first_sample(chosen: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(chosen)

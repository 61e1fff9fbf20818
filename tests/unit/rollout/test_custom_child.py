"""Custom workflows: what they return is held to the contracts; in a worker they do what they do here."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from areal_lora.config.models import WorkflowConfig
from areal_lora.errors import AlignmentError, ConfigError
from areal_lora.rollout import environment_child, worker_process
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.custom_child import CheckedWorkflow
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.rollout.routing import Router
from areal_lora.rollout.workflow import Episode, SingleTurnWorkflow
from areal_lora.rollout.workflow_loading import build_workflow
from areal_lora.types import Outcome
from tests.support.cli.command import command_starter
from tests.support.clocks import seen
from tests.support.forks.starter import session
from tests.support.rollout import custom_workflows
from tests.support.rollout.custom_workflows import Changed
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.texts import EOS, FIELDS, MAX_MODEL_LEN, SAMPLING, V1, V2, Graded, prompt_of, served

PROMPT = prompt_of("1+1=")
PYTHON = sys.executable


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is a fork of a process with the imports of commands, `custom_child` among them."""
    python = command_starter().interpreter(session() / f"worker-{os.getpid()}", environment_child.__name__)
    monkeypatch.setattr(sys, "executable", str(python))


def checked(change: str, value: Any = None) -> Episode:
    Changed.value = value

    async def main() -> Episode:
        async with served(FakeServer(models={str(V1)}), Graded()) as context:
            workflow = CheckedWorkflow(inner=Changed(context, change=change), context=context)
            return await workflow.run(PROMPT, V1, seed=1)

    return asyncio.run(main())


def chosen(name: str, **args: Any) -> Any:
    path = f"{custom_workflows.__file__}:{name}"
    return TypeAdapter[Any](WorkflowConfig).validate_python({"kind": "custom", "path": path, "args": args})


def in_worker(name: str, server: FakeServer | None = None, **args: Any) -> Episode:
    config = chosen(name, **args)

    async def main() -> Episode:
        fake = server or FakeServer(models={str(V1)})
        async with served(fake, Graded()) as context, EnvironmentWorkers(config, FIELDS) as workers:
            return await build_workflow(config, context, Sessions(), workers=workers).run(PROMPT, V1, seed=1)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("text", "returned str, not an Episode"),
        ("uid", "returned an Episode of 0:other"),
        ("empty", "0 trajectories and 0 texts"),
        ("texts", "2 trajectories and 0 texts"),
        ("first sampled", "entry 0"),
        ("nothing sampled", "nothing in it was sampled"),
        ("adapter", "nothing in it was sampled by math"),
        ("long", f"{MAX_MODEL_LEN + 1} tokens are more than"),
    ],
)
def test_an_episode_that_cannot_be_trained_on_is_refused(change: str, words: str) -> None:
    with pytest.raises(AlignmentError, match=words):
        checked(change)


@pytest.mark.parametrize("reward", [True, np.float32(1.0), 1])
def test_a_reward_may_be_any_number(reward: Any) -> None:
    given = checked("reward", reward).group.trajectories[0].reward
    assert (given, type(given)) == (1.0, float)


def test_a_reward_that_is_no_finite_number_costs_its_group() -> None:
    for reward in (float("nan"), 10**400, "good"):
        assert checked("reward", reward).group.trajectories[0].outcome is Outcome.ERROR


def test_a_reward_may_have_named_parts() -> None:
    given = checked("reward", {"right": 1, "brief": 0.5, "correct": True}).group.trajectories[0]
    assert (given.reward, given.correct, given.components) == (1.5, True, {"right": 1.0, "brief": 0.5})


def test_a_worker_returns_the_episode_that_the_controller_would_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", PYTHON)  # not forked: as in a run

    async def here() -> Episode:
        async with served(FakeServer(models={str(V1)}), Graded()) as context:
            return await SingleTurnWorkflow(context=context).run(PROMPT, V1, seed=1)

    fake = FakeServer(models={str(V1)})
    assert in_worker("Changed", fake) == asyncio.run(here())
    assert [body["stop_token_ids"] for body in fake.requests] == [[EOS]], "the worker has not read the template"


def test_what_a_workflow_raises_is_a_fault_of_its_group_and_an_untrainable_episode_ends_the_run() -> None:
    with pytest.raises(GenerationFault, match=r"workflow: ValueError: broken \(custom_workflows\.py, line \d+\)"):
        in_worker("Changed", change="raise")
    with pytest.raises(GenerationFault, match="connection: gone") as caught:
        in_worker("Changed", change="fault")
    assert caught.value.kind is FaultKind.CONNECTION
    with pytest.raises(GenerationFault, match="workflow: ValidationError"):
        in_worker("Changed", change="no columns")
    with pytest.raises(AlignmentError, match="returned an Episode of 0:other"):
        in_worker("Changed", change="uid")


def test_a_fault_of_the_servers_keeps_its_kind() -> None:
    with pytest.raises(GenerationFault) as caught:
        in_worker("Changed", FakeServer(models={str(V1)}, fault=lambda _: Fault(status=400)))
    assert caught.value.kind is FaultKind.REJECTED


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("missing", {}, "has no attribute 'missing'"),
        ("Changed", {"no": 1}, "unexpected keyword argument 'no'"),
        ("no_workflow", {}, "has no attribute 'run'"),
    ],
)
def test_what_cannot_be_built_is_wrong_input(name: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        in_worker(name, **args)


def test_a_killed_worker_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(in_worker("Killed", marks=str(tmp_path)).group.trajectories) == 2
    assert len(list(tmp_path.iterdir())) == 1
    reason = "environment: its worker process ended with status -9"
    assert [r.getMessage() for r in caplog.records if "repeated" in r.msg] == [f"sample 0:s is repeated: {reason}"]


def until_it_ends(marks: Path, timeout_s: float, tries: int = 1, **how: Any) -> Episode | GenerationFault:
    """Run `Hangs` until it returns an Episode, at most ``tries`` times."""
    config = chosen("Hangs", marks=str(marks), **how)
    sampling = SAMPLING.model_copy(update={"timeout_s": timeout_s})

    async def main() -> Episode | GenerationFault:
        fake = FakeServer(models={str(V1)})
        async with served(fake, Graded(), sampling) as context, EnvironmentWorkers(config, FIELDS) as workers:
            workflow, fault = build_workflow(config, context, Sessions(), workers=workers), None
            for _ in range(tries):
                try:
                    return await workflow.run(PROMPT, V1, seed=1)
                except GenerationFault as error:
                    fault = error
        assert fault is not None
        return fault

    return asyncio.run(main())


def test_a_workflow_that_hangs_is_repeated_once_then_its_group(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault = until_it_ends(tmp_path, 1.5, times=100)
    assert isinstance(fault, GenerationFault)
    assert (fault.kind, fault.detail) == (FaultKind.TIMEOUT, "the workflow took longer than 1.5 s")
    assert [r.getMessage() for r in caplog.records if "repeated" in r.msg] == [f"sample 0:s is repeated: {fault}"]


def test_a_workflow_whose_time_is_over_is_repeated_with_another_seed(tmp_path: Path) -> None:
    attempts = itertools.count()

    def attempt() -> tuple[Episode | GenerationFault, list[str]]:
        marks = tmp_path / str(next(attempts))
        marks.mkdir()
        ended = until_it_ends(marks, 2.0, times=1)
        return ended, sorted(mark.name for mark in marks.iterdir())

    _, marks = seen(attempt, lambda found: isinstance(found[0], Episode) and len(found[1]) == 2)  # else a stall
    (_, first, worker), (_, again, same_worker) = [mark.split("-") for mark in marks]
    assert (first, worker) == ("1", same_worker)
    assert again != first


def test_a_workflow_that_blocks_its_worker_costs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "CANCEL_S", 0.1)
    assert isinstance(until_it_ends(tmp_path, 3.0, tries=60, times=1, blocks=True), Episode)
    first, *_, last = sorted(tmp_path.iterdir(), key=lambda mark: int(mark.name.split("-")[0]))
    assert first.name.split("-")[2] != last.name.split("-")[2], "another process"


def test_requests_of_a_conversation_have_its_home(monkeypatch: pytest.MonkeyPatch) -> None:
    homes, lease = [], Router.lease

    def kept(self: Router, *arguments: Any, **keys: Any) -> Any:
        homes.append(arguments[-1])
        return lease(self, *arguments, **keys)

    monkeypatch.setattr(Router, "lease", kept)
    in_worker("TwoTurns")
    mine, other, again, alone = homes
    assert (mine is again, mine is other, alone) == (True, False, None)
    assert mine.group is other.group is not None


@pytest.mark.parametrize("temperature", [0.0, 0.5], ids=["greedy", "sampled"])
def test_an_evaluation_has_a_context_of_its_own_in_the_same_worker(temperature: float) -> None:
    """Greedy ones, such as ReMax's baseline, are below the least temperature of training."""
    config = chosen("Shown")

    async def main() -> list[str]:
        fake = FakeServer(models={str(V1), str(V2)})
        async with served(fake, Graded()) as context, EnvironmentWorkers(config, FIELDS) as workers:
            client: Any = context.client
            other = context.sampling.model_copy(update={"temperature": temperature})
            evaluating = replace(context, client=client.pinned(), sampling=other)
            episodes = [
                await build_workflow(config, each, Sessions(), workers=workers).run(PROMPT, V1, seed=1)
                for each in (context, evaluating, context)
            ]
        return [f"{t.adapter} {t.detail}" for t in (episode.group.trajectories[0] for episode in episodes)]

    newest, pinned = "math@v2 False 1.0 64", f"math@v1 True {temperature} 64"
    assert asyncio.run(main()) == [newest, pinned, newest]


def test_an_abandoned_request_ends_at_the_server_before_its_workflow(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    config = chosen("Abandons", closed=str(closed))
    fake = FakeServer(models={str(V1)}, delay_s=lambda k: 600.0 if fake.requests[k]["n"] == 7 else 0.0)

    async def main() -> Episode:
        async with served(fake, Graded()) as context, EnvironmentWorkers(config, FIELDS) as workers:
            workflow = build_workflow(config, context, Sessions(), workers=workers)
            running = asyncio.create_task(workflow.run(PROMPT, V1, seed=1))
            async with asyncio.timeout(300.0):
                while not fake.requests or fake.open_requests:
                    await asyncio.sleep(0.01)
            closed.touch()
            return await running

    assert len(asyncio.run(main()).group.trajectories) == 2
    assert [body["n"] for body in fake.requests] == [7, 2]

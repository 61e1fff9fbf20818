"""Every kind of workflow is built from its configuration; user workflows are held to the contracts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from areal_lora.config.models import WorkflowConfig
from areal_lora.data.prompts import Prompt
from areal_lora.errors import AlignmentError, ConfigError
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.agents import AgentWorkflow
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import MultiTurnWorkflow
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.rollout.workflow import Episode, SingleTurnWorkflow, Workflow, WorkflowContext
from areal_lora.rollout.workflow_loading import build_workflow
from areal_lora.types import AdapterRef, Outcome, TokenColumns, TrajectoryGroup
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import MAX_MODEL_LEN, V1, Graded, prompt_of, served

HERE = Path(__file__)
PROMPT = prompt_of("1+1=")


def environment() -> None: ...


def no_workflow(context: Any) -> None: ...


class Changed:
    """Single turn, with one thing changed."""

    value: Any = None

    def __init__(self, context: WorkflowContext, *, change: str = "") -> None:
        self.inner, self.change = SingleTurnWorkflow(context=context), change

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        if self.change == "raise":
            raise ValueError("broken")
        if self.change == "fault":
            raise GenerationFault(FaultKind.CONNECTION, "gone")
        episode = await self.inner.run(prompt, ref, seed)
        first, *others = episode.group.trajectories
        if self.change == "uid":
            return replace(episode, group=replace(episode.group, uid="0:other"))
        if self.change == "empty":
            return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=()), texts=())
        if self.change == "texts":
            return replace(episode, texts=())
        if self.change == "text":
            return "an answer"  # type: ignore[return-value]
        changed: dict[str, Any] = {
            "": {},
            "reward": {"reward": self.value},
            "no columns": {"columns": None},
            "nothing sampled": {"columns": TokenColumns.unsampled(first.token_ids)},
            "adapter": {"adapter": AdapterRef(name="other", version=1)},
            "first sampled": {"columns": TokenColumns.of([1, 2], [-0.1, -0.2], [1, 1])},
            "long": {"columns": TokenColumns.of([5] * 65, [0.0] * 64 + [-1.0], [-1] * 64 + [1])},
        }[self.change]
        group = replace(episode.group, trajectories=(replace(first, **changed), *others))
        return replace(episode, group=group)


def build(**chosen: Any) -> Workflow:
    config: Any = TypeAdapter(WorkflowConfig).validate_python(chosen)

    async def main() -> Workflow:
        async with served(FakeServer(), Graded()) as context:
            return build_workflow(config, context, Sessions(), workers=EnvironmentWorkers(config))

    return asyncio.run(main())


def run(change: str, value: Any = None) -> Episode:
    Changed.value = value  # an argument in a configuration has a plainer type
    config: Any = TypeAdapter(WorkflowConfig).validate_python(
        {"kind": "custom", "path": f"{__name__}:Changed", "arguments": {"change": change}}
    )

    async def main() -> Episode:
        async with served(FakeServer(models={str(V1)}), Graded()) as context:
            return await build_workflow(config, context, Sessions()).run(PROMPT, V1, seed=1)

    return asyncio.run(main())


def test_every_kind_is_built() -> None:
    assert isinstance(build(kind="single_turn"), SingleTurnWorkflow)
    turns = build(kind="multi_turn", environment=f"{__name__}:environment", max_turns=3, arguments={"a": 1})
    assert isinstance(turns, MultiTurnWorkflow)
    assert (turns.environment, turns.max_turns, turns.arguments) == (environment, 3, {"a": 1})
    assert isinstance(build(kind="agent", path="mine:agent"), AgentWorkflow)
    assert len(run("").group.trajectories) == 2
    assert MAX_MODEL_LEN == 64


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"kind": "custom", "path": f"{HERE}:missing"}, "has no 'missing'"),
        ({"kind": "custom", "path": f"{__name__}:Changed", "arguments": {"no": 1}}, "building the workflow fails"),
        ({"kind": "custom", "path": f"{__name__}:no_workflow"}, "has no attribute 'run'"),
    ],
)
def test_what_cannot_be_built_is_wrong_input(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(**chosen)


def test_what_a_workflow_raises_is_a_fault_of_its_group() -> None:
    with pytest.raises(GenerationFault, match=r"workflow: ValueError: broken \(.*test_workflow_loading\.py:\d+\)"):
        run("raise")
    with pytest.raises(GenerationFault, match="connection: gone"):
        run("fault")


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
        ("long", "65 tokens are more than"),
    ],
)
def test_an_episode_that_cannot_be_trained_on_ends_the_run(change: str, words: str) -> None:
    with pytest.raises(AlignmentError, match=words):
        run(change)


def test_values_of_another_type_are_a_fault_and_never_reach_the_ledger() -> None:
    with pytest.raises(GenerationFault, match="workflow: ValidationError"):
        run("no columns")


@pytest.mark.parametrize("reward", [True, np.float32(1.0), 1])
def test_a_reward_may_be_any_number(reward: Any) -> None:
    given = run("reward", reward).group.trajectories[0].reward
    assert (given, type(given)) == (1.0, float)


def test_a_reward_that_is_no_number_costs_its_group() -> None:
    for reward in (float("nan"), 10**400):
        assert run("reward", reward).group.trajectories[0].outcome is Outcome.ERROR
    with pytest.raises(GenerationFault, match="workflow: ValueError: could not convert"):
        run("reward", "good")

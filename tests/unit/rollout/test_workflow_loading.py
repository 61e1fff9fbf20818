"""Every kind of workflow is built from its configuration."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import TypeAdapter

from areal_lora.config.models import WorkflowConfig
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.agents import AgentWorkflow
from areal_lora.rollout.conversations import MultiTurnWorkflow
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.rollout.workflow import SingleTurnWorkflow, Workflow
from areal_lora.rollout.workflow_loading import CustomWorkflow, build_workflow
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import FIELDS, Graded, served


def build(**chosen: Any) -> Workflow:
    config: Any = TypeAdapter(WorkflowConfig).validate_python(chosen)

    async def main() -> Workflow:
        async with served(FakeServer(), Graded()) as context:
            return build_workflow(config, context, Sessions(), workers=EnvironmentWorkers(config, FIELDS))

    return asyncio.run(main())


def test_every_kind_is_built() -> None:
    assert isinstance(build(kind="single_turn"), SingleTurnWorkflow)
    turns = build(kind="multi_turn", env="mine:Environment", max_turns=3)
    assert isinstance(turns, MultiTurnWorkflow)
    assert turns.max_turns == 3
    assert isinstance(build(kind="custom", path="mine:factory"), CustomWorkflow)
    assert isinstance(build(kind="agent", path="mine:agent"), AgentWorkflow)

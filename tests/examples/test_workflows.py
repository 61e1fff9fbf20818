"""The shipped workflows are found by the guardrails and do what they say."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_lora.config.facts import gather_facts
from areal_lora.config.load import load_config
from areal_lora.config.models import WorkerWorkflowConfig, WorkflowConfig
from areal_lora.config.rules.guardrails import check
from areal_lora.data.prompts import Prompt
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.rollout.workflow import Episode
from areal_lora.rollout.workflow_loading import build_workflow
from areal_lora.types import Sample
from tests.support.docs import blocks
from tests.support.paths import ROOT
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import EOS, FIELDS, SAMPLING, V1, Graded, served

ALL_EXAMPLES = ROOT / "examples"
BASE = [ALL_EXAMPLES / "math" / "gsm8k_grpo_megatron_lora_moe.yaml", ALL_EXAMPLES / "math" / "embedded.yaml"]
PROMPT = Prompt(uid="0:s", position=0, sample=Sample(uid="s", prompt="Q?", answer="7"), text="Q?", token_ids=[81, 63])


def run(name: str, answers: list[str]) -> Episode:
    return play(load_config([*BASE, ALL_EXAMPLES / "workflows" / f"{name}.yaml"]).adapters[0].workflow, answers)


def play(workflow: WorkflowConfig, answers: list[str]) -> Episode:
    """One sample that hears ``answers`` in turn."""
    texts = iter(answers)

    def answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
        text = next(texts)
        return [*map(ord, text), EOS], text

    async def main() -> Episode:
        fake = FakeServer(models={str(V1)}, answer=answer)
        one = SAMPLING.model_copy(update={"n_samples": 1})
        async with (
            served(fake, Graded(), one) as context,
            agent_gateway() as sessions,
            EnvironmentWorkers(workflow, FIELDS) as workers,
        ):
            return await build_workflow(workflow, context, sessions, workers=workers).run(PROMPT, V1, seed=1)

    return asyncio.run(main())


def test_the_documentations_code_runs(tmp_path: Path) -> None:
    page = ALL_EXAMPLES.parent / "docs" / "en" / "tasks.md"
    shown = [block.text for block in blocks(page, "Workflows") if block.language == "python"]
    assert len(shown) == 3
    for i, block in enumerate(shown):
        (tmp_path / f"block{i}.py").write_text(block)
    chosen: list[WorkflowConfig] = [
        WorkerWorkflowConfig(kind="multi_turn", env=f"{tmp_path}/block0.py:SecondTry", args={"second_reward": 0.25}),
        WorkerWorkflowConfig(kind="agent", path=f"{tmp_path}/block1.py:agent"),
        WorkerWorkflowConfig(kind="custom", path=f"{tmp_path}/block2.py:Mine", args={"max_tokens": 3}),
    ]
    rewards = [
        play(workflow, ["6", "7"] if i == 0 else ["7"]).group.trajectories[0].reward
        for i, workflow in enumerate(chosen)
    ]
    assert rewards == [0.25, 1.0, 1.0]


def test_the_page_has_a_command_for_each_environment_of_others() -> None:
    page = ALL_EXAMPLES.parent / "docs" / "en" / "tasks.md"
    for heading, kind in {"verifiers": "verifiers", "gym": "gym", "MCP": "mcp", "OpenEnv": "openenv"}.items():
        (shown,) = blocks(page, heading)
        overlay = shown.text.strip().rpartition(" ")[2]
        workflow = load_config([*BASE, ALL_EXAMPLES.parent / overlay]).adapters[0].workflow
        assert isinstance(workflow, WorkerWorkflowConfig)
        assert workflow.kind == kind


@pytest.mark.parametrize("overlay", sorted(p.name for p in (ALL_EXAMPLES / "workflows").glob("*.yaml")))
def test_shipped_workflows_pass_the_guardrails(overlay: str) -> None:
    config = load_config([*BASE, ALL_EXAMPLES / "workflows" / overlay])
    assert config.adapters[0].workflow.kind != "single_turn"
    assert check(config, gather_facts(config, runs_here=False)) == ()


@pytest.mark.parametrize(
    ("answers", "reward", "said"), [(["7"], 1.0, "7"), (["6", "7"], 0.5, "6\nQ?7"), (["6", "5"], 0.0, "6\nQ?5")]
)
def test_second_try(answers: list[str], reward: float, said: str) -> None:
    episode = run("second_try", answers)
    assert [t.reward for t in episode.group.trajectories] == [reward]
    assert episode.texts == (said,)


@pytest.mark.parametrize(("answers", "reward"), [(["7", "6", "7"], 1.0), (["6", "7", "6"], 0.0)])
def test_vote(answers: list[str], reward: float) -> None:
    episode = run("vote", answers)
    assert [(t.sample, t.reward) for t in episode.group.trajectories] == [(i, reward) for i in (0, 0, 0)]


@pytest.mark.parametrize(
    ("answers", "reward", "hints"),
    [(["7"], 1.0, []), (["9", "5", "7"], 1.0, ["less", "more"]), (["x", "6", "8"], 0.0, ["a number", "more"])],
)
def test_hints(answers: list[str], reward: float, hints: list[str]) -> None:
    (made,) = run("gym", answers).group.trajectories
    assert made.reward == reward
    shown = "".join(chr(token) for token, on in zip(made.token_ids, made.loss_mask, strict=True) if not on)
    assert shown == "<user:Q?>" + "".join(f"<user:It is {hint}.>" for hint in hints)

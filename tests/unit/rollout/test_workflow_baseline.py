"""ReMax's baseline: a greedy answer beside the group, scored alike and never among what is trained on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_lora.config.load import load_config
from areal_lora.config.models import AdapterConfig
from areal_lora.data.collate import collate
from areal_lora.data.packed_groups import PackedGroups
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.completion_client import GenerationFault
from areal_lora.rollout.workflow import Episode, first_fault
from areal_lora.rollout.workflow_loading import build_training
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import Outcome
from tests.support.paths import EXAMPLES
from tests.support.rollout.fake_server import FakeServer, Fault
from tests.support.rollout.texts import SAMPLING, V1, Graded, prompt_of, served

FILES = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]


def adapter(kind: str) -> AdapterConfig:
    found = load_config(FILES, [f"adapters.0.algorithm.kind={kind}"]).adapters[0]
    return found.model_copy(update={"sampling": SAMPLING.model_copy(update={"top_p": 0.9, "stop": ["#"]})})


def run(server: FakeServer, scorer: Graded, kind: str = "remax") -> Episode:
    async def main() -> Episode:
        config = adapter(kind)
        async with served(server, scorer, config.sampling) as context:
            return await build_training(config, context, Sessions()).run(prompt_of("1+1="), V1, seed=1)

    return asyncio.run(main())


def answering(greedy: str) -> FakeServer:
    """Sampled answers are ``sampled``, the greedy one is ``greedy``."""
    server = FakeServer(models={str(V1)}, answer=lambda _, sample: ([7 + sample, 2], "sampled"))

    def edit(reply: dict[str, Any]) -> None:
        reply["choices"][0]["text"] = greedy

    server.fault = lambda k: Fault(edit=edit) if server.requests[k]["temperature"] == 0 else None
    return server


def test_the_greedy_answers_reward_is_the_baseline_and_nothing_of_it_is_trained_on() -> None:
    server, scorer = answering("long enough"), Graded()
    episode = run(server, scorer)
    assert episode.group.baseline == len("long enough")
    assert [t.reward for t in episode.group.trajectories] == [len("sampled")] * 2
    assert episode.texts == ("sampled", "sampled")
    assert sorted(item.completion for item in scorer.asked) == ["long enough", "sampled", "sampled"]
    asked = sorted(server.requests, key=lambda request: request["temperature"])
    assert [(r["temperature"], r.get("n", 1), r.get("top_p", 1.0), r["stop"]) for r in asked] == [
        (0.0, 1, 1.0, ["#"]),
        (1.0, 2, 0.9, ["#"]),
    ]
    batch = collate(PackedGroups.of([episode.group]))
    assert batch.n_sequences == 2
    assert batch.baselines is not None
    assert batch.baselines.tolist() == [11.0, 11.0]


def test_other_algorithms_ask_for_no_greedy_answer() -> None:
    server = answering("greedy")
    episode = run(server, Graded(), "rloo")
    assert (episode.group.baseline, len(server.requests)) == (None, 1)
    assert collate(PackedGroups.of([episode.group])).baselines is None


def test_a_greedy_answer_that_cannot_be_scored_is_a_fault_of_the_group() -> None:
    def grade(text: str) -> Score:
        late = text == "slow"
        return Score(reward=float("nan") if late else 1.0, outcome=Outcome.TIMEOUT if late else Outcome.OK)

    fault = first_fault(run(answering("slow"), Graded(grade)).group)
    assert fault is not None
    assert fault.outcome is Outcome.TIMEOUT


def test_a_greedy_answer_that_does_not_come_is_a_fault_of_the_group() -> None:
    server = answering("greedy")
    server.fault = lambda k: Fault(status=500) if server.requests[k]["temperature"] == 0 else None
    with pytest.raises(GenerationFault):
        run(server, Graded())

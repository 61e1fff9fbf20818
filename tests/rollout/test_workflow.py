from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from areal_lora.rollout.client import CompletionClient
from areal_lora.rollout.prompts import Prompt
from areal_lora.rollout.routing import Router
from areal_lora.rollout.testing import FakeServer
from areal_lora.rollout.workflow import Episode, SingleTurnWorkflow, first_fault, single_turn
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.types import AdapterRef, Generation, Outcome, Sample
from tests.rollout.helpers import SAMPLING, stream

PROMPT = Prompt(uid="0:a", position=0, sample=Sample(uid="a", prompt="", answer=""), token_ids=[5, 6])
V1 = AdapterRef(name="math", version=1)


@dataclass
class Graded:
    """Scores by a table of completions."""

    table: dict[str, Score]

    async def score(self, items: Sequence[ScoreItem]) -> list[Score]:
        return [self.table[item.completion] for item in items]


def run(table: dict[str, Score]) -> Episode:
    async def main() -> Episode:
        server = FakeServer(models={str(V1)}, answer=lambda _, sample: ([7 + sample, 2], "ab"[sample]))
        async with server:
            router = Router()
            router.announce(V1, {"server-0": server.url})
            async with CompletionClient(router, "") as client:
                workflow = SingleTurnWorkflow(client=client, scorer=Graded(table), sampling=SAMPLING)
                return await workflow.run(stream().at(0), V1, seed=1)

    return asyncio.run(main())


def test_alignment_of_a_trajectory() -> None:
    answer = Generation(token_ids=[8, 9, 2], logprobs=[-0.1, -0.2, -0.3], versions=[4, 4, 5], finish_reason="length")
    made = single_turn(PROMPT, 1, "math", answer, Score(reward=0.5, outcome=Outcome.OK))
    assert (made.uid, made.sample) == ("0:a:1", 1)
    assert made.token_ids == [5, 6, 8, 9, 2]
    assert made.loss_mask == [0, 0, 1, 1, 1]
    assert made.rollout_logprobs == [0.0, 0.0, -0.1, -0.2, -0.3]
    assert made.versions == [-1, -1, 4, 4, 5]
    assert made.adapter == AdapterRef(name="math", version=4)  # the oldest one counts
    assert (made.reward, made.finish_reason) == (0.5, "length")


def test_each_answer_gets_its_own_score() -> None:
    ok = Outcome.OK
    episode = run({"a": Score(reward=1.0, outcome=ok), "b": Score(reward=0.0, outcome=ok)})
    assert [t.reward for t in episode.group.trajectories] == [1.0, 0.0]
    assert [t.token_ids[-2] for t in episode.group.trajectories] == [7, 8]
    assert episode.texts == ("a", "b")
    assert len({t.uid for t in episode.group.trajectories}) == 2
    assert first_fault(episode.group) is None


def test_an_answer_that_cannot_be_scored_is_no_reward_zero() -> None:
    bad = Score(reward=float("nan"), outcome=Outcome.TIMEOUT, detail="5 s")
    episode = run({"a": Score(reward=1.0, outcome=Outcome.OK), "b": bad})
    fault = first_fault(episode.group)
    assert fault is not None
    assert (fault.outcome, fault.detail) == (Outcome.TIMEOUT, "5 s")

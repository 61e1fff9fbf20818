from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import (
    Episode,
    SingleTurnWorkflow,
    all_samples,
    derived_seed,
    first_fault,
    given_score,
    single_turn,
)
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import AdapterRef, Generation, Outcome, TokenColumns
from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.texts import V1, Graded, prompt_of, served


def run(table: dict[str, Score]) -> Episode:
    async def main() -> Episode:
        server = FakeServer(models={str(V1)}, answer=lambda _, sample: ([7 + sample, 2], "ab"[sample]))
        async with served(server, Graded(table.__getitem__)) as context:
            return await SingleTurnWorkflow(context=context).run(prompt_of("1+1="), V1, seed=1)

    return asyncio.run(main())


def test_alignment_of_a_trajectory() -> None:
    answer = Generation(columns=TokenColumns.of([8, 9, 2], [-0.1, -0.2, -0.3], [4, 4, 5]), finish_reason="length")
    made = single_turn(prompt_of("ab"), 1, "math", answer, Score(reward=0.5, outcome=Outcome.OK))
    assert (made.uid, made.sample) == ("0:s:1", 1)
    assert made.token_ids == [97, 98, 8, 9, 2]
    assert made.loss_mask == [0, 0, 1, 1, 1]
    assert made.rollout_logprobs == pytest.approx([0.0, 0.0, -0.1, -0.2, -0.3])
    assert made.versions == [-1, -1, 4, 4, 5]
    assert made.adapter == AdapterRef(name="math", version=4)  # the oldest one counts
    assert (made.reward, made.finish_reason) == (0.5, "length")


def test_each_answer_gets_its_own_score() -> None:
    ok = Outcome.OK
    episode = run({"a": Score(reward=1.0, outcome=ok), "b": Score(reward=0.0, outcome=ok)})
    assert [t.reward for t in episode.group.trajectories] == [1.0, 0.0]
    assert [t.token_ids[-2] for t in episode.group.trajectories] == [7, 8]
    assert [t.sample for t in episode.group.trajectories] == [0, 1]
    assert episode.texts == ("a", "b")
    assert len({t.uid for t in episode.group.trajectories}) == 2
    assert first_fault(episode.group) is None


def test_an_answer_that_cannot_be_scored_is_no_reward_zero() -> None:
    bad = Score(reward=float("nan"), outcome=Outcome.TIMEOUT, detail="5 s")
    episode = run({"a": Score(reward=1.0, outcome=Outcome.OK), "b": bad})
    fault = first_fault(episode.group)
    assert fault is not None
    assert (fault.outcome, fault.detail) == (Outcome.TIMEOUT, "5 s")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400])
def test_a_reward_that_is_no_number_is_an_error(reward: float) -> None:
    assert given_score(reward).outcome is Outcome.ERROR
    assert given_score(1).outcome is Outcome.OK


def test_one_failing_sample_ends_the_others_and_is_raised_itself() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    async def failing() -> None:
        await asyncio.sleep(0)
        raise GenerationFault(FaultKind.ENVIRONMENT, "broken")

    with pytest.raises(GenerationFault, match="environment: broken"):
        asyncio.run(all_samples([slow(), failing(), slow()]))
    assert ended == ["slow", "slow"]


def test_derived_seeds_differ_and_repeat() -> None:
    seeds = [derived_seed(seed, index) for seed in range(20) for index in range(20)]
    assert len(set(seeds)) == 400
    assert seeds == [derived_seed(seed, index) for seed in range(20) for index in range(20)]
    assert max(seeds) < 2**31


def test_an_answer_may_take_longer_than_an_episode() -> None:
    async def main() -> Episode:
        server = FakeServer(models={str(V1)}, delay_s=lambda _: 0.5)
        async with served(server, Graded(lambda _: Score(reward=1.0, outcome=Outcome.OK))) as context:
            short = replace(context, sampling=context.sampling.model_copy(update={"timeout_s": 0.1}))
            episode = await SingleTurnWorkflow(context=short).run(prompt_of("1+1="), V1, seed=1)
            assert not any(each.failures for each in context.client.router.servers.values())
            return episode

    assert len(asyncio.run(main()).texts) == 2

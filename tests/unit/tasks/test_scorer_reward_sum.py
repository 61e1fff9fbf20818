import asyncio
import math

import pytest

from areal_lora.config.sections.task import BuiltInReward, CodeReward, FunctionReward, RewardConfig
from areal_lora.errors import ConfigError
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.scorer import RewardSum, weighted
from areal_lora.types import Outcome

SOURCE = """
def short(completion):
    return {"reward": -len(completion), "characters": len(completion), "correct": False}

def fails(completion):
    return 1 / (completion != "0")

def of_letters(completions):
    return [{"reward": 0.5, "length": len(text), "correct": True} if text.isalpha() else None for text in completions]

def of_digits(completion):
    return completion == "7" if completion.isdigit() else None
"""


def score(rewards: list[RewardConfig], *completions: str, weights: tuple[float, ...] = ()) -> list[Score]:
    async def run() -> list[Score]:
        async with RewardSum(rewards, weights) as scorer:
            assert scorer.take_costs() == {}
            scores = await scorer.score([ScoreItem(completion=text, answer="7") for text in completions])
            [(name, seconds)] = scorer.take_costs().items()
            assert (name, seconds > 0) == ("seconds", True)
            assert scorer.take_costs() == {}
            return scores

    return asyncio.run(run())


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE)
    return lambda function, **keys: FunctionReward(path=f"{tmp_path / 'own.py'}:{function}", **keys)


def test_weights_names_parts_and_who_says_what_is_correct(own):
    rewards = [BuiltInReward(), own("short")]
    right, wrong = score(rewards, "7", "0008", weights=(2.0, 0.1))
    assert right.reward == pytest.approx(2.0 - 0.1)
    assert dict(right.components) == {"numeric_match": 1.0, "short": -1.0, "short/characters": 1.0}
    assert (right.correct, wrong.correct) == (True, False)
    assert score(rewards[::-1], "7")[0].correct is False, "the first reward of the list decides"


def test_rewards_of_one_name_are_numbered(own):
    [scored] = score([BuiltInReward(), own("short"), BuiltInReward(), own("short")], "7")
    assert {name for name in scored.components if "/" not in name} == {
        "numeric_match",
        "short",
        "numeric_match-2",
        "short-2",
    }


def test_one_reward_is_a_list_of_one(own):
    [scored] = score([own("short")], "7", weights=(2.0,))
    assert (scored.reward, dict(scored.components)) == (-2.0, {"characters": 1.0})


def test_an_answer_that_one_reward_cannot_score_is_not_scored(own):
    fault, fine = score([BuiltInReward(), own("fails")], "0", "7")
    assert (fault.outcome, fine.outcome, fine.reward) == (Outcome.ERROR, Outcome.OK, 2.0)
    assert math.isnan(fault.reward)
    assert fault.detail.startswith("fails: ZeroDivisionError")


def test_a_reward_that_does_not_apply_is_no_term_of_the_sum(own):
    rewards = [own("of_letters"), own("of_digits"), own("short")]
    letters, right, wrong = score(rewards, "ab", "7", "08", weights=(2.0, 3.0, 0.1))
    assert letters.reward == pytest.approx(2 * 0.5 - 0.1 * 2)
    assert dict(letters.components) == {"of_letters": 0.5, "of_letters/length": 2, "short": -2, "short/characters": 2}
    assert (right.reward, wrong.reward) == (pytest.approx(3 - 0.1), pytest.approx(-0.2))
    assert set(right.components) == {"of_digits", "short", "short/characters"}
    assert [s.correct for s in (letters, right, wrong)] == [True, True, False], "the first that applies decides"


def test_an_answer_to_which_no_reward_applies_is_an_error(own):
    both, none = score([own("of_letters"), own("of_digits")], "7", "?")
    assert (both.outcome, both.reward, none.outcome) == (Outcome.OK, 1.0, Outcome.ERROR)
    assert none.detail.startswith("of_letters: TypeError: the reward returned None, not a number")
    assert score([own("of_digits")], "?")[0].outcome is Outcome.ERROR
    fault, _ = score([own("of_letters"), own("fails")], "0", "7")
    assert fault.detail.startswith("fails: ZeroDivisionError"), "a fault stays one"


def test_a_reward_that_cannot_be_loaded_is_one_error_and_ends_the_others(own):
    with pytest.raises(ConfigError, match="absent"):
        score([BuiltInReward(), own("absent")], "7")


def test_the_first_fault_is_the_answers():
    scores = [Score(reward=1, outcome=Outcome.OK), Score(reward=math.nan, outcome=Outcome.TIMEOUT, detail="late")]
    assert weighted(scores, ["a", "b"], [1, 1]).detail == "b: late"


def test_a_code_reward_needs_tests():
    with pytest.raises(ValueError, match="there are no tests"):
        CodeReward()

r"""Equality of expressions, for gold answers as GSM8K rows and as LaTeX."""

import asyncio
import logging

import pytest

from areal_lora.config.sections import task
from areal_lora.config.sections.task import BuiltInReward
from areal_lora.tasks import scorer_setup
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.rewards import reward_call
from areal_lora.tasks.scorer import ScorerPool
from areal_lora.types import Outcome
from tests.support.clocks import seen

pytest.importorskip("math_verify")
math_verify = reward_call("math_verify").function


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        (" 3*4=12 12-5=7 #### 7", "She has 3*4=12 and loses 5.\n#### 7"),
        ("#### 7.0", "#### 7"),
        (r"so it is \boxed{7}", "#### 7"),
        ("The answer is 7.", "#### 7"),
        ("#### 1234", "#### 1,234"),
        ("#### $5.00", "#### 5"),
        ("#### 7\nQ: and now?\n#### 9", "#### 7"),
        ("#### 7 apples", "#### 7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("$0.5$", r"$\frac{1}{2}$"),
        (r"#### \frac{2}{4}", "1/2"),
        (r"hence $x^2+2x+1$", "(x+1)^2"),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}"),
        (r"$\{1,2\}$", r"$\{2,1\}$"),
        (r"\boxed{(1,2)}", r"\boxed{(1,2)}"),
        (r"\boxed{x=3}", "3"),
        ("#### Step 1: add\n2+3=5\n#### Step 2: answer\nSo \\boxed{18}", "18"),
        ("<think> I output `#### answer`. 9*2=17 </think>\n#### 18", "18"),
        ("<think> #### 17 </think> She makes $18$.", "18"),
        ("<think>The answer is maybe 3</think> so\n#### sin(x)", "#### sin(x)"),
        ("The answer is below, \\boxed{3} aside.\n#### pi/2", "#### pi/2"),
        (r"<think> so \boxed{41}. " + "Check.\n" * 99 + "</think> **Answer: 42**", "42"),
        ("#### sin(x)\nThat was $x$", "#### sin(x)"),
    ],
)
def test_equal(completion, gold):
    assert math_verify(completion, gold) == 1.0


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (["5", "7"], ["5", "7", "7.0"], ["9", "57", "(5,7)"]),
        (["$5$", "$7$"], ["5", "7"], ["6"]),
        ([r"\frac{1}{2}", 0.25, "#### 3"], ["0.5", "1/4", "3"], ["1", "2"]),
        (["", "5"], ["5"], ["0"]),
        (["12"], ["12"], ["2"]),
    ],
)
def test_a_list_of_gold_answers_has_alternatives(gold, right, wrong):
    assert [math_verify(rf"\boxed{{{text}}}", gold) for text in right + wrong] == [
        *map(right.__contains__, right + wrong)
    ]


def test_a_list_without_an_expression_is_no_gold_answer():
    with pytest.raises(ValueError, match="gold answer states no expression"):
        math_verify("5", [])


@pytest.mark.parametrize(
    ("completion", "gold"),
    [
        ("#### 8", "3+4=7\n#### 7"),
        ("7 #### 8", "#### 7"),
        ("", "#### 7"),
        ("no idea", "#### 7"),
        (r"\boxed{", r"\frac{1}{2}"),
        ("$x^2$", "x^3"),
        (r"\boxed{(1,2)}", r"\boxed{(2,1)}"),
        ("$$$ \\frac{{{", "1"),
        ("#### Step 1: add\n... \\boxed{18}", "1"),
        (r"<think> so \boxed{42}. Wait,", "42"),
    ],
)
def test_not_equal(completion, gold):
    assert math_verify(completion, gold) == 0.0


def test_a_gold_answer_that_states_nothing_is_an_error():
    with pytest.raises(ValueError, match="states no expression"):
        math_verify("7", "")


ENDLESS = (r"\boxed{\sum_{k=0}^{50000} \binom{100000}{2k}}", r"\boxed{9^{9^9}}")  # within Python, and within C


def scores_around_endless_ones() -> list[Score]:
    async def run() -> list[Score]:
        async with ScorerPool(BuiltInReward(kind="math_verify")) as pool:
            texts = ("#### 7", ENDLESS[0], "#### 8", ENDLESS[1], "#### 7")
            return await pool.score([ScoreItem(completion=text, answer="#### 7") for text in texts])

    return asyncio.run(run())


def test_an_expression_that_never_ends_is_a_wrong_answer(monkeypatch, caplog):
    """However long it takes by the clock: CPU time is the answer's own."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(scorer_setup, "MATH_CPU_S", 2.0)
    monkeypatch.setattr(task.BuiltInReward, "timeout_s", 120.0)
    scores = scores_around_endless_ones()
    assert [(s.outcome, s.reward, s.correct) for s in scores] == [
        (Outcome.OK, float(right), right) for right in (True, False, False, False, True)
    ]
    logged = [record.getMessage() for record in caplog.records if "CPU seconds" in record.getMessage()]
    assert logged == [f"math_verify has not compared {n} answers within 2 CPU seconds each: reward 0" for n in (1, 2)]


def test_time_by_the_clock_is_no_property_of_an_answer(monkeypatch):
    monkeypatch.setattr(scorer_setup, "MATH_CPU_S", 600.0)
    monkeypatch.setattr(task.BuiltInReward, "timeout_s", 2.0)
    right = lambda found: found[0].reward == found[4].reward == 1.0  # noqa: E731 - a stall may take longer
    scores = seen(scores_around_endless_ones, right)
    assert right(scores)
    assert {scores[1].outcome, scores[3].outcome} == {Outcome.TIMEOUT}

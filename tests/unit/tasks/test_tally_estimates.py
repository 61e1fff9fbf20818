"""pass@k and majority@n against the mean over all draws and orders; Wilson's interval against published figures."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest

from areal_lora.tasks.reward_calls import Score
from areal_lora.tasks.tally import Answer, bootstrap, estimate, ks, majority, of_problems, pass_at_k, wilson
from areal_lora.types import Outcome


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_mean_over_all_draws_of_k_answers(n: int) -> None:
    for correct in range(n + 1):
        answers = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in itertools.combinations(answers, k)]
            assert pass_at_k(n, correct, k) == pytest.approx(sum(draws) / len(draws))


def first_most_frequent(votes: tuple[tuple[str | None, bool], ...]) -> bool:
    """What a person does who counts votes in this order: of equally frequent ones the first one wins."""
    counts = Counter(vote for vote, _ in votes if vote is not None)
    if not counts:
        return False
    winner = counts.most_common(1)[0][0]
    return next(correct for vote, correct in votes if vote == winner)


def test_majority_is_the_mean_over_all_orders_of_the_answers() -> None:
    draw = random.Random(0)
    right = {"a": True, "b": False, "c": True, None: False}
    for _ in range(60):
        votes = [(vote, right[vote]) for vote in draw.choices(list(right), k=draw.randint(1, 6))]
        orders = [first_most_frequent(order) for order in itertools.permutations(votes)]
        assert majority(votes) == pytest.approx(sum(orders) / len(orders)), votes
    assert majority([("a", True), ("a", False), ("b", True)]) == 0.5, "correct by the reward, for half of the vote"


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 0.8830, 1.0000),
    ],
)
def test_wilson_against_a_published_table(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


def test_several_answers_count_as_one_for_a_problem_that_decides_them_and_as_several_for_one_that_does_not() -> None:
    assert of_problems([0.0] * 30, 240) == wilson(0, 30)
    assert of_problems([1.0] * 30, 240) == wilson(30, 30)
    assert of_problems([0.0, 1.0] * 15, 240) == wilson(15, 30)
    assert of_problems([0.5] * 30, 240) == wilson(120, 240)
    assert of_problems([0.5], 8) == wilson(0.5, 1)


@pytest.mark.parametrize(("a", "b", "least"), [(0.05, 2.0, 0.82), (0.15, 2.0, 0.88), (0.5, 0.5, 0.91)])
def test_intervals_of_hard_sets_contain_the_accuracy(a: float, b: float, least: float) -> None:
    """Eight answers to each of 30 problems, whose rates of correct ones are of a beta distribution."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw, held = np.random.default_rng(seed), 0
    for _ in range(2000):
        low, high = of_problems((draw.binomial(8, draw.beta(a, b, 30)) / 8).tolist(), 240)
        held += low <= a / (a + b) <= high
        assert low < high
    assert held / 2000 > least


def test_a_bootstrap_agrees_with_the_normal_interval_of_many_values_and_is_repeatable() -> None:
    draw = random.Random(1)
    values = [draw.gauss(2.0, 3.0) for _ in range(400)]
    mean = sum(values) / 400
    error = math.sqrt(sum((v - mean) ** 2 for v in values) / 399 / 400)
    found = bootstrap(values)
    assert found == bootstrap(values)
    assert found == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.25 * error)
    assert bootstrap([]) is None
    assert bootstrap([0.5]) == (0.5, 0.5)


def answer(correct: bool | None, vote: str | None = "x", n_tokens: int = 4, truncated: bool = False) -> Answer:
    outcome, reward = (Outcome.ERROR, math.nan) if correct is None else (Outcome.OK, float(correct))
    score = Score(reward=reward, outcome=outcome, correct=correct)
    return Answer(text=vote or "", score=score, n_tokens=n_tokens, finish_reason="length" if truncated else "stop")


def test_several_answers_to_each_problem() -> None:
    problems = [
        [answer(True, "1"), answer(True, "1"), answer(False, "2"), answer(False, "3", 8, True)],
        [answer(False, "1"), answer(False, "1"), answer(None, None), answer(True, "5")],
    ]
    found = estimate(problems, "function")
    assert found.pass_at == {1: pytest.approx(3 / 8), 2: pytest.approx((5 / 6 + 1 / 2) / 2), 4: 1.0}
    assert found.majority == 0.5
    assert found.interval == "wilson"
    assert found.accuracy_95 == wilson(3, 8), "no less variance than of independent answers is assumed"
    assert (found.answer_tokens, found.truncated) == (4.5, 1 / 8)
    ungraded = Answer(text="1", score=Score(reward=1.0, outcome=Outcome.OK))
    unruled = estimate([*problems, [ungraded] * 4], "function")
    assert (unruled.accuracy_95, unruled.pass_at, unruled.majority, unruled.interval) == (None, {}, None, "")
    assert unruled.reward_95 is not None


def test_ks() -> None:
    assert [ks(n) for n in (1, 2, 4, 6, 16)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 6], [1, 2, 4, 8, 16]]

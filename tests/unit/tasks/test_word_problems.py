import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import pytest

from areal_lora.tasks.rewards import extract_answer, numeric_match
from areal_lora.tasks.word_problems import draw_problem, split_of, word_problem

N = 1500


def test_same_arguments_same_problem_in_another_process():
    code = (
        "from areal_lora.tasks.word_problems import word_problem as w\n"
        "print([w(3, 'eval', i).prompt for i in range(50)])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    assert other.stdout.strip() == str([word_problem(3, "eval", i).prompt for i in range(50)])


def test_no_calculation_is_in_both_splits_whatever_the_seed():
    train = {draw_problem(seed, "train", i).key for seed in (0, 20_000) for i in range(N)}
    held_out = {draw_problem(seed, "eval", i).key for seed in (0, 5) for i in range(N)}
    assert train
    assert held_out
    assert not train & held_out
    assert {split_of(key) for key in train} == {"train"}
    assert {split_of(key) for key in held_out} == {"eval"}


def test_answers_are_right_by_an_independent_reading_of_the_story():
    for index in range(N):
        problem = draw_problem(1, "train", index)
        words = problem.prompt.removeprefix("Q: ").replace(",", "").replace(".", "").split()
        if "bags" in words:
            value, rest = int(words[2]) * int(words[5]), words[7:]
        else:
            value, rest = int(words[2]), words[4:]
        for verb, amount in pairwise(rest):
            if amount.isdigit():
                value += int(amount) if verb in ("buys", "finds", "gets") else -int(amount)
        assert extract_answer(problem.answer) == value, (problem.prompt, problem.answer)


def test_the_steps_of_an_answer_are_true_equations():
    for index in range(N):
        first, second, _, _ = problem_answer_parts(index)
        for step in (first, second):
            left, right = step.split("=")
            operation = next(o for o in "+*-" if o in left)
            x, y = map(int, left.split(operation))
            assert {"+": x + y, "-": x - y, "*": x * y}[operation] == int(right)


def problem_answer_parts(index: int) -> list[str]:
    return draw_problem(2, "eval", index).answer.split()


def test_lengths_fit_the_embedded_run():
    samples = [word_problem(0, split, i) for split in ("train", "eval") for i in range(N)]
    assert max(len(s.prompt) for s in samples) <= 70
    assert max(len(s.answer) for s in samples) <= 24
    assert len({s.uid for s in samples}) == len(samples)


def test_a_sample_scores_its_own_answer_and_not_a_neighbour():
    sample = word_problem(0, "eval", 0)
    assert numeric_match(sample.answer, sample.answer) == 1.0
    value = extract_answer(sample.answer)
    assert value is not None
    assert numeric_match(f"#### {value + Fraction(1)}", sample.answer) == 0.0


@pytest.mark.parametrize("seed", [0, 1])
def test_seeds_give_other_problems(seed):
    here = [word_problem(seed, "train", i).prompt for i in range(100)]
    there = [word_problem(seed + 1, "train", i).prompt for i in range(100)]
    assert here != there

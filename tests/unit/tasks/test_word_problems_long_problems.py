"""Three-step problems: right by an independent reading, and held-out calculations stay held out."""

from __future__ import annotations

import re

from areal_lora.config.sections.task import WordProblemsTask
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.rewards import extract_answer
from areal_lora.tasks.word_problems import LARGEST_VALUE, STEPS, draw_problem, word_problem

N = 1500
ADDS = ("buys", "finds", "gets")


def test_answers_are_right_by_an_independent_reading_of_the_story():
    for index in range(N):
        sample = word_problem(1, "train", index, long=True)
        assert sample.prompt.startswith("Q: ")
        assert sample.prompt.endswith(" How many now?\nA:")
        bags = re.search(r"has (\d+) bags of (\d+) ", sample.prompt)
        first = re.search(r"has (\d+) ", sample.prompt)
        assert first is not None
        value = int(bags[1]) * int(bags[2]) if bags else int(first[1])
        changes = re.findall(r"(buys|finds|gets|sells|loses|uses) (\d+)", sample.prompt)
        assert len(changes) + bool(bags) == STEPS
        for verb, number in changes:
            value += int(number) if verb in ADDS else -int(number)
        assert extract_answer(sample.answer) == value, (sample.prompt, sample.answer)
        assert 1 <= value <= LARGEST_VALUE


def test_the_steps_of_an_answer_are_true_equations_that_follow_each_other():
    for index in range(N):
        *steps, mark, result = draw_problem(2, "eval", index, long=True).answer.split()
        assert len(steps) == STEPS
        value = None
        for step in steps:
            match = re.fullmatch(r"(\d+)([*+-])(\d+)=(\d+)", step)
            assert match is not None, step
            left, right, shown = int(match[1]), int(match[3]), int(match[4])
            assert value is None or left == value
            value = {"+": left + right, "-": left - right, "*": left * right}[match[2]]
            assert shown == value
        assert (mark, int(result)) == ("####", value)


def test_no_calculation_is_in_both_splits_whatever_the_seed():
    train = {draw_problem(seed, "train", i, long=True).key for seed in (0, 20_000) for i in range(N)}
    held_out = {draw_problem(seed, "eval", i, long=True).key for seed in (0, 5) for i in range(N)}
    assert not train & held_out
    assert len(train) > 1.9 * N, "there are many more calculations than a run draws"


def test_the_task_draws_the_level_that_it_names():
    task = WordProblemsTask(level="three_step", n_train=3)
    samples = load_samples(task, "train")
    assert samples == [word_problem(0, "train", i, long=True) for i in range(3)]
    assert len({s.uid for s in [*samples, *load_samples(WordProblemsTask(n_train=3), "train")]}) == 6

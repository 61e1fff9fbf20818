"""Generate three-step word problems with two-digit numbers: the harder task of the embedded run.

As in `areal_lora.tasks.word_problems` a problem is a pure function of ``(seed, split, index)``, and no
calculation is in both splits.

Example::

    Q: Tom has 4 bags of 17 coins, finds 26 and loses 35. How many now?
    A: 4*17=68 68+26=94 94-35=59 #### 59
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from areal_lora.tasks.word_problems import NAMES, THINGS, VERBS, Operation, Split, apply_operation, split_of
from areal_lora.types import Sample

STEPS = 3
LARGEST = 99  # of a number in the story
LARGEST_VALUE = 300  # of an intermediate result
BAGS, BAG_SIZES = (2, 9), (11, 29)
BAGS_ONE_IN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LongProblem:
    """``start`` and then each ``(operation, number)`` in turn; the verbs state the additions and subtractions."""

    name: str
    thing: str
    start: int
    steps: tuple[tuple[Operation, int], ...]
    verbs: tuple[str, ...]

    @property
    def key(self) -> str:
        """Identity of the calculation, without names and verbs."""
        return f"{self.start}" + "".join(f"{operation}{number}" for operation, number in self.steps)

    @property
    def prompt(self) -> str:
        bags = self.steps[0][0] == "*"
        have = f"{self.start} bags of {self.steps[0][1]}" if bags else f"{self.start}"
        changes = [f"{verb} {number}" for verb, (_, number) in zip(self.verbs, self.steps[bags:], strict=True)]
        return f"Q: {self.name} has {have} {self.thing}, {', '.join(changes[:-1])} and {changes[-1]}. How many now?\nA:"

    @property
    def answer(self) -> str:
        """Worked answer ending in ``#### n``, with the leading space that follows ``A:``."""
        value, worked = self.start, []
        for operation, number in self.steps:
            result = apply_operation(value, operation, number)
            worked.append(f"{value}{operation}{number}={result}")
            value = result
        return f" {' '.join(worked)} #### {value}"


def draw_long_problem(seed: int, split: Split, index: int) -> LongProblem:
    """Draw problem ``index`` of a split; the same arguments give the same problem on every machine."""
    rng = random.Random(f"long_problems/{seed}/{split}/{index}")
    while (problem := _draw(rng)) is None or split_of(problem.key) != split:
        pass
    return problem


def long_problem(seed: int, split: Split, index: int) -> Sample:
    """Return problem ``index`` of a split as a :class:`Sample`."""
    problem = draw_long_problem(seed, split, index)
    return Sample(uid=f"long_problems/{seed}/{split}/{index}", prompt=problem.prompt, answer=problem.answer)


def _draw(rng: random.Random) -> LongProblem | None:
    """Draw one problem of either split, or None if an intermediate result is out of range."""
    steps: list[tuple[Operation, int]] = []
    start = value = rng.randint(11, LARGEST)
    if rng.randrange(BAGS_ONE_IN) == 0:
        start, size = rng.randint(*BAGS), rng.randint(*BAG_SIZES)
        steps.append(("*", size))
        value = start * size
    while len(steps) < STEPS:
        operation: Operation = rng.choice(("+", "-"))
        number = rng.randint(3, LARGEST)
        value = apply_operation(value, operation, number)
        if not 1 <= value <= LARGEST_VALUE:
            return None
        steps.append((operation, number))
    verbs = tuple(rng.choice(VERBS[operation]) for operation, _ in steps if operation != "*")
    return LongProblem(name=rng.choice(NAMES), thing=rng.choice(THINGS), start=start, steps=tuple(steps), verbs=verbs)

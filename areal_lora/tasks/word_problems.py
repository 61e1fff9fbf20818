"""Generate two-step word problems in GSM8K format for the embedded run.

A problem is a pure function of ``(seed, split, index)``. Training and held-out problems never
share a calculation: :func:`split_of` assigns every ``(operation, operation, a, b, c)`` to one
split by a hash that does not depend on the seed. No amount of training text contains a held-out
calculation.

Example::

    Q: Tom has 3 bags of 4 coins and loses 5. How many now?
    A: 3*4=12 12-5=7 #### 7

Generate three-step word problems with two-digit numbers: the harder task of the embedded run.

As in `areal_lora.tasks.word_problems` a problem is a pure function of ``(seed, split, index)``, and no
calculation is in both splits.

Example::

    Q: Tom has 4 bags of 17 coins, finds 26 and loses 35. How many now?
    A: 4*17=68 68+26=94 94-35=59 #### 59
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Literal

from areal_lora.types import Sample

Split = Literal["train", "eval"]
Operation = Literal["+", "-", "*"]

NAMES = ("Tom", "Ann", "Bob", "Sue", "Max", "Eve", "Lea", "Jon")
THINGS = ("books", "coins", "cards", "pens", "shells", "cups", "stamps", "nuts")
VERBS: dict[Operation, tuple[str, ...]] = {"+": ("buys", "finds", "gets"), "-": ("sells", "loses", "uses")}
PLANS: tuple[tuple[Operation, Operation], ...] = (
    ("+", "+"),
    ("+", "-"),
    ("-", "+"),
    ("-", "-"),
    ("*", "+"),
    ("*", "-"),
)
EVAL_ONE_IN = 4


def apply_operation(left: int, operation: Operation, right: int) -> int:
    """Return ``left operation right`` in whole numbers."""
    match operation:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblem:
    """``(a first b) second c`` as a story; if ``first`` is ``*``, ``a`` bags of ``b``."""

    name: str
    thing: str
    first_verb: str
    second_verb: str
    first: Operation
    second: Operation
    a: int
    b: int
    c: int

    @property
    def key(self) -> str:
        """Identity of the calculation, without names and verbs."""
        return f"{self.first}{self.second}:{self.a},{self.b},{self.c}"

    @property
    def prompt(self) -> str:
        if self.first == "*":
            story = f"{self.name} has {self.a} bags of {self.b} {self.thing} and {self.second_verb} {self.c}."
        else:
            story = (
                f"{self.name} has {self.a} {self.thing}, {self.first_verb} {self.b} and {self.second_verb} {self.c}."
            )
        return f"Q: {story} How many now?\nA:"

    @property
    def answer(self) -> str:
        """Worked answer ending in ``#### n``, with the leading space that follows ``A:``."""
        middle = apply_operation(self.a, self.first, self.b)
        result = apply_operation(middle, self.second, self.c)
        return f" {self.a}{self.first}{self.b}={middle} {middle}{self.second}{self.c}={result} #### {result}"


def split_of(key: str) -> Split:
    """Return the split of a calculation: one in ``EVAL_ONE_IN`` is held out, for every seed."""
    digest = hashlib.sha256(key.encode()).digest()
    return "eval" if digest[0] % EVAL_ONE_IN == 0 else "train"


def _draw(rng: random.Random) -> WordProblem:
    """Draw one problem of either split; every intermediate result is positive."""
    while True:
        first, second = rng.choice(PLANS)
        largest_a = 5 if first == "*" else 12
        largest_b = 5 if first == "*" else 9
        a, b, c = rng.randint(2, largest_a), rng.randint(2, largest_b), rng.randint(2, 9)
        middle = apply_operation(a, first, b)
        if middle < 1 or apply_operation(middle, second, c) < 1:
            continue
        return WordProblem(
            name=rng.choice(NAMES),
            thing=rng.choice(THINGS),
            first_verb="" if first == "*" else rng.choice(VERBS[first]),
            second_verb=rng.choice(VERBS[second]),
            first=first,
            second=second,
            a=a,
            b=b,
            c=c,
        )


def draw_problem(seed: int, split: Split, index: int) -> WordProblem:
    """Draw problem ``index`` of a split; the same arguments give the same problem on every machine."""
    # A str seed goes through SHA-512, not through the per-process hash().
    rng = random.Random(f"word_problems/{seed}/{split}/{index}")
    while split_of((problem := _draw(rng)).key) != split:
        pass
    return problem


def word_problem(seed: int, split: Split, index: int) -> Sample:
    """Return problem ``index`` of a split as a :class:`Sample`."""
    problem = draw_problem(seed, split, index)
    return Sample(uid=f"word_problems/{seed}/{split}/{index}", prompt=problem.prompt, answer=problem.answer)


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
    while (problem := _draw_long(rng)) is None or split_of(problem.key) != split:
        pass
    return problem


def long_problem(seed: int, split: Split, index: int) -> Sample:
    """Return problem ``index`` of a split as a :class:`Sample`."""
    problem = draw_long_problem(seed, split, index)
    return Sample(uid=f"long_problems/{seed}/{split}/{index}", prompt=problem.prompt, answer=problem.answer)


def _draw_long(rng: random.Random) -> LongProblem | None:
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

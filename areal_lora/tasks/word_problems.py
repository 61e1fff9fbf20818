"""Generate word problems in GSM8K format for the embedded runs: two steps, or three with two-digit numbers.

A problem is a pure function of ``(seed, split, index)``. Training and held-out problems never share a calculation:
:func:`split_of` assigns every calculation to one split by a hash that does not depend on the seed. No amount of
training text contains a held-out calculation.

Examples::

    Q: Tom has 3 bags of 4 coins and loses 5. How many now?
    A: 3*4=12 12-5=7 #### 7

    Q: Tom has 4 bags of 17 coins, finds 26 and loses 35. How many now?
    A: 4*17=68 68+26=94 94-35=59 #### 59
"""

import hashlib
import random
from dataclasses import dataclass
from itertools import product
from typing import Literal

from areal_lora.types import Sample

Split = Literal["train", "eval"]
Operation = Literal["+", "-", "*"]

NAMES = ("Tom", "Ann", "Bob", "Sue", "Max", "Eve", "Lea", "Jon")
THINGS = ("books", "coins", "cards", "pens", "shells", "cups", "stamps", "nuts")
VERBS: dict[Operation, tuple[str, ...]] = {"+": ("buys", "finds", "gets"), "-": ("sells", "loses", "uses")}
PLANS: tuple[tuple[Operation, Operation], ...] = tuple(product(("+", "-", "*"), ("+", "-")))
EVAL_ONE_IN = 4
STEPS = 3  # and below: of the long problems
LARGEST = 99  # of a number in the story
LARGEST_VALUE = 300  # of an intermediate result
BAGS, BAG_SIZES = (2, 9), (11, 29)
BAGS_ONE_IN = 3


def apply_operation(left: int, operation: Operation, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


@dataclass(frozen=True, slots=True, kw_only=True)
class WordProblem:
    """``start`` and then each ``(operation, number)`` in turn; ``start`` bags of a number if the first one is ``*``.

    The verbs state the additions and subtractions. ``key`` identifies the calculation.
    """

    key: str
    name: str
    thing: str
    start: int
    steps: tuple[tuple[Operation, int], ...]
    verbs: tuple[str, ...]

    @property
    def prompt(self) -> str:
        bags = self.steps[0][0] == "*"
        have = f"{self.start} bags of {self.steps[0][1]}" if bags else f"{self.start}"
        changes = [f"{verb} {number}" for verb, (_, number) in zip(self.verbs, self.steps[bags:], strict=True)]
        before = "".join(f", {change}" for change in changes[:-1])
        return f"Q: {self.name} has {have} {self.thing}{before} and {changes[-1]}. How many now?\nA:"

    @property
    def answer(self) -> str:
        """Worked answer ending in ``#### n``, with the leading space that follows ``A:``."""
        value, worked = self.start, []
        for operation, number in self.steps:
            result = apply_operation(value, operation, number)
            worked.append(f"{value}{operation}{number}={result}")
            value = result
        return f" {' '.join(worked)} #### {value}"


def split_of(key: str) -> Split:
    """Return the split of a calculation: one in ``EVAL_ONE_IN`` is held out, for every seed."""
    digest = hashlib.sha256(key.encode()).digest()
    return "eval" if digest[0] % EVAL_ONE_IN == 0 else "train"


def _draw(rng: random.Random) -> WordProblem | None:
    """Draw one problem of either split; None if an intermediate result is not positive."""
    first, second = rng.choice(PLANS)
    largest_a, largest_b = (5, 5) if first == "*" else (12, 9)
    a, b, c = rng.randint(2, largest_a), rng.randint(2, largest_b), rng.randint(2, 9)
    middle = apply_operation(a, first, b)
    if middle < 1 or apply_operation(middle, second, c) < 1:
        return None
    return WordProblem(
        key=f"{first}{second}:{a},{b},{c}",
        name=rng.choice(NAMES),
        thing=rng.choice(THINGS),
        start=a,
        steps=((first, b), (second, c)),
        verbs=tuple(rng.choice(VERBS[operation]) for operation in (first, second) if operation != "*"),
    )


def _draw_long(rng: random.Random) -> WordProblem | None:
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
    return WordProblem(
        key=f"{start}" + "".join(f"{operation}{number}" for operation, number in steps),
        verbs=tuple(rng.choice(VERBS[operation]) for operation, _ in steps if operation != "*"),
        name=rng.choice(NAMES),
        thing=rng.choice(THINGS),
        start=start,
        steps=tuple(steps),
    )


def draw_problem(seed: int, split: Split, index: int, *, long: bool = False) -> WordProblem:
    """Draw problem ``index`` of a split; the same arguments give the same problem on every machine."""
    rng = random.Random(_uid(seed, split, index, long))  # a str seed goes through SHA-512, not the per-process hash()
    draw = _draw_long if long else _draw
    while (problem := draw(rng)) is None or split_of(problem.key) != split:
        pass
    return problem


def word_problem(seed: int, split: Split, index: int, *, long: bool = False) -> Sample:
    """Return problem ``index`` of a split as a :class:`Sample`; ``long``: three steps with two-digit numbers."""
    problem = draw_problem(seed, split, index, long=long)
    return Sample(uid=_uid(seed, split, index, long), prompt=problem.prompt, answer=problem.answer)


def _uid(seed: int, split: Split, index: int, long: bool) -> str:
    return f"{'long' if long else 'word'}_problems/{seed}/{split}/{index}"

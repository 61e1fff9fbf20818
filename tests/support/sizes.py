"""Sizes of the tests that repeat: those of the suite, and those of the nightly run (``make test-all``)."""

import os
import random
import subprocess
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from tests.support.paths import ROOT

T = TypeVar("T")
NIGHTLY = os.environ.get("AREAL_LORA_NIGHTLY") == "1"
VARIABLE = "AREAL_LORA_SAMPLE"
DRAWS = 8


def size(suite: int, nightly: int) -> int:
    """The number of repetitions in this run. Nothing but such numbers may differ between the two."""
    return nightly if NIGHTLY else suite


def seed() -> str:
    """What samples of this run are drawn by: the variable, else the commit, else (outside git) always the same.

    It is kept in the variable: processes of this run draw alike, whatever is committed meanwhile.
    """
    if VARIABLE not in os.environ:
        words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        try:
            commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = "none"
        os.environ[VARIABLE] = commit
    return os.environ[VARIABLE]


def sample(
    cases: Iterable[T],
    suite: int,
    kinds: Callable[[T], Iterable[Hashable]] = lambda case: (),
    nightly: bool = NIGHTLY,
    cost: Callable[[T], float] | None = None,
) -> list[T]:
    """All of the ``cases`` at night; else ``suite`` of them, in their order, drawn by ``seed``.

    At least one case of each of the ``kinds`` is among them, and that may take more than ``suite``: no more than
    there must be, none of these cases can be left out. With ``cost`` it is the cheapest of ``DRAWS`` samples.
    """
    cases, draw = list(cases), random.Random(seed())
    if nightly:
        return cases
    drawn = [_drawn(cases, suite, kinds, draw) for _ in range(DRAWS if cost else 1)]
    return min(drawn, key=lambda chosen: sum(map(cost, chosen))) if cost else drawn[0]


def _drawn(cases: list[T], suite: int, kinds: Callable[[T], Iterable[Hashable]], draw: random.Random) -> list[T]:
    order = list(range(len(cases)))
    draw.shuffle(order)
    chosen, seen = [], set()
    for i in order:
        if not seen.issuperset(new := set(kinds(cases[i]))):
            chosen.append(i)
            seen |= new
    for i in chosen.copy():  # a later case may have all kinds of an earlier one
        if not set(kinds(cases[i])) - {kind for other in chosen if other != i for kind in kinds(cases[other])}:
            chosen.remove(i)
    chosen += [i for i in order if i not in chosen][: max(suite - len(chosen), 0)]
    return [cases[i] for i in sorted(chosen)]

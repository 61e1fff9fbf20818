"""Prompts are drawn by their stage's weights, and a run that is resumed draws the same ones."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lora.config.sections.adapter import StagedDifficulty
from areal_lora.data.prompts import Formatter, PromptStream
from areal_lora.errors import ConfigError
from areal_lora.rollout.controller.groups import Lease
from areal_lora.rollout.ledger.curricula import Curriculum
from areal_lora.rollout.ledger.ledger import LedgerFile
from areal_lora.types import Sample
from tests.support.rollout.helpers import CharTokenizer, admit_all, episode, feed, samples

EASY_THEN_MIXED = StagedDifficulty("level", ((0, {"easy": 1}), (4, {"easy": 0.2, "hard": 0.8})))


def leveled(n: int, hard: int) -> list[Sample]:
    """Of ``n`` samples the last ``hard`` ones are hard."""
    return [
        replace(sample, columns={"level": "easy" if i < n - hard else "hard"}) for i, sample in enumerate(samples(n))
    ]


def made(chosen: StagedDifficulty, rows: Sequence[Sample], seed: int = 0) -> PromptStream:
    order = Curriculum(chosen, rows, seed)
    return PromptStream(rows, Formatter(tokenizer=CharTokenizer()), seed=seed, max_prompt_tokens=64, order=order)


def only(weights: dict[str, float]) -> StagedDifficulty:
    return StagedDifficulty("level", ((0, weights),))


def test_values_are_drawn_as_often_as_their_weights_say() -> None:
    """Within 5 standard deviations; 3 of 4 parts are easy, and a weight of 0 is never drawn."""
    seed, n = random.randrange(1 << 30), 20_000
    rows = [*leveled(40, 7), replace(samples(41)[40], columns={"level": "never"})]
    stream = made(only({"easy": 3, "never": 0, "hard": 1}), rows, seed)
    prompts = [stream.at(position) for position in range(n)]
    drawn = Counter(prompt.sample.columns["level"] for prompt in prompts)
    assert drawn["never"] == 0
    assert abs(drawn["hard"] - n / 4) <= 5 * math.sqrt(n * 3 / 16), f"seed {seed}: {drawn}"
    assert len({prompt.uid for prompt in prompts}) == n, f"seed {seed}"
    by_row = Counter(prompt.sample.uid for prompt in prompts)
    assert len(by_row) == 40, f"seed {seed}: all rows are drawn"


def test_a_row_comes_once_in_as_many_positions_as_its_value_has_rows() -> None:
    stream = made(only({"easy": 1}), leveled(50, 10))
    for epoch in range(3):
        uids = [stream.at(position).uid for position in range(40 * epoch, 40 * (epoch + 1))]
        assert sorted(uids) == sorted(f"{epoch}:s{i}" for i in range(40))


def test_one_row_of_many_is_drawn_at_once() -> None:
    """By its list, not by skipping positions until one is found: each position issues a prompt."""
    feed_, ledger, _ = feed(eta=0, b=3, prompts=made(only({"hard": 1}), leveled(3000, 1)))
    feed_.announce(0)
    assert {ticket.prompt.sample.uid for ticket in admit_all(feed_)} == {"s2999"}
    assert ledger.head.next_position == ledger.head.issued == 3


def played(path: Path, steps: int, stop: int | None, lose: bool = False, eta: int = 0) -> list[list[str]]:
    """Levels of each step's uids; before ``stop`` another process continues, ``lose``: without the ledger's file."""
    rows, taken, lease = leveled(30, 12), list[list[str]](), Lease(finished=(), snapshot=b"")
    file = LedgerFile(path / "first.sqlite", "r")
    feed_, _, _ = feed(eta=eta, b=3, prompts=made(EASY_THEN_MIXED, rows), file=file)
    for step in range(steps):
        if step == stop:
            file.close()
            file = LedgerFile(path / ("second.sqlite" if lose else "first.sqlite"), "r")
            feed_, _, _ = feed(eta=eta, b=3, prompts=made(EASY_THEN_MIXED, rows), file=file, version=None)
            feed_.hello(step, trainer="second", snapshot=lease.snapshot)
        feed_.announce(step)
        for ticket in admit_all(feed_):
            feed_.finish(ticket, episode(ticket.prompt, step))
        lease = feed_.take(step) or lease
        feed_.commit(step)
        taken.append([group.uid for group in lease.groups])
    file.close()
    return taken


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("stop", [2, 4, 9])
@pytest.mark.parametrize("lose", [False, True])
def test_a_resumed_run_draws_the_prompts_that_it_would_have_drawn(
    tmp_path: Path, lose: bool, stop: int, eta: int
) -> None:
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole = played(tmp_path / "whole", 20, None, eta=eta)
    assert played(tmp_path / "resumed", 20, stop, lose, eta) == whole
    hard = [sum(int(uid.partition(":s")[2]) >= 18 for uid in step) for step in whole]
    assert hard[:4] == [0, 0, 0, 0], "groups are of the stage of their step, however early they are issued"
    assert sum(hard[4:]) > 16


def test_another_curriculum_is_another_order() -> None:
    rows = leveled(30, 12)
    digests = {made(chosen, rows).digest for chosen in (EASY_THEN_MIXED, only({"easy": 1}), only({"easy": 2}))}
    assert len(digests) == 3


def test_what_no_row_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"difficulty\.level\.0: no row has 'esay' .*give weights to: easy, hard"):
        Curriculum(only({"esay": 1}), leveled(9, 3), 0)
    unnamed = [replace(sample, columns={"source": {"book": 1}}) for sample in samples(3)]
    with pytest.raises(ConfigError, match=r"difficulty: s0 has no column 'level' .*name one of: source, source\.book"):
        Curriculum(only({"easy": 1}), unnamed, 0)
    numbers = [
        replace(sample, columns={"level": value}) for sample, value in zip(samples(3), (1, True, None), strict=True)
    ]
    assert Curriculum(only({"1": 1, "true": 1, "": 1}), numbers, 0).key


def test_each_value_needs_a_prompt_that_fits() -> None:
    """A step would else wait without end for one."""
    rows = leveled(9, 3)
    rows[-3:] = [replace(row, prompt="1" * 65) for row in rows[-3:]]
    with pytest.raises(ConfigError, match="all 3 prompts are longer than the 64 tokens"):
        made(EASY_THEN_MIXED, rows)
    made(only({"easy": 1}), rows)

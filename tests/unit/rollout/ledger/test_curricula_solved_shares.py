"""Prompts are drawn by their solved shares, and a run that is resumed draws the same ones."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from areal_lora.rollout.controller.groups import Lease, Ticket
from areal_lora.rollout.ledger.curricula import SolvedShares
from areal_lora.rollout.ledger.ledger import LedgerFile
from areal_lora.rollout.ledger.reconcile import decode_snapshot
from areal_lora.rollout.workflow import Episode
from tests.support.rollout.helpers import NAME, admit_all, episode, feed, stream

N, SAMPLES = 30, 4


def graded(ticket: Ticket, version: int) -> Episode:
    """Of four answers so many are correct as the number of the sample leaves over by five; a fifth states nothing."""
    made = episode(ticket.prompt, version, SAMPLES)
    known, right = divmod(int(ticket.prompt.sample.uid[1:]), 5)
    graded = tuple(replace(t, correct=t.sample < right if known % 5 else None) for t in made.group.trajectories)
    return replace(made, group=replace(made.group, trajectories=graded))


def test_a_prompt_is_drawn_as_often_as_its_weight_says() -> None:
    """4 (c + 1) (n + 1 - c) / (n + 2)^2 of the epochs, within 5 deviations, and 5 for the skew of rare misses."""
    seed, epochs = random.randrange(1 << 30), 3000
    rng, prompts = random.Random(seed), stream(N, seed=seed)
    shares = SolvedShares(LedgerFile(":memory:", "r"), NAME, prompts, seed)
    counts = [(rng.randint(0, n), n) for n in rng.choices([1, 2, 8, 64], k=N - 1)]
    shares.restore(dict(enumerate(counts)))
    drawn = Counter(prompts.index(p) for p in range(N * epochs) if shares.draws(p))
    assert drawn[N - 1] == epochs, "no answer is known of the last one"
    for i, (c, n) in enumerate(counts):
        weight = float(Fraction(4 * (c + 1) * (n + 1 - c), (n + 2) ** 2))
        off = abs(drawn[i] - epochs * weight)
        assert off <= 5 + 5 * math.sqrt(epochs * weight * (1 - weight)), f"seed {seed}: {c} of {n}, {drawn[i]} times"


def test_the_last_groups_counts_are_kept_where_it_states_what_is_correct(caplog: pytest.LogCaptureFixture) -> None:
    file, prompts = LedgerFile(":memory:", "r"), stream(N)
    shares = SolvedShares(file, NAME, prompts, 0)
    group = episode(prompts.at(7), 0, 3).group
    a, b, c = group.trajectories
    stated = replace(group, trajectories=(replace(a, correct=True), replace(b, correct=False), c))
    shares.put(7, stated)
    assert caplog.messages == []
    for _ in range(2):
        shares.put(7, group)
    assert [message.partition(": no answer")[0] for message in caplog.messages] == [
        f"{NAME}: sampling.difficulty has no effect on prompts such as {group.uid}"
    ]
    given = replace(group, trajectories=(replace(a, correct=True, given=True),))
    shares.put(7, given)
    assert shares.counts == {prompts.index(7): (1, 2)}
    assert SolvedShares(file, NAME, prompts, 0).counts == shares.counts, "of the file"
    assert SolvedShares(file, "other", prompts, 0).counts == {}
    conversations = (replace(a, correct=True), replace(b, sample=0, correct=True))
    shares.put(7, replace(group, trajectories=conversations))
    assert shares.counts == {prompts.index(7): (1, 1)}, "two trajectories of one sample"


def played(path: Path, steps: int, stop: int | None, lose: bool = False) -> list[list[str]]:
    """Uids of each step's groups; before step ``stop`` another process goes on, ``lose``: without the ledger's file."""
    prompts, taken, lease = stream(N), list[list[str]](), Lease(finished=(), snapshot=b"")
    file = LedgerFile(path / "first.sqlite", "r")
    made, _, _ = feed(eta=0, b=3, prompts=prompts, file=file, by_difficulty=True)
    for step in range(steps):
        if step == stop:
            file.close()
            file = LedgerFile(path / ("second.sqlite" if lose else "first.sqlite"), "r")
            made, _, _ = feed(eta=0, b=3, prompts=prompts, file=file, by_difficulty=True, version=None)
            made.hello(step, trainer="second", snapshot=lease.snapshot)
        made.announce(step)
        for ticket in admit_all(made):
            made.finish(ticket, graded(ticket, step))
        lease = made.take(step) or lease
        made.commit(step)
        taken.append([group.uid for group in lease.groups])
    file.close()
    return taken


@pytest.mark.parametrize("lose", [False, True])
def test_a_resumed_run_draws_the_prompts_that_it_would_have_drawn(tmp_path: Path, lose: bool) -> None:
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole = played(tmp_path / "whole", 60, None)
    assert played(tmp_path / "resumed", 60, 33, lose) == whole
    drawn = Counter(int(uid.partition(":s")[2]) % 5 for step in whole for uid in step)
    assert drawn[2] > 1.3 * drawn[0], "half solved, and never"


def test_a_snapshot_of_an_earlier_commit_has_no_counts() -> None:
    made, _, _ = feed(b=1)
    made.announce(0)
    for ticket in admit_all(made):
        made.finish(ticket, episode(ticket.prompt, 0))
    lease = made.take(0)
    assert lease is not None
    found = decode_snapshot(lease.snapshot, NAME)
    assert found is not None
    assert found.solved == {}

"""Which requests may wait, whose turn it is, and what is sent of a window, as data."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from areal_lora.errors import RequestError
from areal_lora.operations.protocol import DropState, LoadState, Loss, OptimStep, Pass, Poison, Publish, SaveState
from areal_lora.service.queue.ordering import (
    GAP_S,
    Op,
    OpKind,
    QueueUsage,
    admit,
    check_seq,
    kind_of,
    ready,
    sealed,
    spoiled,
    too_long,
)
from tests.support.service.ledger import QUOTA

NONE = QueueUsage(queued=0, n_bytes=0)
MIB = 1 << 20


def status(waiting: QueueUsage, next_seq: int, held: set[int], seq: int, n_bytes: int = 0) -> int:
    try:
        check_seq(QUOTA, next_seq, seq)
        admit(QUOTA, waiting, held, seq, n_bytes)
    except RequestError as refused:
        return refused.status
    return 0


def test_what_may_wait() -> None:
    full = QueueUsage(queued=QUOTA.queued, n_bytes=0)
    heavy = QUOTA.queued_mib * MIB
    assert status(NONE, 3, set(), 3) == 0
    assert status(NONE, 3, set(), 2) == 422, "passed over, or answered long ago"
    assert status(NONE, 3, set(), 3 + QUOTA.queued) == 429, "too far ahead"
    assert status(full, 3, {4}, 5) == 429
    assert status(full, 3, {4}, 3) == 0, "it fills the gap before one that waits"
    assert status(QueueUsage(queued=1, n_bytes=heavy), 3, set(), 3, 1) == 429
    assert status(QueueUsage(queued=0, n_bytes=heavy), 3, set(), 3, 1) == 429, "a checkpoint frees them"
    assert too_long(QUOTA, QueueUsage(queued=0, n_bytes=heavy), 1)
    assert not too_long(QUOTA, QueueUsage(queued=0, n_bytes=heavy - 1), 1)
    assert status(QueueUsage(queued=0, n_bytes=heavy), 3, set(), 3, 0) == 0, "a step frees them"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 60), max_size=80))
def test_a_queue_is_bounded_and_can_always_become_shorter(arrivals: list[int]) -> None:
    """Any arrivals: at most twice the quota waits, and the next number is always taken."""
    next_seq, held = 1, set[int]()
    for seq in arrivals:
        queued = QueueUsage(queued=len(held), n_bytes=0)
        if seq not in held and status(queued, next_seq, held, seq) == 0:
            held.add(seq)
        assert len(held) <= 2 * QUOTA.queued
        if held:
            assert next_seq in held or status(QueueUsage(queued=len(held), n_bytes=0), next_seq, held, next_seq) == 0
        for done in ready(next_seq, held):
            held.remove(done)
            next_seq = done + 1


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(1, 9)))
def test_any_order_of_arrival_is_carried_out_in_order(arrivals: list[int]) -> None:
    next_seq, held, done = 1, set[int](), list[int]()
    for seq in arrivals:
        held.add(seq)
        now = ready(next_seq, held)
        done += now
        next_seq = now[-1] + 1 if now else next_seq
    assert done == list(range(1, 9))


def test_a_gap_is_sealed_when_what_waits_behind_it_is_old() -> None:
    assert sealed(2, {4: 100.0, 5: 50.0}, 50.0 + GAP_S) == 4
    assert sealed(2, {4: 100.0, 5: 50.0}, 49.0 + GAP_S) is None
    assert sealed(2, {2: 0.0, 4: 0.0}, 10 * GAP_S) is None, "its turn has come"
    assert sealed(2, {}, 10 * GAP_S) is None


@pytest.mark.parametrize(
    ("ops", "poisoned"),
    [
        ("p p s", []),
        ("p! p s", [1]),
        ("p p s!", [1, 2]),
        ("p s! p p s", [1]),
        ("p o s!", [1]),
        ("p! p", [1]),
        ("s! p s", []),
    ],
)
def test_what_was_answered_as_failed_fails_again(ops: str, poisoned: list[int]) -> None:
    """p: pass, s: step, o: another one; !: it was answered as failed."""
    kinds = {"p": OpKind.PASS, "s": OpKind.CLOSE, "o": OpKind.OTHER}
    rows = [Op(number=number, kind=kinds[word[0]], failed="!" in word) for number, word in enumerate(ops.split(), 1)]
    assert [op.number for op in rows if spoiled(rows, op.number)] == poisoned


def test_what_ends_a_window_is_covered_by_a_checkpoint() -> None:
    ends = (OptimStep(lr=1.0), LoadState(adapter="a", label="x", optimizer=True), Poison(reason="x", of_step=True))
    assert {kind_of(what) for what in ends} == {OpKind.CLOSE}
    assert {kind_of(what) for what in (Pass(data=(), loss=Loss.DRO), Poison(reason="x"))} == {OpKind.PASS}
    others = (SaveState(label="x"), DropState(label="x"), Publish())
    assert {kind_of(what) for what in others} == {OpKind.OTHER}

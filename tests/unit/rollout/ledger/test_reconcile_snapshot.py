from __future__ import annotations

import pytest

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.ledger import GroupState, Ledger, LedgerFile, LedgerRow
from areal_lora.rollout.ledger.reconcile import decode_snapshot, rebuild, take_snapshot
from tests.support.rollout.helpers import open_ledger


def test_a_snapshot_reads_no_group_of_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 50 steps of 3 groups without a commit."""
    _, book = open_ledger()
    for step in range(50):
        seqs = [book.issue(3 * step + i, 1) for i in range(3)]
        for seq in seqs:
            book.finish(seq, step, step, b"")
        book.lease(seqs, step)
    last, read = book.issue(150, 1), list[LedgerRow]()
    rows = book.table.rows

    def noted(*states: GroupState, **chosen: int) -> list[LedgerRow]:
        found = rows(*states, **chosen)
        read.extend(found)
        return found

    monkeypatch.setattr(book.table, "rows", noted)
    taken = decode_snapshot(take_snapshot(book, 49), "math")
    assert taken is not None
    assert [group.seq for group in taken.open] == [group.seq for group in read] == [147, 148, 149, last]
    assert (taken.issued, taken.consumed) == (151, 147)


def test_a_snapshot_holds_what_is_open_once_the_step_is_consumed() -> None:
    _, book = open_ledger()
    for position in range(4):
        book.issue(position, 1)
    book.head.next_position = 4
    for seq in (0, 1):
        book.finish(seq, 0, 0, b"")
        book.lease([seq], seq)
    book.drop(3, "stale")
    taken = decode_snapshot(take_snapshot(book, 1), "math")
    assert taken is not None
    assert (taken.version, taken.next_position, taken.issued, taken.consumed) == (1, 4, 4, 1)
    assert [group.seq for group in taken.open] == [1, 2]
    rebuild(book, taken)
    book.check(live=2)
    assert (book.head.next_version, book.head.known_from) == (1, 1)


def test_bytes_that_are_no_snapshot_are_refused() -> None:
    with pytest.raises(RolloutError, match="ledger snapshot of a cannot be read"):
        decode_snapshot(b"\xc1", "a")
    book = Ledger(LedgerFile(":memory:", "r"), "b", "o")
    with pytest.raises(RolloutError, match="is of 'b' in format 1, not of 'a'"):
        decode_snapshot(take_snapshot(book, 0), "a")

"""Moves of a group, the book that has to add up, and the folding of closed steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lora.rollout.ledger.ledger import FOLD_EVERY, KEEP_STEPS, GroupState, Ledger, LedgerError, LedgerFile
from tests.support.rollout.helpers import open_ledger


def test_a_group_goes_through_its_life_and_its_trajectories_are_forgotten() -> None:
    file, book = open_ledger()
    seq = book.issue(0, 1)
    book.run(seq, 3)
    book.requeue(seq, 1, 0)
    book.run(seq, 4)
    book.finish(seq, 4, 5, b"text")
    assert book.table.payload(seq) == b"text"
    book.lease([seq], 7)
    book.check(live=1)
    book.consume(6)
    book.check(live=1)
    book.consume(7)
    book.consume(7)
    book.check(live=0)
    [row] = book.table.rows(GroupState.CONSUMED)
    assert (row.version, row.newest, row.step, row.failed) == (4, 5, 7, 1)
    assert file.execute("SELECT COUNT(*) FROM trajectories").fetchone() == (0,)


def test_moves_that_the_diagram_does_not_show_are_refused() -> None:
    _, book = open_ledger()
    seq = book.issue(0, 1)
    with pytest.raises(LedgerError, match="is issued and cannot become leased"):
        book.lease([seq], 0)
    book.finish(seq, 0, 0, b"")
    book.lease([seq], 0)
    book.consume(0)
    with pytest.raises(LedgerError, match="issue 0 of math is not live and cannot become dropped"):
        book.drop(seq, "stale")
    with pytest.raises(LedgerError, match="issue 5 of math is not live"):
        book.run(5, 0)


def test_a_lost_group_is_noticed() -> None:
    file, book = open_ledger()
    book.issue(0, 1)
    book.issue(1, 1)
    with pytest.raises(LedgerError, match=r"does not add up: 2 issued of math, .*1 groups held"):
        book.check(live=1)
    book.check(live=2)
    file.execute("DELETE FROM groups WHERE seq = 0")
    with pytest.raises(LedgerError, match="does not add up"):
        book.check(live=2)


def test_closed_steps_are_folded_into_counts_and_the_file_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    file, book = open_ledger(path)
    sizes = []
    for step in range(4 * KEEP_STEPS):
        for position in range(4):
            seq = book.issue(position, 1)
            if position:
                book.finish(seq, step, step, b"x" * 4000)
                book.lease([seq], step)
            else:
                book.head.next_version = step
                book.drop(seq, "stale")
        book.consume(step)
        book.check(live=0)
        book.flush()
        sizes.append(path.stat().st_size)
    assert len(book.table.rows(GroupState.CONSUMED)) <= 3 * (KEEP_STEPS + FOLD_EVERY)
    assert book.head.known_from >= 3 * KEEP_STEPS - FOLD_EVERY
    assert max(sizes[2 * KEEP_STEPS :]) <= max(sizes[: 2 * KEEP_STEPS])
    file.close()
    _, again = open_ledger(path)
    assert again.counts == {GroupState.CONSUMED: 12 * KEEP_STEPS, GroupState.DROPPED: 4 * KEEP_STEPS}
    assert again.drop_reasons == {"stale": 4 * KEEP_STEPS}


def test_a_flush_writes_the_adapters_that_changed_and_all_of_them_at_once(tmp_path: Path) -> None:
    """A thousand adapters that a service has known cost a flush nothing."""
    file = LedgerFile(tmp_path / "ledger.sqlite", "r")
    ledgers = [Ledger(file, f"a{i}", "o") for i in range(1000)]
    file.flush()

    def written() -> int:
        before = file._db.total_changes
        ledgers[1].flush()
        return file._db.total_changes - before

    assert written() == 1
    ledgers[7].issue(0, 0)
    ledgers[8].head.counters.tokens = 5  # a figure alone waits for its own flush
    assert written() == 2
    head = file.read_head("a7")
    assert head is not None
    assert head.issued == 1, "its row and its head are of one transaction"
    assert written() == 1
    file.close()
    again = LedgerFile(tmp_path / "ledger.sqlite", "r")
    head = again.read_head("a8")
    assert head is not None
    assert head.counters.tokens == 5
    again.close()

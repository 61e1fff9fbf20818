"""The table of the design, row by row, as data."""

from __future__ import annotations

import pytest

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger.ledger import GroupState, Head, Ledger, LedgerFile, LedgerRow
from areal_lora.rollout.ledger.reconcile import LedgerSnapshot, apply, plan, plan_for

S = GroupState


def row(seq: int, state: GroupState, *, step: int = -1, version: int = -1, newest: int = -1) -> LedgerRow:
    return LedgerRow(
        seq=seq,
        position=seq,
        issue=1,
        stale=0,
        state=state,
        failed=0,
        resampled=0,
        version=version,
        newest=newest,
        step=step,
    )


ROWS = [
    row(0, S.CONSUMED, step=3, version=3, newest=3),
    row(1, S.LEASED, step=4, version=3, newest=4),
    row(2, S.CONSUMED, step=5, version=4, newest=4),
    row(3, S.LEASED, step=6, version=5, newest=5),
    row(4, S.LEASED, step=6, version=5, newest=6),
    row(5, S.DONE, version=5, newest=5),
    row(6, S.DONE, version=5, newest=6),
    row(7, S.RUNNING, version=5),
    row(8, S.RUNNING, version=6),
    row(9, S.ISSUED, version=6),
]


def seqs(rows: tuple[LedgerRow, ...]) -> list[int]:
    return [row.seq for row in rows]


def test_each_row_of_the_table() -> None:
    made = plan(Head(order="o", next_version=7), ROWS, 5, None)
    assert not made.rebuild
    assert seqs(made.consumed) == [1]
    assert seqs(made.again) == [3]
    assert seqs(made.reissued) == [2, 4, 6, 8]
    assert seqs(made.continuing) == [5, 7, 9]
    assert "1 groups committed late, 2 ready with the trajectories they have" in str(made)
    assert "4 rolled back and issued again" in str(made)


def snapshot(version: int, order: str = "o") -> LedgerSnapshot:
    return LedgerSnapshot(
        adapter="a", order=order, version=version, next_position=9, issued=9, consumed=9, dropped={}, open=[]
    )


@pytest.mark.parametrize(
    ("head", "version", "known", "why"),
    [
        (Head(order="o"), 5, False, "has nothing of this adapter"),
        (Head(order="o", next_version=4), 5, True, "ends before step 4"),
        (Head(order="o", next_version=99, known_from=35), 5, True, "has forgotten the groups of steps before 35"),
    ],
)
def test_a_ledger_that_does_not_know_is_rebuilt_from_the_snapshot_or_refused(
    head: Head, version: int, known: bool, why: str
) -> None:
    assert why in plan(head, [], version, snapshot(5), known=known).rebuild
    with pytest.raises(RolloutError, match=f"version 5 cannot be resumed: .*{why}.*carries no ledger snapshot"):
        plan(head, [], version, None, known=known)
    for wrong in (snapshot(4), snapshot(5, order="p")):
        with pytest.raises(RolloutError, match=r"of version .* or of other prompts"):
            plan(head, [], version, wrong, known=known)


def test_a_ledger_of_another_sampling_is_rebuilt() -> None:
    head = Head(order="o", sampled="temperature 1", next_version=7)
    made = plan(head, ROWS, 5, snapshot(5), sampled="temperature 0.7")
    assert str(made).endswith("because its groups are sampled with temperature 1, and new ones with temperature 0.7")
    assert not plan(head, ROWS, 5, snapshot(5), sampled="temperature 1").rebuild
    with pytest.raises(RolloutError, match=r"version 5 cannot be resumed: .*carries no ledger snapshot"):
        plan(head, ROWS, 5, None, sampled="temperature 0.7")


def test_a_run_without_any_checkpoint_begins_again() -> None:
    made = plan(Head(order="o", next_version=99, known_from=35), [], 0, None)
    assert made.rebuild


def test_it_is_carried_out_as_planned() -> None:
    book = Ledger(LedgerFile(":memory:", "r"), "a", "o")
    for position in range(4):
        book.issue(position, 1)
        book.finish(position, position, position, b"x")
        book.lease([position], position)
    book.head.next_version, book.known = 4, True
    book.consume(1)
    apply(book, plan_for(book, 1, None), None)
    book.check(live=3)
    # Step 0 stays consumed, step 1 was consumed and is issued again, 2 and 3 were sampled with what is undone.
    assert book.counts == {S.CONSUMED: 1, S.DROPPED: 3, S.ISSUED: 3, S.LEASED: 0, S.DONE: 0}
    assert [(r.position, r.issue) for r in book.table.rows(S.ISSUED)] == [(1, 2), (2, 2), (3, 2)]
    assert book.head.next_version == 1

from __future__ import annotations

import pytest

from areal_lora.errors import RolloutError
from areal_lora.rollout.ledger import GroupState, MemoryLedger


def test_a_group_goes_through_its_life() -> None:
    ledger = MemoryLedger()
    seq = ledger.issue("0:a", 0)
    ledger.run(seq, 3)
    ledger.requeue(seq)
    ledger.run(seq, 4)
    ledger.finish(seq)
    ledger.lease(seq, 7)
    ledger.check(live=1)
    ledger.consume(seq)
    ledger.check(live=0)
    row = ledger.rows[seq]
    assert (row.state, row.version, row.step) == (GroupState.CONSUMED, 4, 7)


def test_moves_that_the_diagram_does_not_show_are_refused() -> None:
    ledger = MemoryLedger()
    seq = ledger.issue("0:a", 0)
    with pytest.raises(RolloutError, match="cannot go from issued to done"):
        ledger.finish(seq)
    ledger.run(seq, 0)
    ledger.finish(seq)
    ledger.lease(seq, 0)
    ledger.consume(seq)
    with pytest.raises(RolloutError, match="cannot go from consumed to dropped"):
        ledger.drop(seq, "stale")


def test_nothing_is_issued_twice_unless_it_was_dropped() -> None:
    ledger = MemoryLedger()
    seq = ledger.issue("0:a", 0)
    with pytest.raises(RolloutError, match="live or consumed"):
        ledger.issue("0:a", 0)
    ledger.drop(seq, "stale")
    assert ledger.issue("0:a", 0) == 1
    assert ledger.drop_reasons() == {"stale": 1}


def test_a_lost_group_is_noticed() -> None:
    ledger = MemoryLedger()
    ledger.issue("0:a", 0)
    with pytest.raises(RolloutError, match="does not add up"):
        ledger.check(live=0)

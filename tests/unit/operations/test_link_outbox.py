"""What is sent ahead of the outcomes, over connections that begin again."""

from __future__ import annotations

from areal_lora.operations.link import AHEAD, SendWindows


def test_nothing_is_sent_before_the_trainer_expects_it() -> None:
    windows = SendWindows()
    assert windows.due("a.1") is None
    windows.completed("a.1", 3)
    assert not windows.sends("a.1", 1)
    windows.expected("a.1", 4)
    assert windows.due("a.1") == (4, AHEAD)
    windows.closed("a.1")
    assert windows.due("a.1") is None


def test_at_most_so_many_are_ahead_of_the_outcomes() -> None:
    windows = SendWindows()
    windows.expected("a.1", 1)
    assert all(windows.sends("a.1", number) for number in range(1, AHEAD + 1))
    assert windows.due("a.1") is None
    windows.completed("a.1", 2)
    assert windows.due("a.1") == (AHEAD + 1, 2)


def test_an_outcome_of_what_another_connection_sent_is_passed() -> None:
    windows = SendWindows()
    windows.expected("a.1", 1)
    windows.completed("a.1", 5)
    assert windows.due("a.1") == (6, AHEAD)
    assert not windows.sends("a.1", 5)
    windows.expected("a.1", 3)
    assert windows.due("a.1") == (3, AHEAD), "a new start counts"

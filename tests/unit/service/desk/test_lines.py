"""What is sent ahead of the outcomes, over connections that begin again."""

from __future__ import annotations

from areal_lora.service.desk.lines import AHEAD, Lines


def test_nothing_is_sent_before_the_trainer_expects_it() -> None:
    lines = Lines()
    assert lines.due("a.1") is None
    lines.heard("a.1", 3)
    assert not lines.sends("a.1", 1)
    lines.expected("a.1", 4)
    assert lines.due("a.1") == (4, AHEAD)
    lines.closed("a.1")
    assert lines.due("a.1") is None


def test_at_most_so_many_are_ahead_of_the_outcomes() -> None:
    lines = Lines()
    lines.expected("a.1", 1)
    assert all(lines.sends("a.1", number) for number in range(1, AHEAD + 1))
    assert lines.due("a.1") is None
    lines.heard("a.1", 2)
    assert lines.due("a.1") == (AHEAD + 1, 2)


def test_an_outcome_of_what_another_connection_sent_is_passed() -> None:
    lines = Lines()
    lines.expected("a.1", 1)
    lines.heard("a.1", 5)
    assert lines.due("a.1") == (6, AHEAD)
    assert not lines.sends("a.1", 5)
    lines.expected("a.1", 3)
    assert lines.due("a.1") == (3, AHEAD), "a new start counts"

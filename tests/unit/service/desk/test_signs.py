"""Which sessions are silent, on a clock of the test's own."""

from __future__ import annotations

from areal_lora.service.desk.signs import Signs


def test_silent_sessions_are_those_without_a_sign_the_longest_silent_first() -> None:
    now = [0.0]
    signs = Signs(lambda: now[0])
    for at, session in ((0.0, "b"), (1.0, "a"), (2.0, "c")):
        now[0] = at
        signs.opened(session, "acme")
    now[0] = 11.5
    assert signs.silent(10.0) == ["b", "a"]
    assert signs.heard("b", "acme")
    assert not signs.heard("a", "bolt"), "a session of another tenant"
    assert not signs.heard("d", "acme"), "one that was never opened"
    assert signs.silent(10.0) == ["a"]
    now[0] = 99.0
    signs.renew()
    assert signs.silent(10.0) == [], "nobody could give a sign while the service was stopped"
    signs.ended(["a", "d"])
    assert not signs.heard("a", "acme")

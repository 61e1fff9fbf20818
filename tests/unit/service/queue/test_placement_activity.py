"""Which sessions are silent, on a clock of the test's own."""

from __future__ import annotations

from areal_lora.service.queue.placement import Heartbeats


def test_silent_sessions_are_those_without_a_sign_the_longest_silent_first() -> None:
    now = [0.0]
    heartbeats = Heartbeats(lambda: now[0])
    for at, session in ((0.0, "b"), (1.0, "a"), (2.0, "c")):
        now[0] = at
        heartbeats.opened(session, "acme")
    now[0] = 11.5
    assert heartbeats.silent(10.0) == ["b", "a"]
    assert heartbeats.received("b", "acme")
    assert not heartbeats.received("a", "bolt"), "a session of another tenant"
    assert not heartbeats.received("d", "acme"), "one that was never opened"
    assert heartbeats.silent(10.0) == ["a"]
    now[0] = 99.0
    heartbeats.renew()
    assert heartbeats.silent(10.0) == [], "nobody could give a sign while the service was stopped"
    heartbeats.ended(["a", "d"])
    assert not heartbeats.received("a", "acme")

"""What follows from the answers of servers and ranks, as data."""

from __future__ import annotations

from dataclasses import replace

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import AdapterError, ManifestError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply, ServerEndpoint
from areal_lora.weight_sync.trainer.decisions import (
    Failure,
    Look,
    Move,
    Progress,
    Sent,
    after_attempt,
    after_look,
    check_results,
    judged,
    member_findings,
    what_failed,
)
from areal_lora.weight_sync.trainer.membership import Judgement, ServerFinding

REF, DIGEST, LAYOUT = AdapterRef(name="a", version=3), "d" * 32, "l" * 32
CONFIG = WeightSyncConfig(rejoin_s=60.0)
A, B, C = (ServerEndpoint(name=f"server-{i}", host="h", admin_port=100 + i, data_port=1, workers=1) for i in range(3))
SILENT, FULL = PublishError("timed out"), ManifestError("slot", "held by a@v1 (1 running)")


def finding(server, error=None, **facts):
    return ServerFinding(server=server, error=error, **facts)


@pytest.mark.parametrize(
    ("since", "able", "now", "watched", "look", "after"),
    [
        (None, 2, 100.0, True, Look.CONNECT, None),
        (90.0, 2, 100.0, True, Look.CONNECT, None),
        (None, 1, 100.2, True, Look.LOOK, 100.0),
        (None, 1, 101.0, True, Look.WAIT, 100.0),
        (90.0, 1, 100.2, True, Look.LOOK, 90.0),
        (40.0, 1, 100.0, True, Look.STOP, 40.0),
        (40.0, 1, 101.0, True, Look.STOP, 40.0),
        (None, 1, 100.0, False, Look.STOP, 100.0),
    ],
)
def test_too_few_servers_are_waited_for_up_to_rejoin_s_since_the_first_look(since, able, now, watched, look, after):
    progress, got = after_look(
        Progress(attempts=3, short_since=since),
        able,
        started=100.0,
        now=now,
        until=101.0,
        config=CONFIG,
        min_servers=2,
        watched=watched,
    )
    assert (got, progress) == (look, Progress(attempts=3, short_since=after))


def test_a_server_that_loads_its_model_is_waited_for_without_limit_and_then_for_rejoin_s():
    facts = {"config": CONFIG, "min_servers": 1, "watched": True}
    progress = Progress(short_since=0.0)
    for now in (61.0, 10_000.0):
        progress, look = after_look(progress, 0, started=now, now=now, until=now, loading=True, **facts)
        assert (look, progress.short_since) == (Look.WAIT, now)
    for now, after in ((10_059.0, Look.WAIT), (10_060.0, Look.STOP)):
        progress, look = after_look(progress, 0, started=now, now=now, until=now, **facts)
        assert look is after
    assert after_look(progress, 0, started=0.0, now=1.0, until=1.0, loading=True, **(facts | {"watched": False}))[
        1
    ] is (Look.STOP)


def test_a_member_is_late_when_it_was_full_for_the_whole_time():
    full, fine = finding(A, FULL), finding(B)
    progress, judgement = judged(Progress(), [full, fine], now=0.0, timeout_s=30.0)
    assert (progress.full_since, judgement.lost) == (0.0, {})
    progress, judgement = judged(progress, [full, fine], now=29.9, timeout_s=30.0)
    assert (progress.full_since, judgement.lost) == (0.0, {})
    progress, judgement = judged(progress, [full, fine], now=30.0, timeout_s=30.0)
    assert list(judgement.lost) == [A]
    progress, judgement = judged(progress, [fine], now=31.0, timeout_s=30.0)
    assert (progress.full_since, judgement.complete) == (None, True)


def test_servers_that_fail_a_second_attempt_are_lost():
    findings = [finding(A), finding(B, SILENT)]
    assert judged(Progress(), findings, now=0.0, timeout_s=30.0)[1].lost == {}
    assert list(judged(Progress(attempts=2), findings, now=0.0, timeout_s=30.0)[1].lost) == [B]


ALL = Judgement(keep=(A, B), lost={}, complete=True)
SOME = Judgement(keep=(A, B), lost={}, complete=False)
NOT_A = Judgement(keep=(B,), lost={A: "has no free adapter slot yet"}, complete=True)


@pytest.mark.parametrize(
    ("findings", "judgement", "remaining", "left_s", "move", "changes"),
    [
        ([finding(A), finding(B)], ALL, 2, 20.0, Move.FINISH, {}),
        ([finding(A), finding(B)], ALL, 2, -1.0, Move.FINISH, {}),  # in time or not, it serves
        ([finding(A), finding(B)], ALL, 1, 20.0, Move.RETRY, {"attempts": 2}),  # one did not answer the probe
        ([finding(A), finding(B, SILENT)], SOME, 2, 20.0, Move.RETRY, {"attempts": 2}),
        ([finding(A), finding(B, SILENT)], SOME, 2, 1.9, Move.STOP, {}),
        ([finding(A), finding(B, FULL)], SOME, 2, 20.0, Move.AWAIT_SLOT, {}),
        ([finding(A), finding(B, FULL)], SOME, 2, -1.0, Move.AWAIT_SLOT, {}),  # the deadline begins again
        ([finding(A, SILENT), finding(B, FULL)], SOME, 2, 20.0, Move.AWAIT_SLOT, {"attempts": 2}),
        ([finding(A, FULL), finding(B)], NOT_A, 1, 20.0, Move.AWAIT_SLOT, {"full_since": None}),
        ([finding(A, FULL), finding(B)], NOT_A, 2, 20.0, Move.FINISH, {}),
    ],
)
def test_after_an_attempt(findings, judgement, remaining, left_s, move, changes):
    before = Progress(full_since=5.0)
    progress, got = after_attempt(
        before, findings, judgement, remaining=remaining, left_s=left_s, config=CONFIG, min_servers=2
    )
    assert (got, progress) == (move, replace(before, **changes))


def sent(**facts):
    return Sent(**({"ref": REF, "layout": LAYOUT} | facts))


def test_a_broken_transfer_is_sent_again_and_what_no_attempt_repairs_is_raised():
    broken = Failure(kind="failed", message="connection closed")
    check_results(REF, LAYOUT, [sent(), sent(wire=broken)])
    with pytest.raises(AdapterError, match="no such tensor"):
        check_results(REF, LAYOUT, [sent(), sent(own=Failure.of(AdapterError("no such tensor")))])
    with pytest.raises(ManifestError):
        check_results(REF, LAYOUT, [sent(), sent(wire=Failure.of(ManifestError("alpha", "16")))])
    for other in (sent(ref=AdapterRef(name="a", version=4)), sent(layout="other")):
        with pytest.raises(PublishError, match="trainer rank 1 publishes"):
            check_results(REF, LAYOUT, [sent(), other])


def reply(ref=REF, digest=DIGEST):
    return PublishReply(ref=str(ref), digest=digest, phases={})


def faults(replies, errors=(), results=()):
    found = member_findings((A, B, C), replies, dict(errors), ref=REF, digest=DIGEST, results=results)
    return {f.server: (f.error, f.leftover) for f in found if f.error is not None}


def test_members_are_at_fault_that_failed_lied_or_were_not_sent_the_version():
    assert faults({A: reply(), B: reply(), C: reply()}) == {}
    stale = ManifestError("stale_version", "older")
    assert faults({A: reply()}, {B: SILENT, C: stale}) == {B: (SILENT, False), C: (stale, True)}
    got = faults({A: reply(), B: reply(digest="0" * 32)}, results=[sent(wire=Failure(kind="failed", message="late"))])
    error, foreign = got[B]
    assert (error.reason, foreign) == ("hash", True)
    assert "other numbers" in str(error)
    error, foreign = got[C]
    assert (str(error), foreign) == ("a@v3 was not sent: trainer rank 0: late", False)


def test_the_text_of_a_failure_names_servers_and_ranks_only_without():
    results = [sent(), sent(wire=Failure(kind="failed", message="late"))]
    assert what_failed([finding(A), finding(B, SILENT)], results) == "server-1: timed out"
    assert what_failed([finding(A)], results) == "trainer rank 1: late"

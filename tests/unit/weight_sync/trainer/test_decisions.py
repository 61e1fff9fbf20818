"""What follows from the answers of servers and ranks, as data."""

from __future__ import annotations

import msgspec
import pytest

from areal_lora.errors import AdapterError, ManifestError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply, ServerEndpoint
from areal_lora.weight_sync.trainer.decisions import (
    Failure,
    Move,
    Progress,
    Sent,
    check_results,
    member_findings,
    what_failed,
)
from areal_lora.weight_sync.trainer.membership import Judgement, ServerFinding

REF, DIGEST, LAYOUT = AdapterRef(name="a", version=3), "d" * 32, "l" * 32
A, B, C = (ServerEndpoint(name=f"server-{i}", host="h", admin_port=100 + i, data_port=1, workers=1) for i in range(3))
SILENT, FULL = PublishError("timed out"), ManifestError("slot", "held by a@v1 (1 running)")


def finding(server, error=None, **facts):
    return ServerFinding(server=server, error=error, **facts)


def test_the_time_with_too_few_servers_counts_from_the_first_look_and_not_while_one_loads_its_model():
    progress = Progress(attempts=3)
    assert progress.short_for(100.0, 100.2, loading=False) == pytest.approx(0.2)
    assert progress.short_for(101.0, 161.0, loading=False) == 61.0
    assert progress == Progress(attempts=3, short_since=100.0)
    for now in (162.0, 10_000.0):
        assert progress.short_for(now, now, loading=True) == 0.0
    assert progress.short_for(10_060.0, 10_060.0, loading=False) == 60.0


def test_a_member_is_late_when_it_was_full_for_the_whole_time():
    full, fine = finding(A, FULL), finding(B)
    progress = Progress()
    judgement = progress.judge([full, fine], now=0.0, timeout_s=30.0)
    assert (progress.full_since, judgement.lost) == (0.0, {})
    judgement = progress.judge([full, fine], now=29.9, timeout_s=30.0)
    assert (progress.full_since, judgement.lost) == (0.0, {})
    judgement = progress.judge([full, fine], now=30.0, timeout_s=30.0)
    assert list(judgement.lost) == [A]
    judgement = progress.judge([fine], now=31.0, timeout_s=30.0)
    assert (progress.full_since, judgement.complete) == (None, True)


def test_servers_that_fail_a_second_attempt_are_lost():
    findings = [finding(A), finding(B, SILENT)]
    assert Progress().judge(findings, now=0.0, timeout_s=30.0).lost == {}
    assert list(Progress(attempts=2).judge(findings, now=0.0, timeout_s=30.0).lost) == [B]


def test_a_server_that_hangs_is_lost_without_those_that_wait_for_it():
    """It acknowledges nothing, then its group does not form; further groups get nothing."""
    hung, progress = finding(B, SILENT, busy=True), Progress()
    judgement = progress.judge([finding(A), hung, finding(C)], now=0.0, timeout_s=30.0)
    assert progress.move([hung], judgement, enough=True, left_s=20.0, ping_s=2.0) is Move.RETRY
    waited, unsent = finding(A, PublishError("the group was not complete")), finding(C, PublishError("x"), unsent=True)
    for again in (hung, finding(B, SILENT)):
        told = Progress(attempts=2, broken=progress.broken).judge([waited, again, unsent], now=0.0, timeout_s=30.0)
        assert (told.keep, list(told.lost), told.complete) == ((A, C), [B], False)


def test_a_server_that_hung_before_the_first_attempt_is_lost_without_the_others():
    findings, progress = [finding(s, SILENT, busy=s is B) for s in (A, B, C)], Progress()
    judgement = progress.judge(findings, now=0.0, timeout_s=30.0)
    assert (judgement.lost, progress.broken) == ({}, {A, B, C})
    assert progress.move(findings, judgement, enough=True, left_s=20.0, ping_s=2.0) is Move.RETRY
    assert list(progress.judge(findings, now=0.0, timeout_s=30.0).lost) == [B]


def test_a_server_that_failed_alone_is_lost_when_the_others_fail_with_it():
    progress = Progress()
    for findings in ([finding(A), finding(B, SILENT), finding(C, FULL)], [finding(s, SILENT) for s in (A, B, C)]):
        judgement = progress.judge(findings, now=0.0, timeout_s=30.0)
        progress.attempts += 1
    assert list(judgement.lost) == [B]


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
    progress = Progress(full_since=5.0)
    assert progress.move(findings, judgement, enough=remaining >= 2, left_s=left_s, ping_s=2.0) is move
    assert progress == Progress(**({"full_since": 5.0} | changes))


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
    return {f.server: f.error for f in found if f.error is not None}


def test_members_are_at_fault_that_failed_lied_or_were_not_sent_the_version():
    assert faults({A: reply(), B: reply(), C: reply()}) == {}
    stale = ManifestError("stale_version", "older")
    assert faults({A: reply()}, {B: SILENT, C: stale}) == {B: SILENT, C: stale}
    got = faults({A: reply(), B: reply(digest="0" * 32)}, results=[sent(wire=Failure(kind="failed", message="late"))])
    assert got[B].reason == "hash"
    assert "other numbers" in str(got[B])
    assert str(got[C]) == "a@v3 was not sent: trainer rank 0: late"
    found = member_findings((A, B, C), {A: reply()}, {B: SILENT}, ref=REF, digest=DIGEST, results=())
    assert [f.unsent for f in found] == [False, False, True]


def test_the_text_of_a_failure_names_servers_and_ranks():
    results = [sent(), sent(wire=Failure(kind="failed", message="late"))]
    assert what_failed([finding(A), finding(B, SILENT)], results) == "server-1: timed out; trainer rank 1: late"
    assert what_failed([finding(A)], results) == "trainer rank 1: late"


def test_the_text_of_a_failure_names_silent_servers_first_and_counts_the_others():
    reset = PublishError("connection reset")
    others = [finding(msgspec.structs.replace(A, name=f"server-{n}"), reset) for n in range(9)]
    silent = ServerFinding(server=C, error=SILENT, alive=False)
    first = "server-2: timed out; server-0: connection reset; server-1: connection reset"
    assert what_failed([*others, silent], [sent(wire=Failure(kind="failed", message="late"))] * 5) == (
        f"{first} and 7 more; " + "; ".join(f"trainer rank {rank}: late" for rank in range(3)) + " and 2 more"
    )

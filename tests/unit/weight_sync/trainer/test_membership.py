"""Decisions about servers, as data; and the one thread that looks for them."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import types

import pytest

from areal_lora.errors import AdapterError, ManifestError, ParityError, PublishError
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import forget_endpoint, publish_endpoint
from areal_lora.weight_sync.messages import PingReply, ServerEndpoint
from areal_lora.weight_sync.trainer import membership as membership_module
from areal_lora.weight_sync.trainer.fleet import PINGS
from areal_lora.weight_sync.trainer.membership import (
    FIRST_REST_S,
    LONGEST_REST_S,
    MemberRoster,
    RendezvousWatch,
    ServerFinding,
    ServerWatcher,
    judge,
    rounds,
)
from tests.support.clocks import Clock, wait_until

SILENT = PublishError("timed out")
BROKEN = ManifestError("wire", "connection closed by peer")


def server(index, port=0):
    return ServerEndpoint(name=f"server-{index}", host="h", admin_port=100 + index + port, data_port=1, workers=1)


A, B, C = (server(i) for i in range(3))


class NoFleet:
    def keep(self, members):
        pass


def roster(*servers):
    return MemberRoster(NoFleet(), servers, ping_s=1.0)


def judged(*findings, retried=False, before=(), late=False):
    judgement = judge(findings, retried=retried, before=before, late=late)
    return [s.name for s in judgement.keep], [s.name for s in judgement.lost], judgement.complete


def test_all_acknowledged():
    assert judged(ServerFinding(server=A), ServerFinding(server=B)) == (["server-0", "server-1"], [], True)


def test_a_server_that_joins_at_the_retry_and_hangs_is_lost_in_place_of_the_one_that_failed_before():
    failed = [ServerFinding(server=each, error=BROKEN) for each in (A, B)]
    hangs = ServerFinding(server=C, error=BROKEN, busy=True, joining=True)
    assert judged(*failed, hangs, retried=True, before=(A,))[1] == ["server-2"]
    assert judged(*failed, ServerFinding(server=C), retried=True, before=(A,))[1] == ["server-0"]


@pytest.mark.parametrize("retried", [False, True])
def test_a_silent_server_is_lost_and_the_rest_goes_on(retried):
    silent = ServerFinding(server=B, error=SILENT, alive=False)
    assert judged(ServerFinding(server=A), silent, retried=retried) == (["server-0"], ["server-1"], True)
    waiting = ServerFinding(server=C, error=BROKEN)  # an effect, not a cause
    assert judged(ServerFinding(server=A), silent, waiting, retried=retried) == (
        ["server-0", "server-2"],
        ["server-1"],
        False,
    )


def test_servers_that_answer_get_one_more_transfer_all_together():
    findings = [ServerFinding(server=A), ServerFinding(server=B, error=BROKEN), ServerFinding(server=C, error=SILENT)]
    assert judged(*findings) == (["server-0", "server-1", "server-2"], [], False)
    assert judged(*findings, retried=True) == (["server-0"], ["server-1", "server-2"], True)


HUNG = PublishError("a join came while this server was busy, and is late by now")


@pytest.mark.parametrize(
    ("of_a", "of_b", "of_c", "before", "lost"),
    [
        ({}, {}, {}, (), "ABC"),
        ({}, {}, {}, (A, B, C), "ABC"),
        ({}, {}, {}, (B,), "B"),
        ({}, {}, {}, (A, B), "AB"),
        ({"unsent": True}, {}, {"unsent": True}, (), "B"),
        ({"unsent": True}, {}, {}, (A,), "BC"),
        ({"unsent": True}, {"unsent": True}, {"unsent": True}, (), "ABC"),
        ({}, {"busy": True}, {}, (), "B"),
        ({}, {"busy": True}, {}, (A, B), "B"),
        ({}, {"busy": True}, {}, (A,), "A"),  # B may still be in the attempt
        ({"busy": True}, {"busy": True}, {"busy": True}, (), "ABC"),
        ({"joining": True}, {"busy": True}, {}, (), "B"),
        ({"joining": True}, {}, {}, (C,), "C"),
        ({"joining": True}, {}, {}, (), "A"),
    ],
)
def test_of_servers_that_answer_and_fail_again_the_causes_are_lost(of_a, of_b, of_c, before, lost):
    findings = [
        ServerFinding(server=s, error=HUNG, **facts) for s, facts in zip((A, B, C), (of_a, of_b, of_c), strict=True)
    ]
    assert judged(*findings, before=before) == ([s.name for s in (A, B, C)], [], False), "a second transfer first"
    names = {"ABC"[i]: s.name for i, s in enumerate((A, B, C))}
    want = [names[letter] for letter in lost]
    kept = [name for name in names.values() if name not in want]
    assert judged(*findings, retried=True, before=before) == (kept, want, not kept)


def test_of_servers_that_answer_and_fail_again_newcomers_go_first():
    findings = [ServerFinding(server=A, error=BROKEN), ServerFinding(server=B, error=BROKEN, joining=True)]
    assert judged(*findings, retried=True) == (["server-0"], ["server-1"], False)


@pytest.mark.parametrize("error", [ManifestError("hash", "x"), AdapterError("sizes"), ParityError("numbers")])
def test_a_member_that_refuses_ends_the_publish_and_a_newcomer_itself(error):
    with pytest.raises(type(error)):
        judged(
            ServerFinding(server=A),
            ServerFinding(server=B, error=error),
            ServerFinding(server=C, error=SILENT, alive=False),
        )
    assert judged(ServerFinding(server=A), ServerFinding(server=B, error=error, joining=True)) == (
        ["server-0"],
        ["server-1"],
        True,
    )


FULL = ManifestError("slot", "no free adapter slot for a@v9; held by a@v3 (2 running)")


@pytest.mark.parametrize("retried", [False, True])
def test_a_server_without_a_free_slot_is_waited_for_with_all_others(retried):
    findings = [ServerFinding(server=A), ServerFinding(server=B, error=FULL)]
    assert judged(*findings, retried=retried) == (["server-0", "server-1"], [], False)
    newcomer = ServerFinding(server=C, error=FULL, joining=True)
    assert judged(newcomer, retried=retried) == (["server-2"], [], False)
    assert judged(*findings, newcomer, retried=retried) == (["server-0", "server-1"], ["server-2"], False)
    assert judged(findings[0], newcomer, retried=retried) == (["server-0"], ["server-2"], True)


def test_a_server_without_a_free_slot_is_left_behind_at_the_deadline():
    findings = [ServerFinding(server=A), ServerFinding(server=B, error=FULL)]
    assert judged(*findings, retried=True, late=True) == (["server-0"], ["server-1"], True)
    [(_, reason)] = judge(findings, retried=True, late=True).lost.items()
    assert reason.startswith("has no free adapter slot yet: ")
    assert "held by a@v3 (2 running)" in reason


def test_a_server_without_a_free_slot_is_not_lost_for_another_that_failed():
    findings = [ServerFinding(server=A, error=FULL), ServerFinding(server=B, error=BROKEN)]
    assert judged(*findings) == (["server-0", "server-1"], [], False)
    assert judged(*findings, retried=True) == (["server-0"], ["server-1"], False)


def test_the_reason_says_how_it_failed():
    lost = judge([ServerFinding(server=B, error=SILENT, alive=False)], retried=False).lost
    assert lost == {B: "does not answer: timed out"}
    lost = judge([ServerFinding(server=B, error=SILENT)], retried=True).lost
    assert lost == {B: "failed again: timed out"}


def test_a_new_life_replaces_a_member_and_a_new_name_joins():
    membership = roster(B, A)
    assert membership.members == (A, B)
    reborn = server(1, port=50)
    assert membership.with_joining([reborn, C, A]) == (A, reborn, C)
    assert membership.members == (A, B)
    membership.keep([C, reborn])
    assert membership.members == (reborn, C)


def test_members_are_in_the_order_of_their_numbers():
    assert [s.name for s in roster(server(10), server(9), server(1)).members] == ["server-1", "server-9", "server-10"]


def test_a_lost_server_rests_longer_each_time_until_it_has_served(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(membership_module, "time", types.SimpleNamespace(monotonic=clock))
    membership = roster(A, B)
    rests = []
    for _ in range(6):
        membership.exclude({B: "does not answer"})
        assert membership.members == (A,)
        began = clock.now
        while not membership.wants(B):
            clock.now += 0.5
        rests.append(clock.now - began)
        membership.keep(membership.with_joining([B]))
        assert membership.members == (A, B)
    assert rests == [FIRST_REST_S * k for k in (1, 4, 16, 64)] + [LONGEST_REST_S] * 2
    membership.served()
    membership.exclude({B: "does not answer"})
    clock.now += FIRST_REST_S
    assert membership.wants(B)
    assert membership.wants(server(1, port=50))  # another life has no past
    assert not membership.wants(A)


def test_servers_of_a_run_folder(tmp_path):
    watch = RendezvousWatch(RunFolder(tmp_path), workers=2)
    assert watch.present() == []
    publish_endpoint(RunFolder(tmp_path), "server", 3, {"data": 5, "admin": 6})
    publish_endpoint(RunFolder(tmp_path), "controller", 0, {"control": 7})
    found = ServerEndpoint(name="server-3", host="127.0.0.1", admin_port=6, data_port=5, workers=2)
    assert watch.present() == [found]
    assert found.data_url == "http://127.0.0.1:5"


def test_files_of_servers_are_read_once_for_each_session(tmp_path, monkeypatch):
    """512 files a second would be read from a folder on the network."""
    folder, read = RunFolder(tmp_path), []
    watch = RendezvousWatch(folder, workers=1)
    monkeypatch.setattr(watch, "server", lambda index: read.append(index) or RendezvousWatch.server(watch, index))
    for index in range(3):
        publish_endpoint(folder, "server", index, {"data": 5, "admin": index})
    for _ in range(3):
        assert sorted(s.admin_port for s in watch.present()) == [0, 1, 2]
    assert sorted(read) == [0, 1, 2]
    publish_endpoint(folder, "server", 1, {"data": 5, "admin": 9})
    forget_endpoint(folder, "server", 2)
    assert sorted(s.admin_port for s in watch.present()) == [0, 9]
    assert sorted(read) == [0, 1, 1, 2]
    publish_endpoint(folder, "server", 2, {"data": 5, "admin": 2})
    assert sorted(s.admin_port for s in watch.present()) == [0, 2, 9]


def test_more_members_are_no_more_pings_a_second():
    assert [rounds(n) for n in (0, 1, PINGS)] == [1.0, 1.0, 1.0]
    assert rounds(4 * PINGS) == 4.0


def test_the_watcher_names_those_that_are_wanted_and_answer_and_knows_whether_all_members_do():
    asked, seen, silent, leaving = threading.Event(), {A, B, C}, {B}, set[ServerEndpoint]()
    busy = set[ServerEndpoint]()

    class Watch:
        def present(self):
            return sorted(seen, key=lambda s: s.name)

    def ping(s):
        asked.set()
        return None if s in silent else PingReply(leaving=s in leaving, busy=s in busy)

    watcher = ServerWatcher(Watch(), roster(A), ping, period_s=0.01)
    try:
        assert asked.wait(120.0)
        wait_until(lambda: watcher.joining == (C,))
        seen.remove(C)
        wait_until(lambda: watcher.joining == ())
        assert watcher.all_answer()
        silent.add(A)
        wait_until(lambda: not watcher.all_answer())
        silent.remove(A)
        wait_until(watcher.all_answer)
        assert not watcher.leaving
        seen.add(C)
        wait_until(lambda: watcher.joining == (C,))
        busy |= {A, C}  # C hangs in a publish in which it was a member
        wait_until(lambda: watcher.joining == ())
        assert watcher.all_answer()
        busy.clear()
        wait_until(lambda: watcher.joining == (C,))
        leaving |= {A, C}
        wait_until(lambda: watcher.leaving == {A})
        wait_until(lambda: watcher.joining == ())
        silent.add(A)
        wait_until(lambda: not watcher.all_answer())
        assert watcher.leaving == {A}, "it has ended, in order"
    finally:
        watcher.close()


class Flaky:
    """A folder that raises ``errors`` one after the other, and shows ``servers`` after that."""

    def __init__(self, servers, *errors):
        self.servers, self.errors = servers, list(errors)

    def present(self):
        if self.errors:
            raise self.errors.pop(0)
        return self.servers


def test_a_file_that_was_replaced_while_it_was_read_does_not_end_the_watch():
    """On NFS that is ESTALE; a file system in trouble says EIO."""
    silent = set()
    watch = Flaky([A, C], OSError(errno.ESTALE, "Stale file handle"), OSError(errno.EIO, "Input/output error"))
    watcher = ServerWatcher(watch, roster(A), lambda s: None if s in silent else PingReply(), period_s=0.01)
    try:
        wait_until(lambda: watcher.joining == (C,))
        watch.errors = [OSError(errno.ESTALE, "Stale file handle")] * 1000
        silent.add(A)
        wait_until(lambda: not watcher.all_answer())  # members are asked for a sign of life meanwhile
    finally:
        watcher.close()


def test_a_silent_member_that_has_withdrawn_its_endpoint_has_left_and_one_that_crashed_has_not():
    seen, silent = {A, B, C}, {A, B}

    class Watch:
        def present(self):
            return sorted(seen, key=lambda s: s.name)

    def ping(s):
        return None if s in silent else PingReply()

    watcher = ServerWatcher(Watch(), roster(A, B, C), ping, period_s=0.01)
    try:
        wait_until(lambda: not watcher.all_answer())
        assert not watcher.leaving
        seen -= {A, C}  # C answers
        wait_until(lambda: watcher.leaving == {A})
        seen.add(server(1, port=50))  # another session of B
        wait_until(lambda: watcher.joining == (server(1, port=50),))
        assert watcher.leaving == {A}
    finally:
        watcher.close()


def test_a_server_that_left_is_no_loss_and_does_not_return():
    membership = roster(A, B)
    membership.release([B, C])
    assert (membership.left, membership.lost, membership.members) == ([B], {}, (A,))
    assert not membership.wants(B)
    assert not membership.wants(C)
    assert membership.wants(server(1, port=50))
    membership.release([B])
    assert membership.left == [B]


def test_a_defect_in_the_watch_ends_the_process_with_its_reason():
    code = """
import threading
from areal_lora.processes.log import setup_logging
from areal_lora.weight_sync.trainer.membership import MemberRoster, ServerWatcher
setup_logging("trainer", 0)
class Watch:
    def present(self): raise KeyError("admin")
ServerWatcher(Watch(), MemberRoster(None, [], ping_s=1.0), lambda s: True, period_s=0.01)
threading.Event().wait(120)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 1, done
    assert "thread server-watch died, so this process ends with exit code 1: KeyError: 'admin'" in done.stderr
    assert "in present" in done.stderr

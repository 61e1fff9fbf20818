"""A trainer of one rank and servers in the same process: what the ranks of a bigger one share."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import AdapterError, ManifestError, ParityError, PublishError
from areal_lora.weight_sync import messages as tp
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.server import transaction
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.clocks import seen, wait_until
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, layout_of, ref, shapes_of, share, values
from tests.support.weight_sync.memory_server import MemoryServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONG_S = 150.0


class LyingServer(MemoryServer):
    """Acknowledges what it was not sent, after version 0."""

    def _publish(self, announcement, timeout_s):
        reply = super()._publish(announcement, timeout_s)
        if announcement.manifest.ref.version == 0:
            return reply
        return tp.PublishReply(ref=reply.ref, digest="0" * 32, phases=reply.phases)


def score(model, ids):
    return [[0.0] + [-1.0 if model else -2.0] * (len(row) - 1) for row in ids]


def serve(kind=MemoryServer, name="server-0", **options):
    return kind(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, score=score, name=name, **options)


class Watch:
    """Servers that a test says are there."""

    def __init__(self, *servers):
        self.servers = [s.endpoint for s in servers]

    def present(self):
        return list(self.servers)


class Solo:
    """A publisher of one rank, and what it said became active."""

    def __init__(self, *servers, secret=SECRET, watch=None, session=0, **config):
        self.active = []
        config = WeightSyncConfig(**({"timeout_s": LONG_S, "bucket_mib": 0.001} | config))
        self.publisher = Publisher(
            run=RUN,
            config=config,
            exchange=SoloExchange(),
            secret=SECRET,
            leader=Leader(
                run=RUN,
                secret=secret,
                servers=[s.endpoint for s in servers],
                config=config,
                watch=watch,
                on_active=self.active.append,
                session=session,
            ),
        )

    def publish(self, version, logprob=-1.0, seed=None, drop=0):
        owned, aliases = share(values(version if seed is None else seed))
        owned = owned[: len(owned) - drop]
        layout = layout_of(owned, aliases)
        probe = ProbeExpectation(token_ids=[[1, 2, 3]], logprobs=[[0.0, logprob, logprob]], base=[[0.0, -2.0, -2.0]])
        return self.publisher.publish(ref(version), None, layout, pack_of(layout, 0, dict(owned)), BASE, probe)

    def refs(self):
        return [active.ref for active in self.active]

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.publisher.close()


def test_a_version_is_announced_once_it_serves_and_was_checked():
    with serve() as server, Solo(server) as solo:
        for version in range(3):  # connects by itself at the first; each joins the one before
            handle = solo.publish(version)
        report = handle.wait()
        assert handle.wait() is report
        assert solo.refs() == [ref(0), ref(1), ref(2)]
        assert solo.active[-1].servers == (server.endpoint,)
        assert server.held.resolve("a").ref == ref(2)
        assert (report.ref, report.probe_mean_abs, report.probe_max_abs, report.differs) == (ref(2), 0.0, 0.0, True)
        assert (report.attempts, report.lost) == (1, {})
        with pytest.raises(ParityError, match="above"):
            solo.publish(3, logprob=-1.5).wait()
        assert solo.refs() == [ref(0), ref(1), ref(2)]


def test_the_next_publish_raises_what_nobody_heard_of_the_one_before():
    with serve() as server, Solo(server) as solo:
        solo.publish(0, logprob=-9.0)
        with pytest.raises(ParityError):
            solo.publish(1)
        solo.publish(1).wait()


def test_an_acknowledgement_of_other_numbers_is_an_error():
    with serve(LyingServer) as server, Solo(server) as solo:
        solo.publish(0).wait()
        with pytest.raises(ManifestError, match="other numbers"):
            solo.publish(1).wait()


def test_a_version_sent_again_is_acknowledged_again_and_other_numbers_under_its_name_are_not():
    with serve() as server, Solo(server) as solo:
        solo.publish(0).wait()
        solo.publish(0).wait()
        with pytest.raises(ManifestError, match="other numbers"):
            solo.publish(0, seed=5).wait()


def test_a_version_that_serves_already_still_tells_which_servers_were_lost():
    """As after a publish of another adapter that excluded one and did not end well."""
    with serve() as server, Solo(server) as solo:
        solo.publish(0).wait()
        solo.publisher._leader.roster.lost["server-9"] = "is silent"
        report = solo.publisher.again("a").wait()
        assert (report.attempts, report.lost) == (0, {"server-9": "is silent"}), "nothing was sent"
        assert solo.active[-1] is report
        assert solo.publisher.again("a").wait().lost == {}


def test_a_new_trainer_takes_over_servers_that_hold_the_version_it_goes_on_from():
    with serve() as server:
        with Solo(server, session=1) as before:
            for version in range(3):
                before.publish(version)
        with Solo(server, session=2) as after:
            report = after.publish(2).wait()
            assert (report.ref, report.attempts, report.lost) == (ref(2), 1, {})
            assert sorted(server.held.active) == [ref(0), ref(1), ref(2)]
            assert after.publish(3).wait().servers[0] == server.endpoint


def test_versions_that_were_lost_with_their_trainer_are_replaced_under_running_requests():
    """The server continues: what is common stays, and a request ends on the numbers with which it started."""
    with serve() as server:
        with Solo(server, session=1) as before:
            for version in range(3):
                before.publish(version)
        lost = {name: value.copy() for name, value in server.tensors(ref(2)).items()}
        with server.lease("a@v2"), Solo(server, session=2) as after:
            slot = server.held.resolve("a@v2").slot
            assert after.publish(1).wait().lost == {}
            assert sorted(server.held.active) == [ref(0), ref(1)]
            after.publish(2, seed=7).wait()
            assert server.held.resolve("a").ref == ref(2)
            assert all((server.writers[0].slots[slot][name] == value).all() for name, value in lost.items())
            assert not all((server.tensors(ref(2))[name] == value).all() for name, value in lost.items())
        assert len(server.held._free) == 1, "the slot of the lost version is free once its request has ended"


def test_a_server_that_missed_a_session_keeps_nothing_of_the_ones_before():
    """It was away while the second one resumed from v1 and made another v2, from which the third one resumes."""
    with serve() as server:
        with Solo(server, session=1) as first:
            for version in range(3):
                first.publish(version)
        with Solo(server, session=3) as third:
            assert third.publish(2, seed=7).wait().lost == {}
            assert sorted(server.held.active) == [ref(2)]


def test_a_trainer_that_was_replaced_publishes_nothing_more():

    def refused():
        with serve() as server, Solo(server, session=1, timeout_s=3.0) as old, Solo(server, session=2) as new:
            with contextlib.suppress(PublishError):
                old.publish(0).wait()
            new.publish(0).wait()
            with pytest.raises((ManifestError, PublishError)) as e:
                old.publish(1).wait()
            assert sorted(server.held.active) == [ref(0)]
            return str(e.value)

    seen(refused, lambda why: "session 1 of the trainer; session 2 runs now" in why)


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_one_slow_evaluation_at_a_time_delays_no_publish(eta, caplog):
    """Each lasts for four versions, while rollouts hold all versions that may still be trained on."""
    with (
        serve(n_slots=eta + 3, keep=eta + 1) as server,
        Solo(server) as solo,
        contextlib.ExitStack() as rest,
        contextlib.ExitStack() as evaluation,
    ):
        rollouts = deque[contextlib.ExitStack]()
        for version in range(14):
            solo.publish(version).wait()
            rollouts.append(contextlib.ExitStack())
            rollouts[-1].enter_context(server.lease(f"a@v{version}"))
            rest.enter_context(rollouts[-1])
            if len(rollouts) > eta:
                rollouts.popleft().close()
            if version % 4 == 0:
                evaluation.close()
                evaluation.enter_context(server.lease(f"a@v{version}", pinned=True))
        assert "waits for" not in caplog.text
        assert ref(12) in server.held.active


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_a_publish_waits_for_a_slot_that_is_held_and_says_by_what(eta, caplog, monkeypatch):
    """Two evaluations of old versions at a time: one more than there are slots for. Sizes as the real server's."""
    with serve(n_slots=eta + 3, keep=eta + 1) as server, Solo(server) as solo:
        held = contextlib.ExitStack()
        for version in range(eta + 2):  # rollouts and evaluations, each on its own version
            solo.publish(version).wait()
            held.enter_context(server.lease(f"a@v{version}"))
        solo.publish(eta + 2).wait()
        held.enter_context(server.lease(f"a@v{eta + 2}"))
        with monkeypatch.context() as patched:
            patched.setattr(transaction, "SLOT_WAIT_S", 0.5)
            server.held.adapters = 2  # a server of several adapters does not wait for half of the time
            waiting = solo.publish(eta + 3)
            wait_until(lambda: "waits for an adapter slot: server-0: " in caplog.text)
        assert not waiting.outcome.done()
        held.close()
        report = waiting.wait()
        assert (report.ref, report.lost) == (ref(eta + 3), {})
        assert server.held.resolve("a").ref == ref(eta + 3)
        assert "a@v0 (1 running)" in caplog.text
        solo.publish(eta + 4).wait()


def test_a_server_that_has_no_slot_until_the_deadline_is_left_behind_and_catches_up():
    with serve(n_slots=2, keep=1) as full, serve(name="server-1") as roomy, contextlib.ExitStack() as held:
        watch = Watch(full, roomy)
        with Solo(full, roomy, watch=watch) as solo:
            for version in range(2):
                solo.publish(version).wait()
                held.enter_context(full.lease(f"a@v{version}"))

        def left_behind():
            with Solo(full, roomy, watch=watch, timeout_s=3.0) as solo, contextlib.suppress(PublishError):
                report = solo.publish(2).wait()
                return report.servers == (roomy.endpoint,) and "has no free adapter slot" in report.lost["server-0"]

        seen(left_behind, bool)
        held.close()
        with Solo(roomy, watch=watch) as solo:
            solo.publish(2).wait()
            wait_until(solo.publisher.changed)
            assert set(solo.publish(3).wait().servers) == {full.endpoint, roomy.endpoint}


def test_a_run_whose_only_server_has_no_slot_until_the_deadline_goes_on_when_it_has():
    def went_on():
        with serve(n_slots=2, keep=1) as server, contextlib.ExitStack() as held:
            with Solo(server) as solo:
                for version in range(2):
                    solo.publish(version).wait()
                    held.enter_context(server.lease(f"a@v{version}"))
            watched = Solo(server, watch=Watch(server), timeout_s=4.0)
            with watched as solo, contextlib.suppress(PublishError):
                threading.Timer(6.0, held.close).start()
                report = solo.publish(2).wait()
                return report.servers == (server.endpoint,) and server.held.resolve("a").ref == ref(2)

    seen(went_on, bool)


def test_a_wrong_secret_fails_the_publish_by_name():
    with serve() as server, Solo(server, secret="guess") as solo:
        began = time.monotonic()
        with pytest.raises(PublishError, match=r"server-0 .*is not of this run"):
            solo.publish(0).wait()
        assert time.monotonic() - began < LONG_S / 2


def test_an_adapter_the_server_does_not_bind_is_an_error_before_anything_is_sent():
    with serve() as server, Solo(server) as solo:
        with pytest.raises(AdapterError, match="servers expect"):
            solo.publish(0, drop=2).wait()
        assert server.writers[0].touched == set()
        solo.publish(0).wait()


def test_an_error_of_packing_reaches_join_and_one_of_the_code_its_caller():
    with serve() as server, Solo(server) as solo:
        owned, aliases = share(values(0))
        layout = layout_of(owned, aliases)
        good = pack_of(layout, 0, dict(owned))

        def broken(error):
            def pack(flat):
                for done in good(flat):
                    yield done
                    if done == 3:
                        raise error

            return pack

        began = time.monotonic()
        handle = solo.publisher.publish(ref(0), None, layout, broken(AdapterError("no such tensor")), BASE, None)
        with pytest.raises(AdapterError, match="no such tensor"):
            handle.wait()
        with pytest.raises(ZeroDivisionError):
            solo.publisher.publish(ref(0), None, layout, broken(ZeroDivisionError()), BASE, None)
        with pytest.raises(PublishError, match="ZeroDivision"):
            solo.publish(0)  # the one before is joined first
        assert time.monotonic() - began < LONG_S / 3  # no rank waits for a deadline
        solo.publish(0).wait()


def test_servers_hear_of_a_version_before_it_is_packed():
    heard = threading.Event()

    class Listening(MemoryServer):
        def _publish(self, announcement, timeout_s):
            heard.set()
            return super()._publish(announcement, timeout_s)

    with serve(Listening) as server, Solo(server) as solo:
        solo.publish(0).wait()
        heard.clear()
        owned, aliases = share(values(1))
        layout = layout_of(owned, aliases)

        def pack(flat):
            assert heard.wait(LONG_S)
            yield from pack_of(layout, 0, dict(owned))(flat)

        solo.publisher.publish(ref(1), None, layout, pack, BASE, None).wait()

"""Nothing of a publish is done after its time: not by servers, and no rank waits for less or more than the others."""

from __future__ import annotations

import threading
import time

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import ArealLoraError, PublishError
from areal_lora.weight_sync import messages as tp
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer import publish_job as job_module
from areal_lora.weight_sync.trainer.decisions import PublishReport
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.clocks import seen, wait_until
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync import SOCKETS
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, layout_of, ref, shapes_of, share, values
from tests.support.weight_sync.memory_server import MemoryServer
from tests.support.weight_sync.thread_exchange import ThreadExchange

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LONG_S = 150.0
BUCKET_MIB = 0.001


def score(model, ids):
    return [[0.0] + [-1.0 if model else -2.0] * (len(row) - 1) for row in ids]


def serve(kind=MemoryServer, **options):
    return kind(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, score=score, **options)


class Ranks:
    """Trainer ranks as threads; the first is the only source."""

    def __init__(self, *servers, world=1, backend="gloo", **config):
        self.config = WeightSyncConfig(**({"bucket_mib": BUCKET_MIB} | config))
        exchanges = ThreadExchange.world(world) if world > 1 else [SoloExchange()]
        self.publishers = [
            Publisher(
                run=RUN,
                config=self.config,
                exchange=exchange,
                backend=backend,
                secret=SECRET,
                leader=None
                if exchange.rank
                else Leader(run=RUN, secret=SECRET, servers=[s.endpoint for s in servers], config=self.config),
            )
            for exchange in exchanges
        ]

    def publish(self, version, apart_s=0.0, last=-1):
        """Each rank ``apart_s`` seconds after the one before, rank ``last`` at the end."""
        owned, aliases = share(values(version))
        layout = layout_of(owned, aliases)
        probe = ProbeExpectation(token_ids=[[1, 2, 3]], logprobs=[[0.0, -1.0, -1.0]], base=[[0.0, -2.0, -2.0]])
        jobs = {}
        for rank, publisher in sorted(enumerate(self.publishers), key=lambda each: each[0] == last):
            time.sleep(apart_s if jobs else 0.0)
            jobs[rank] = publisher.publish(ref(version), None, layout, pack_of(layout, rank, dict(owned)), BASE, probe)
        return [jobs[rank] for rank in range(len(jobs))]

    def outcomes(self, version, **options):
        """(report or error, seconds) of each rank."""
        began = time.monotonic()
        got = [None] * len(self.publishers)

        def join(rank, handle):
            try:
                answer = handle.wait()
            except ArealLoraError as e:
                answer = e
            got[rank] = answer, time.monotonic() - began

        threads = [threading.Thread(target=join, args=x) for x in enumerate(self.publish(version, **options))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(LONG_S)
        return got

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for publisher in self.publishers:
            publisher.close()


class Late:
    """Holds up the writing of the last bucket of a version until it is released: all bytes have arrived by then."""

    def __init__(self, server, last):
        self.n, self.last = 0, last
        self.reached, self.released = threading.Event(), threading.Event()
        server.writers[0].on_write = self

    def __call__(self):
        self.n += 1
        if self.n == self.last:
            self.reached.set()
            assert self.released.wait(LONG_S)


def buckets_of(server, backend):
    """How many buckets a version has."""
    counted = []
    server.writers[0].on_write = lambda: counted.append(1)
    with Ranks(server, backend=backend, timeout_s=LONG_S) as ranks:
        assert isinstance(ranks.outcomes(0)[0][0], PublishReport)
    return len(counted)


@pytest.mark.parametrize("backend", ["gloo", SOCKETS])
def test_a_version_is_not_activated_after_the_trainer_has_given_it_up(monkeypatch, backend):
    with serve() as server:
        last = buckets_of(server, backend)
        monkeypatch.setattr(WeightSyncConfig, "form_s", 0.8)  # else a second transfer waits for the first

        def given_up():
            late = Late(server, last)
            with Ranks(server, backend=backend, timeout_s=2.0) as ranks:
                ((answer, _),) = ranks.outcomes(1)
                assert isinstance(answer, PublishError), answer
                late.released.set()
                wait_until(lambda: not server.busy)
                assert sorted(server.held.active) == [ref(0)], "the server serves a version that was given up"
            return late.reached.is_set()

        seen(given_up, bool)
        server.writers[0].on_write = None
        monkeypatch.undo()
        with Ranks(server, backend=backend, timeout_s=LONG_S) as ranks:
            assert isinstance(ranks.outcomes(1)[0][0], PublishReport), "it may come again"


def test_a_request_whose_time_has_passed_in_the_queue_is_not_looked_at(monkeypatch):
    looked, inside = [], []

    class Busy(MemoryServer):
        def handle(self, *request):
            inside.append(request)
            try:
                return super().handle(*request)
            finally:
                inside.remove(request)

        def _publish(self, announcement, *rest):
            looked.append(announcement.manifest.ref)
            return super()._publish(announcement, *rest)

    with serve(Busy) as server:
        with Ranks(server, timeout_s=LONG_S) as ranks:
            assert isinstance(ranks.outcomes(0)[0][0], PublishReport)
        monkeypatch.setattr(WeightSyncConfig, "form_s", 0.5)  # no second attempt once the server is free
        with Ranks(server, timeout_s=2.0) as ranks:
            server._one_publish.acquire()  # by another request
            ((answer, _),) = ranks.outcomes(1)
            assert isinstance(answer, PublishError), answer
            wait_until(lambda: not inside)
            server._one_publish.release()
            assert looked == [ref(0)]


def test_no_rank_gives_up_while_another_one_has_not_started_the_publish(monkeypatch):
    """Ranks come to the beginning of a publish at different times; its time counts from the last one's."""
    monkeypatch.setattr(job_module, "SLACK_S", 0.3)

    def outcomes():
        with serve() as server, Ranks(server, world=2, timeout_s=1.0) as ranks:
            return [answer for v in range(2) for answer, _ in ranks.outcomes(v, apart_s=2.0, last=v)]

    seen(outcomes, lambda answers: all(isinstance(answer, PublishReport) for answer in answers))


class Hanging(MemoryServer):
    """Does not answer requests to ``path`` any more, but others."""

    path, over = "", threading.Event()

    def handle(self, method, path, header, body):
        if path == self.path:
            self.over.wait(LONG_S)
        return super().handle(method, path, header, body)


@pytest.mark.parametrize("path", [tp.PUBLISH_PATH, tp.JOIN_PATH, tp.SCORE_PATH, tp.MODULES_PATH, tp.PING_PATH])
def test_rank_0_ends_within_the_budget_of_a_publish_and_the_others_hear_from_it(monkeypatch, path):
    monkeypatch.setattr(job_module, "SLACK_S", 0.5)
    monkeypatch.setattr(WeightSyncConfig, "form_s", 0.8)
    monkeypatch.setattr(Hanging, "over", threading.Event())

    def outcomes():
        with serve(Hanging) as server, Ranks(server, world=2, timeout_s=2.0) as ranks:
            if path in (tp.PUBLISH_PATH, tp.SCORE_PATH):  # also one that is found out in the middle of a run
                ranks.outcomes(0)
            server.path = path
            return ranks.config.publish_s + 0.5, ranks.outcomes(1)

    def in_time(found):
        """Every rank has the same reason, none stopped waiting before."""
        limit_s, ((first, first_s), (other, other_s)) = found
        assert isinstance(first, PublishError)
        return str(other) == str(first) and "gone or late" not in str(first) and max(first_s, other_s) < limit_s

    seen(outcomes, in_time)
    Hanging.over.set()


def test_packing_that_does_not_end_in_time_ends_the_publish():
    def reason():
        with serve() as server, Ranks(server, timeout_s=3.0) as ranks:
            owned, aliases = share(values(0))
            layout, [publisher] = layout_of(owned, aliases), ranks.publishers

            def pack(flat):
                for done in pack_of(layout, 0, dict(owned))(flat):
                    yield done
                    if done == 3:
                        wait_until(publisher._lanes["a"].previous.outcome.done)

            handle = publisher.publish(ref(0), None, layout, pack, BASE, None)
            assert handle.outcome.done(), "it ended while the tensors were still being packed"
            with pytest.raises(PublishError) as e:
                handle.wait()
            assert sorted(server.held.active) == []
            return str(e.value)

    seen(reason, lambda why: "not packed in time at trainer rank 0" in why)  # the only server may miss a ping

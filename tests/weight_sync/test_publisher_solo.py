"""A trainer of one rank and a server in the same process: what the ranks of a bigger one share."""

from __future__ import annotations

import time

import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import ManifestError, ParityError, PublishError
from areal_lora.weight_sync import transport as tp
from areal_lora.weight_sync.exchange import SoloExchange
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.publisher import Publisher
from areal_lora.weight_sync.testing import MemoryServer

from .helpers import BASE, RUN, SECRET, ref, shapes_of, share, spec, values

pytestmark = pytest.mark.slow


class LyingServer(MemoryServer):
    """Acknowledges what it was not sent."""

    def _publish(self, manifest):
        reply = super()._publish(manifest)
        return tp.PublishReply(ref=reply.ref, digest="0" * 32, phases=reply.phases)


def score(model, ids):
    return [[0.0] + [-1.0 if model else -2.0] * (len(row) - 1) for row in ids]


def serve(kind=MemoryServer):
    return kind(run=RUN, secret=SECRET, base_digest=BASE, shapes=shapes_of, score=score)


def publisher_of(server, active=None, *, secret=SECRET, rank=0, sources=(0,), deadline_s=5.0):
    return Publisher(
        run=RUN, sources=sources, rank=rank, servers=[server.endpoint], secret=secret, exchange=SoloExchange(),
        config=WeightSyncConfig(deadline_s=deadline_s), on_active=None if active is None else active.append,
    )


def publish(publisher, version, logprob=-1.0):
    probe = ProbeExpectation(token_ids=[[1, 2, 3]], logprobs=[[0.0, logprob, logprob]], b_nonzero=True)
    owned, aliases = share(values(version))
    return publisher.publish(ref(version), None, spec(), owned, aliases, BASE, probe)


def test_a_version_is_announced_once_it_serves_and_was_checked():
    active = []
    with serve() as server:
        publisher = publisher_of(server, active)
        for version in range(3):  # connects by itself at the first
            publish(publisher, version)
        report = publisher._previous.join()
        assert active == [ref(0), ref(1), ref(2)]
        assert server.slots.newest("a") == ref(2)
        assert (report.ref, report.probe_mean_abs, report.probe_max_abs) == (ref(2), 0.0, 0.0)
        with pytest.raises(ParityError, match="above"):
            publish(publisher, 3, logprob=-1.5).join()
        assert active == [ref(0), ref(1), ref(2)]
        publisher.close()


def test_the_next_publish_raises_what_nobody_heard_of_the_one_before():
    with serve() as server:
        publisher = publisher_of(server)
        publish(publisher, 0, logprob=-9.0)
        with pytest.raises(ParityError):
            publish(publisher, 1)
        publish(publisher, 1).join()
        publisher.close()


def test_an_acknowledgement_of_other_numbers_is_an_error():
    with serve(LyingServer) as server:
        publisher = publisher_of(server)
        with pytest.raises(PublishError, match="other numbers"):
            publish(publisher, 0).join()
        publisher.close()


def test_a_wrong_secret_fails_the_connection_by_name():
    with serve() as server:
        publisher = publisher_of(server, secret="guess", deadline_s=1.5)
        began = time.monotonic()
        with pytest.raises(PublishError, match="401"):
            publisher.connect()
        assert time.monotonic() - began < 5.0


def test_tensors_of_a_rank_that_is_no_source_are_an_error():
    with serve() as server:
        publisher = publisher_of(server, rank=0, sources=())
        publisher._connected = True
        with pytest.raises(PublishError, match="not among the sources"):
            publish(publisher, 0)


def test_a_manifest_without_all_tensors_is_refused_by_the_server_not_the_trainer():
    with serve() as server:
        publisher = publisher_of(server)
        owned, aliases = share(values(0))
        with pytest.raises(ManifestError, match="missing_tensor"):
            publisher.publish(ref(0), None, spec(), owned[:-1], aliases, BASE, None).join()
        publish(publisher, 0).join()
        publisher.close()

"""Two trainer ranks publish to two servers (one and two workers): five real processes, real gloo."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from areal_lora.weight_sync.digests import manifest_digest

from . import processes as ps
from .helpers import packed, share

pytestmark = pytest.mark.slow
DEADLINE_S = 3.0


class Cluster:
    def __init__(self) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            self.port = s.getsockname()[1]
            self.store = dist.TCPStore(
                "127.0.0.1", self.port, 3, True, timedelta(seconds=60), wait_for_workers=False,
                master_listen_fd=s.detach(),
            )
        self.trainers = [ps.start(ps.train, rank, 2, self.port) for rank in range(2)]
        self.servers = [ps.start(ps.serve, workers, DEADLINE_S) for workers in (1, 2)]
        self.endpoints = [s.answer() for s in self.servers]
        self.version = -1

    def all(self, *command):
        """Every trainer rank's (kind, answer, seconds), which must agree in kind."""
        for t in self.trainers:
            t.pipe.send(command)
        answers = [t.answer() for t in self.trainers]
        assert len({a[0] for a in answers}) == 1, answers
        return answers

    def open(self, sources, servers=None, deadline_s=DEADLINE_S):
        return self.all("open", sources, servers or self.endpoints, deadline_s)

    def publish(self, version, seed, fault=""):
        return self.all("publish", version, seed, fault)

    def next(self, seed):
        self.version += 1
        answers = self.publish(self.version, seed)
        assert answers[0][0] == "ok", answers
        return answers[0][1]

    def assert_served(self, version, seed):
        want = ps.truth(version, seed)
        for server, workers in zip(self.servers, (1, 2), strict=True):
            for worker in range(workers):
                got = server.ask("tensors", version, worker)
                assert got.keys() == want.keys()
                for name, tensor in want.items():
                    scaled = tensor.numpy() * np.float32(2.0 if ".lora_B." in name else 1.0)
                    np.testing.assert_array_equal(got[name].view(np.uint32), scaled.view(np.uint32), err_msg=name)

    def stop(self):
        for child in [*self.trainers, *self.servers]:
            if child.process.is_alive():
                os.kill(child.process.pid, signal.SIGCONT)
                child.process.terminate()
        for child in [*self.trainers, *self.servers]:
            child.process.join(10)


@pytest.fixture(scope="module")
def cluster():
    c = Cluster()
    try:
        for t in c.trainers:
            t.pipe.poll(0)
        assert c.open((0, 1))[0][0] == "ok"
        yield c
    finally:
        c.stop()


def test_versions_arrive_bit_for_bit_from_both_sources_in_many_buckets(cluster):
    for seed in range(4):
        report = cluster.next(seed)
        cluster.assert_served(cluster.version, seed)
        assert report.nbytes > 20 * 2 * 0.0002 * 2**20  # many buckets from each source
        assert report.probe_mean_abs == 0.0
        single = packed(*share(ps.truth(cluster.version, seed)))[1]
        assert report.digest == manifest_digest(single) == report.acks[1].digest
        for phase in ("pack", "manifest", "send", "wire", "verify", "write", "commit", "ack", "probe"):
            assert report.phases[phase] >= 0.0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("flipped bit", "hash"), ("NaN", "non_finite"), ("missing layer", "missing_tensor"), ("wrong alpha", "alpha"),
        ("owned twice", "duplicate"),
    ],
)
def test_a_broken_version_is_refused_everywhere_and_the_next_one_arrives(cluster, fault, reason):
    cluster.next(7)
    writes = [s.ask("writes") for s in cluster.servers]
    kind, (why, text), _ = cluster.publish(cluster.version + 1, 8, fault)[0]
    assert (kind, why) == ("ManifestError", reason), text
    assert [s.ask("refs")[-1] for s in cluster.servers] == [f"a@v{cluster.version}"] * 2
    cluster.assert_served(cluster.version, 7)  # the old version keeps serving
    assert [s.ask("writes") for s in cluster.servers] == writes
    cluster.next(9)
    cluster.assert_served(cluster.version, 9)


def test_a_replay_is_refused(cluster):
    cluster.next(1)
    kind, (why, _), _ = cluster.publish(cluster.version, 1)[0]
    assert (kind, why) == ("ManifestError", "duplicate")
    kind, (why, _), _ = cluster.publish(cluster.version - 1, 1)[0]
    assert (kind, why) in (("ManifestError", "stale_version"), ("ManifestError", "duplicate"))


def test_another_set_of_sources_can_connect_to_the_same_servers(cluster):
    assert cluster.open((1,))[0][0] == "ok"
    report = cluster.next(11)
    cluster.assert_served(cluster.version, 11)
    assert report.digest == manifest_digest(packed(*share(ps.truth(cluster.version, 11)))[1])
    assert cluster.open((0, 1))[0][0] == "ok"


def test_a_hung_server_fails_the_publish_in_time_and_the_next_one_connects_anew(cluster):
    pid = cluster.servers[1].process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        cluster.version += 1
        answers = cluster.publish(cluster.version, 3)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answers[0][0] == "PublishError", answers
    assert str(cluster.endpoints[1]) in answers[0][1][1]
    assert max(a[2] for a in answers) < DEADLINE_S + 8.0
    time.sleep(1.0)
    cluster.next(4)
    cluster.assert_served(cluster.version, 4)


def test_a_server_that_drops_the_adapter_is_a_parity_error(cluster):
    cluster.servers[0].ask("forget")
    cluster.version += 1
    kind, (_, text), _ = cluster.publish(cluster.version, 5)[0]
    assert kind == "ParityError", text
    assert "does not reach the sampler" in text
    assert str(cluster.endpoints[0]) in text


def test_a_killed_server_fails_the_publish_in_time_on_every_rank(cluster):
    """Last: this server does not come back."""
    os.kill(cluster.servers[1].process.pid, signal.SIGKILL)
    cluster.servers[1].process.join(5)
    cluster.version += 1
    answers = cluster.publish(cluster.version, 3)
    assert answers[0][0] == "PublishError", answers
    assert max(a[2] for a in answers) < DEADLINE_S + 8.0
    answers = cluster.open((0, 1), deadline_s=1.5)
    assert answers[0][0] == "PublishError", answers
    assert max(a[2] for a in answers) < DEADLINE_S + 8.0

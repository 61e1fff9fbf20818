"""Two trainer ranks publish to three servers (one, two and one workers): real processes, real gloo."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from areal_lora.config.models import WeightSyncConfig
from areal_lora.weight_sync.manifest import adapter_digest
from tests.support.clocks import seen, wait_until
from tests.support.weight_sync import SOCKETS, processes as ps
from tests.support.weight_sync.helpers import packed, share

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
DEADLINE_S = 150.0
SLACK_S = 3.0
STALLED_S = 5.0  # of a publish that waits for a server that was stopped
CONFIG = WeightSyncConfig(timeout_s=DEADLINE_S)
WORKERS = {"server-0": 1, "server-1": 2, "server-2": 1}


class Cluster:
    def __init__(self, folder) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            s.listen()
            self.port = s.getsockname()[1]
            self.store = dist.TCPStore(
                "127.0.0.1",
                self.port,
                3,
                True,
                timedelta(seconds=150),
                wait_for_workers=False,
                master_listen_fd=s.detach(),
            )
        path = str(folder / "servers")
        self.watch = ps.Watch(path)
        self.trainers = [ps.start(ps.train, rank, 2, self.port, path) for rank in range(2)]
        self.servers = {name: self.start(name) for name in WORKERS}
        self.endpoints = {name: s.answer() for name, s in self.servers.items()}
        self.watch.show(self.endpoints.values())
        self.version, self.backend = -1, ""

    def start(self, name):
        return ps.start(ps.serve, name, WORKERS[name])

    def restart(self, name):
        self.servers[name].process.kill()
        self.servers[name].process.join(120)
        self.servers[name] = self.start(name)
        self.endpoints[name] = self.servers[name].answer()
        self.watch.show(self.endpoints.values())

    def begin(self, *command):
        for t in self.trainers:
            t.pipe.send(command)

    def end(self):
        """Every trainer rank's (kind, answer, seconds), which must agree in kind."""
        answers = [t.answer() for t in self.trainers]
        assert len({a[0] for a in answers}) == 1, answers
        return answers

    def all(self, *command):
        self.begin(*command)
        return self.end()

    def open(self, sources=(0, 1), backend="gloo", places=(), **config):
        config = {"timeout_s": DEADLINE_S} | config
        answers = self.all("open", sources, list(self.endpoints.values()), config, backend, places)
        assert answers[0][0] == "ok", answers
        self.backend = backend

    def publish(self, version, seed, fault=""):
        return self.all("publish", version, seed, fault)

    def next(self, seed):
        """Publish the next version; both ranks hold the same report."""
        self.version += 1
        answers = self.publish(self.version, seed)
        assert answers[0][0] == "ok", answers
        assert answers[0][1] == answers[1][1]
        return answers[0][1]

    def see(self, what):
        wait_until(lambda: self.trainers[0].ask(what)[1], what=what, pause_s=0.1)

    def assert_served(self, version, seed, servers=tuple(WORKERS)):
        want = ps.truth(version, seed)
        for name in servers:
            for worker in range(WORKERS[name]):
                got = self.servers[name].ask("tensors", version, worker)
                assert got.keys() == want.keys()
                for tensor_name, tensor in want.items():
                    scaled = tensor.numpy() * np.float32(2.0 if ".lora_B." in tensor_name else 1.0)
                    np.testing.assert_array_equal(got[tensor_name].view(np.uint32), scaled.view(np.uint32))

    def stop(self):
        children = [*self.trainers, *self.servers.values()]
        for child in children:
            if child.process.is_alive():
                os.kill(child.process.pid, signal.SIGCONT)
                child.process.kill()
        for child in children:
            child.process.join(120)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    c = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        c.open()
        yield c
    finally:
        c.stop()


@pytest.fixture(params=[pytest.param("gloo", id="memory"), pytest.param(SOCKETS, id="sockets")])
def each_way(request, cluster):
    """Servers read the trainer's memory, or get the bytes as between machines."""
    if cluster.backend != request.param:
        cluster.open(backend=request.param)
    yield request.param
    assert [a[1] for a in cluster.all("reads")] == [request.param == "gloo"] * 2
    if request.param != "gloo":
        cluster.open()


def names(report):
    return [server.name for server in report.servers]


def single_rank_digest(version, seed):
    shard, _ = packed(*share(ps.truth(version, seed)))
    return adapter_digest(shard.layout, [shard.sum])


def test_versions_arrive_bit_for_bit_from_both_sources_in_many_buckets(cluster, each_way):
    for seed in range(4):
        report = cluster.next(seed)
        cluster.assert_served(cluster.version, seed)
        assert report.nbytes > 2 * 8 * ps.BUCKET_MIB * 2**20  # many buckets from each source
        assert (report.probe_mean_abs, report.differs) == (0.0, cluster.version > 0)
        assert report.digest == single_rank_digest(cluster.version, seed)
        assert (report.attempts, report.lost, names(report)) == (1, {}, list(WORKERS))
        for phase in ("pack", "send", "wire", "verify", "write", "commit", "ack", "probe"):
            assert report.phases[phase] >= 0.0


@pytest.mark.parametrize("backend", ["gloo", SOCKETS])
def test_ranks_of_one_node_send_through_the_groups_of_the_first(cluster, backend):
    cluster.open(backend=backend, places=(0, 0))
    for seed in range(2):
        report = cluster.next(seed)
        cluster.assert_served(cluster.version, seed)
        assert report.digest == single_rank_digest(cluster.version, seed)
        assert [a[1] for a in cluster.all("has_group")] == [True, False]
    got, (why, _), _ = cluster.publish(cluster.version + 1, 8, "NaN")[0]
    assert (got, why) == ("ManifestError", "non_finite"), "of the rank that has no group"
    cluster.version += 1
    cluster.next(9)
    cluster.assert_served(cluster.version, 9)
    cluster.open()


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("flipped bit", "ManifestError", "hash"),
        ("NaN", "ManifestError", "non_finite"),
        ("missing layer", "AdapterError", ""),
        ("wrong alpha", "ManifestError", "alpha"),
        ("another version", "PublishError", ""),
    ],
)
def test_a_broken_version_is_refused_everywhere_and_the_next_one_arrives(cluster, each_way, fault, kind, reason):
    cluster.next(7)
    got, (why, text), seconds = cluster.publish(cluster.version + 1, 8, fault)[0]
    assert (got, why) == (kind, reason), text
    assert seconds < CONFIG.attempt_s + SLACK_S
    if fault != "another version":  # which of the two the servers were told is not what counts
        assert [s.ask("refs")[-1] for s in cluster.servers.values()] == [f"a@v{cluster.version}"] * 3
    cluster.assert_served(cluster.version, 7)  # the old version keeps serving
    cluster.version += 1
    cluster.next(9)
    cluster.assert_served(cluster.version, 9)


def test_only_rank_0_waits_for_a_controller_that_is_away(cluster):
    def waits():
        """Of both ranks, seconds."""
        cluster.version += 1
        (kind, _, waited_s), (other, _, other_s) = cluster.publish(cluster.version, 3)
        assert (kind, other) == ("ok", "ok")
        assert waited_s >= 2.0
        return other_s

    cluster.begin("announce_slowly", 2.0)
    cluster.end()
    seen(waits, lambda other_s: other_s < 2.0)
    cluster.begin("announce_slowly", 0.0)
    cluster.end()
    cluster.assert_served(cluster.version, 3)


def test_an_older_version_is_refused(cluster):
    cluster.next(1)
    kind, (why, _), _ = cluster.publish(cluster.version - 1, 2)[0]
    assert kind == "ManifestError"
    assert why in ("stale_version", "duplicate", "hash")


def test_another_set_of_sources_can_connect_to_the_same_servers(cluster):
    cluster.open(sources=(1,))
    report = cluster.next(11)
    cluster.assert_served(cluster.version, 11)
    assert report.digest == single_rank_digest(cluster.version, 11)
    cluster.open()
    cluster.next(12)


def during_a_transfer(cluster, name, number, seed):
    """Publish the next version and send ``name`` a signal in the middle of its transfer: (report, seconds)."""
    server = cluster.servers[name]
    server.ask("pause")
    cluster.version += 1
    cluster.begin("publish", cluster.version, seed, "")
    assert server.answer() == "midway"
    os.kill(server.process.pid, number)
    answers = cluster.end()
    assert answers[0][0] == "ok", answers
    return answers[0][1], max(a[2] for a in answers)


def test_a_server_killed_during_a_transfer_is_given_up_and_comes_back_when_it_was_started_again(cluster, each_way):
    cluster.next(20)
    report, seconds = during_a_transfer(cluster, "server-1", signal.SIGKILL, 21)
    print(f"\nkilled during a transfer: {seconds:.2f} s, {report.attempts} attempts, lost {report.lost}")
    assert seconds < CONFIG.attempt_s  # a dead one is noticed before any deadline
    assert (names(report), list(report.lost)) == (["server-0", "server-2"], ["server-1"])
    cluster.assert_served(cluster.version, 21, ["server-0", "server-2"])
    active = cluster.trainers[0].ask("last_active")[1]
    assert ([s.name for s in active.servers], [*active.lost]) == (["server-0", "server-2"], ["server-1"])
    report = cluster.next(22)
    assert (report.attempts, names(report)) == (1, ["server-0", "server-2"])

    cluster.restart("server-1")
    cluster.see("newcomers")
    report = cluster.next(23)
    assert (report.attempts, names(report), report.lost) == (1, list(WORKERS), {})
    assert report.probe_mean_abs == 0.0
    cluster.assert_served(cluster.version, 23)


def test_a_server_stopped_during_a_transfer_is_given_up_and_comes_back_when_it_continues(cluster, each_way):
    others = ["server-0", "server-1"]

    def given_up():
        """Whether no other server missed a deadline, for which the transfer takes its whole time."""
        cluster.open(backend=each_way, timeout_s=STALLED_S)
        report, seconds = during_a_transfer(cluster, "server-2", signal.SIGSTOP, 31)
        try:
            print(f"\nstopped during a transfer: {seconds:.2f} s, {report.attempts} attempts, lost {report.lost}")
            cluster.assert_served(cluster.version, 31, names(report))
            after = cluster.next(32)
        finally:
            os.kill(cluster.servers["server-2"].process.pid, signal.SIGCONT)
        served = [names(report), names(after)]
        while served[-1] != list(WORKERS):  # it ends its old transfer, which disturbs no other
            served.append(names(cluster.next(33)))
            if served[-1] != list(WORKERS):
                cluster.see("newcomers")
        alone = served[:2] == [others] * 2 and list(report.lost) == ["server-2"] and after.attempts == 1
        return alone and seconds < STALLED_S + SLACK_S and all(set(others) <= {*each} for each in served)

    seen(given_up, bool)
    cluster.assert_served(cluster.version, 33)
    cluster.open(backend=each_way)
    cluster.next(39)


def test_a_server_started_again_between_publishes_is_asked_under_its_new_address(cluster):
    before = cluster.endpoints["server-0"]
    cluster.restart("server-0")
    cluster.see("newcomers")
    report = cluster.next(41)
    assert report.attempts == 1
    assert names(report) == list(WORKERS)
    assert cluster.endpoints["server-0"] != before
    assert cluster.endpoints["server-0"] in report.servers
    active = cluster.trainers[0].ask("last_active")[1]
    assert [*active.lost] == ["server-0"]
    cluster.assert_served(cluster.version, 41)


def test_a_newcomer_gets_the_newest_version_without_a_new_one(cluster):
    cluster.restart("server-1")
    cluster.see("newcomers")
    answers = cluster.all("again")
    assert answers[0][0] == "ok", answers
    report = answers[0][1]
    assert (report.ref.version, names(report)) == (cluster.version, list(WORKERS))
    cluster.assert_served(cluster.version, 41)
    cluster.next(42)
    cluster.assert_served(cluster.version, 42)


def test_a_server_that_falls_silent_between_publishes_is_given_up_without_a_new_version(cluster):
    cluster.open(timeout_s=20.0)  # two pings of a tenth of it
    cluster.next(42)
    os.kill(cluster.servers["server-2"].process.pid, signal.SIGSTOP)
    try:
        cluster.see("changed")
        began = time.monotonic()
        report = cluster.all("again")[0][1]
        assert (report.attempts, names(report)) == (1, ["server-0", "server-1"])
        assert time.monotonic() - began < CONFIG.attempt_s  # not sent to it at all
    finally:
        os.kill(cluster.servers["server-2"].process.pid, signal.SIGCONT)
    cluster.see("newcomers")
    assert names(cluster.all("again")[0][1]) == list(WORKERS)
    cluster.assert_served(cluster.version, 42)
    cluster.open()


def test_a_server_that_drops_the_adapter_is_a_parity_error(cluster):
    cluster.servers["server-0"].ask("forget")
    cluster.version += 1
    kind, (_, text), _ = cluster.publish(cluster.version, 5)[0]
    assert kind == "ParityError", text
    assert "does not reach the sampler" in text
    assert str(cluster.endpoints["server-0"]) in text
    cluster.restart("server-0")
    cluster.see("newcomers")
    cluster.next(43)


def test_with_all_servers_gone_a_publish_waits_for_one_and_fails_by_name_without(cluster):
    for server in cluster.servers.values():
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.join(120)
    cluster.version += 1
    cluster.begin("publish", cluster.version, 51, "")
    time.sleep(1.0)
    cluster.restart("server-2")
    answers = cluster.end()
    assert answers[0][0] == "ok", answers
    assert names(answers[0][1]) == ["server-2"]
    assert set(answers[0][1].lost) == set(WORKERS)
    cluster.assert_served(cluster.version, 51, ["server-2"])

    cluster.open(timeout_s=1.0)
    os.kill(cluster.servers["server-2"].process.pid, signal.SIGKILL)
    kind, (_, text), seconds = cluster.publish(cluster.version + 1, 52)[0]
    assert kind == "PublishError"
    assert "0 rollout servers remain" in text
    assert all(name in text for name in WORKERS)
    assert seconds < DEADLINE_S / 2

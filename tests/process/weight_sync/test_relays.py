"""Servers relay versions to others: groups of three hosts (addresses of loopback), real processes, real gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from areal_lora.config.models import WeightSyncConfig
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.probe import ProbeExpectation
from areal_lora.weight_sync.trainer import publisher
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.clocks import wait_until
from tests.support.solo_exchange import SoloExchange
from tests.support.weight_sync import SOCKETS
from tests.support.weight_sync import processes as ps
from tests.support.weight_sync.adapters import pack_of
from tests.support.weight_sync.helpers import BASE, RUN, SECRET, ref

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORKERS = {0: 1, 1: 2, 2: 1, 3: 2, 4: 1, 5: 1}


class Tree:
    """A trainer in this process; server n is at 127.0.0.(n + 2). Counts which servers are told to connect."""

    def __init__(self) -> None:
        self.servers: dict[str, ps.Child] = {}
        self.endpoints: dict[str, ServerEndpoint] = {}
        for n in range(3):
            self.start(n)
        config = WeightSyncConfig(timeout_s=150.0, bucket_mib=ps.BUCKET_MIB)
        leader = Leader(
            run=RUN,
            secret=SECRET,
            servers=self.endpoints.values(),
            config=config,
            tolerance=1e-6,
            watch=self,  # type: ignore[arg-type]
            most=3,
        )
        self.leader, join, self.told = leader, leader._fleet.join, list[set[str]]()

        def counted(*args):
            posts = join(*args)
            self.told.append({server.name for server in posts})
            return posts

        leader._fleet.join = counted  # type: ignore[method-assign]
        self.publisher = Publisher(
            run=RUN, config=config, exchange=SoloExchange(), secret=SECRET, leader=leader, backend=SOCKETS
        )
        self.version = -1

    def present(self) -> list[ServerEndpoint]:
        return list(self.endpoints.values())

    def start(self, n: int) -> None:
        name = f"server-{n}"
        self.servers[name] = ps.start(ps.serve, name, WORKERS[n], f"127.0.0.{n + 2}")
        self.endpoints[name] = self.servers[name].answer()

    def joins(self, *numbers: int) -> None:
        for n in numbers:
            self.start(n)
        wait_until(lambda: {s.name for s in self.leader.roster.available()} == set(names(*numbers)), what="joining")

    def begin(self):
        self.version += 1
        self.told.clear()
        full = ps.truth(self.version, self.version)
        scaled = {n: t.numpy() * np.float32(2.0) for n, t in full.items() if ".lora_B." in n}
        logprobs, base = ps.scores(scaled, ps.PROBE_IDS), ps.scores(None, ps.PROBE_IDS)
        probe = ProbeExpectation(token_ids=ps.PROBE_IDS, base=base, logprobs=logprobs)
        layout = ps.layout_of(full, (0,))
        parent = ref(self.version - 1) if self.version else None
        return self.publisher.publish(ref(self.version), parent, layout, pack_of(layout, 0, full), BASE, probe)

    def end(self, job):
        """The report; every server that it names has every tensor bit for bit."""
        report, want = job.wait(), ps.truth(self.version, self.version)
        for server in report.servers:
            for worker in range(server.workers):
                got = self.servers[server.name].ask("tensors", self.version, worker)
                assert got.keys() == want.keys()
                for name, tensor in want.items():
                    scaled = tensor.numpy() * np.float32(2.0 if ".lora_B." in name else 1.0)
                    np.testing.assert_array_equal(got[name].view(np.uint32), scaled.view(np.uint32))
        return report

    def killed(self, name: str):
        """The report of a version in the middle of whose transfer ``name`` is killed."""
        server = self.servers[name]
        server.pipe.send(("pause",))
        job = self.begin()
        assert server.answer() == "midway"
        os.kill(server.process.pid, signal.SIGKILL)
        report = self.end(job)
        del self.endpoints[name]
        assert list(report.lost) == [name]
        assert {s.name for s in report.servers} == set(self.endpoints)
        return report

    def groups(self) -> list[tuple[str | None, list[str]]]:
        return [(g.relay.name if g.relay else None, [s.name for s in g.members]) for g in self.leader._tree]

    def close(self) -> None:
        self.publisher.close()
        for server in self.servers.values():
            server.process.kill()
            server.process.join(120)


@pytest.fixture(scope="module")
def tree() -> Iterator[Tree]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publisher, "RELAYED_BYTES", 256)
        made = Tree()
        try:
            yield made
        finally:
            made.close()


def names(*numbers: int) -> list[str]:
    return [f"server-{n}" for n in numbers]


def test_three_hosts_are_one_group_until_there_are_more(tree: Tree) -> None:
    tree.end(tree.begin())
    assert tree.groups() == [(None, names(0, 1, 2))]
    tree.joins(3, 4)
    assert tree.end(tree.begin()).joined == names(3, 4)
    assert tree.groups() == [(None, names(0, 1, 2)), ("server-2", names(3, 4))]
    assert tree.told == [set(names(0, 1, 2, 3, 4))]


def test_relayed_versions_arrive_bit_for_bit(tree: Tree) -> None:
    for _ in range(3):
        report = tree.end(tree.begin())
        assert (report.attempts, report.lost, [s.name for s in report.servers]) == (1, {}, names(0, 1, 2, 3, 4))
        assert (report.probe_mean_abs, report.differs) == (0.0, True)
    assert tree.told == [], "the groups stay"


def test_a_server_that_joins_touches_one_group(tree: Tree) -> None:
    tree.joins(5)
    report = tree.end(tree.begin())
    assert (report.attempts, report.joined) == (1, ["server-5"])
    assert tree.groups()[2:] == [("server-1", names(5))]
    assert tree.told == [set(names(1, 5))]


def test_a_server_that_dies_below_a_relay_costs_its_group_an_attempt(tree: Tree) -> None:
    report = tree.killed("server-4")
    assert report.attempts == 2
    assert tree.groups() == [(None, names(0, 1, 2)), ("server-2", names(3)), ("server-1", names(5))]
    assert tree.told == [set(names(2, 3))]
    assert tree.end(tree.begin()).attempts == 1


def test_a_relay_without_servers_ends_relaying(tree: Tree) -> None:
    assert tree.killed("server-5").attempts == 1, "the others serve the version"
    assert tree.end(tree.begin()).attempts == 1
    assert tree.told == [set(names(1))]
    tree.joins(5)
    assert tree.end(tree.begin()).joined == ["server-5"]
    assert tree.told == [set(names(2, 3, 5))], "where there is room"


def test_a_relay_that_dies_loses_no_version(tree: Tree) -> None:
    report = tree.killed("server-2")
    assert report.attempts == 2
    assert tree.groups() == [(None, names(0, 1)), ("server-1", names(3, 5))]
    assert tree.end(tree.begin()).attempts == 1

"""Many adapters on one base, published in turn: groups, layouts, slots, errors and lives of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from areal_lora.config.models import WeightSyncConfig
from areal_lora.errors import AdapterError, ManifestError, PublishError, RefusalReason, UnknownVersionError
from areal_lora.types import AdapterRef, AdapterSpec
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.trainer.publish_job import PublishJob
from tests.support.clocks import wait_until
from tests.support.sizes import size
from tests.support.weight_sync import processes as ps
from tests.support.weight_sync.many import (
    Adapters,
    CountingServer,
    counted_formations,
    layout,
    made,
    numbers,
    train_many,
)
from tests.support.weight_sync.thread_exchange import ThreadExchange

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_33_adapters_of_mixed_targets_need_a_formation_per_source_and_are_never_refused() -> None:
    """Attention alone, which has one source rank, experts alone and both, which have two; N + 2 slots."""
    n, rounds = 33, 3
    with socket.socket() as s, CountingServer(n_slots=n + 2, adapters=n) as server:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        wait = timedelta(seconds=150)
        store = dist.TCPStore("127.0.0.1", port, 2, True, wait, wait_for_workers=False, master_listen_fd=s.detach())
        ranks = [ps.start(train_many, rank, port, server.endpoint, n, rounds) for rank in range(2)]
        for rank in ranks:
            attempts, formations = rank.answer(280.0)
            assert (attempts, formations) == ([1] * n * rounds, 2)
        assert (server.versions, server.joins, server.refused) == (99, 2, [])
        for i in range(n):
            server.assert_serves(made(i), rounds - 1)
        assert {len(layout(made(i), 2).shards) for i in range(n)} == {1, 2}, "some adapters have no part on rank 1"
        assert len({layout(made(i), 2).digest for i in range(n)}) == 18, "adapters of one structure share a layout"
        for rank in ranks:
            rank.process.join(120)
        del store


def test_only_ranks_that_own_tensors_of_an_adapter_have_groups() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(CountingServer(n_slots=4, adapters=2))
        world = ThreadExchange.world(2)
        ranks = [stack.enter_context(Adapters(server.endpoint, exchange=rank, ranks=2)) for rank in world]
        [receiver] = server._receivers

        def publish(spec: AdapterSpec, version: int) -> set[int]:
            """The sources that the server's worker has groups with afterwards."""
            handles = [rank.publish(spec, version) for rank in ranks]
            assert all(handle.wait().attempts == 1 for handle in handles)
            server.assert_serves(spec, version)
            return set(receiver._links.above)

        attention, both = made(0), made(2)
        assert publish(attention, 0) == {0}
        assert ranks[1].publisher._group is None
        assert publish(both, 0) == {0, 1}
        assert publish(attention, 1) == {0, 1}
        assert server.joins == 2, "once for each set of sources; publishes in turn need no third"


@pytest.fixture
def pair() -> Iterator[tuple[CountingServer, Adapters]]:
    """Two adapters and four slots."""
    with CountingServer(n_slots=4, adapters=2) as server, Adapters(server.endpoint) as adapters:
        yield server, adapters


def test_a_layout_that_a_server_no_longer_holds_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    with CountingServer(n_slots=4, adapters=2, layouts=1) as server, Adapters(server.endpoint) as adapters:
        for version in range(3):
            for i in range(2):
                report = adapters.publish(made(i), version).wait()
                assert report.attempts == (2 if version and i == 0 else 1), (
                    "a0 finds the layout of a1, and all join anew"
                )
                assert report.lost == {}
                server.assert_serves(made(i), version)
    assert set(server.refused) == {RefusalReason.UNKNOWN_LAYOUT}


def test_one_adapters_failure_leaves_the_publishes_of_the_other_as_they_are(
    pair: tuple[CountingServer, Adapters],
) -> None:
    server, adapters = pair
    bad, good = made(0), made(2)
    poison = numbers(bad, 1)
    next(iter(poison.values()))[0, 0] = float("nan")

    def raises(_: object) -> Iterator[int]:
        raise AdapterError("this adapter cannot be packed")
        yield 0

    with counted_formations() as formed:
        for spec in (bad, good):
            adapters.publish(spec, 0).wait()
        for version in range(1, 3):
            broken, fine = adapters.publish(bad, 1, poison), adapters.publish(good, version)
            assert (fine.wait().attempts, fine.wait().lost) == (1, {})
            with pytest.raises(ManifestError) as e:
                broken.wait()
            assert e.value.reason == RefusalReason.NON_FINITE
            server.assert_serves(bad, 0)
            server.assert_serves(good, version)
        old = adapters.publish(bad, 0, numbers(bad, 7))  # other numbers under a version that serves
        fine = adapters.publish(good, 3)
        assert fine.wait().attempts == 1
        with pytest.raises(ManifestError):
            old.wait()
        assert len(formed) == 1, "no member was out of step"
        laid, ref = layout(bad), AdapterRef(name=bad.name, version=1)
        torn = adapters.publisher.publish(ref, None, laid, raises, "base-digest", None)
        fine = adapters.publish(good, 4)
        assert fine.wait().lost == {}
        with pytest.raises(AdapterError, match="cannot be packed"):
            torn.wait()
        assert len(formed) == 2, "half a version went over the wire"
        adapters.publish(bad, 1).wait()
        server.assert_serves(bad, 1)


def test_a_publish_that_waits_for_a_slot_lets_others_go_ahead_and_says_what_it_waits_for(
    pair: tuple[CountingServer, Adapters],
) -> None:
    server, adapters = pair
    greedy, other = made(0), made(1)
    with contextlib.ExitStack() as held, counted_formations() as formed:
        for spec in (greedy, other):
            adapters.publish(spec, 0).wait()
        for version in range(2):
            held.enter_context(server.lease(f"a0@v{version}"))
            handle = adapters.publish(greedy, version + 1)
            if version == 0:
                handle.wait()
        for version in range(1, 4):  # the last slot is for who holds fewer
            assert adapters.publish(other, version).wait().lost == {}
            server.assert_serves(other, version)
        assert not handle.outcome.done()
        ref, why = adapters.waits[-1]
        assert ref == AdapterRef(name="a0", version=2)
        assert "a0@v0 (1 running)" in why
        held.close()
        report = handle.wait()
        assert report.phases["slot"] > 0
        assert adapters.waits[-1] == (ref, "")
        server.assert_serves(greedy, 2)
        assert len(formed) == 1


def test_a_rank_that_is_late_lets_the_same_publish_go_ahead() -> None:
    """Rank 0 alone knows that the other adapter waits; rank 1 begins that publish later."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(CountingServer(n_slots=4, adapters=2))
        world = ThreadExchange.world(2)
        ranks = [stack.enter_context(Adapters(server.endpoint, exchange=rank, ranks=2)) for rank in world]
        greedy, other = made(2), made(5)  # both ranks own a part of them

        def publish(spec: AdapterSpec, version: int, late_s: float = 0.0) -> list[PublishJob]:
            handles = [ranks[0].publish(spec, version)]
            time.sleep(late_s)
            return [*handles, ranks[1].publish(spec, version)]

        def served(handles: list[PublishJob]) -> None:
            first, second = [handle.wait() for handle in handles]
            assert first == second

        for spec in (greedy, other):
            served(publish(spec, 0))
        with server.lease("a2@v0"):
            served(publish(greedy, 1))
            with server.lease("a2@v1"):
                waiting = publish(greedy, 2)
                wait_until(lambda: bool(ranks[0].waits))
                for version in range(1, 3):
                    served(publish(other, version, late_s=0.5))
                    server.assert_serves(other, version)
                assert not waiting[0].outcome.done()
        served(waiting)
        server.assert_serves(greedy, 2)
        assert server.joins == 1


def test_a_publish_without_a_slot_until_its_deadline_is_an_error_of_that_adapter(
    pair: tuple[CountingServer, Adapters], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightSyncConfig, "slot_s", 1.0)
    server, adapters = pair
    with contextlib.ExitStack() as held:
        greedy, other = made(0), made(1)
        for spec in (greedy, other):
            adapters.publish(spec, 0).wait()
        held.enter_context(server.lease("a0@v0"))
        adapters.publish(greedy, 1).wait()
        held.enter_context(server.lease("a0@v1"))
        began, full = time.monotonic(), adapters.publish(greedy, 2)
        with pytest.raises(ManifestError, match=r"no slot within 1 s.* a0@v0 \(1 running\)") as e:
            full.wait()
        assert e.value.reason == RefusalReason.SLOT
        assert time.monotonic() - began >= 1.0
        adapters.publish(other, 1).wait()
        held.close()
        adapters.publish(greedy, 2).wait()
        assert server.joins == 1


def test_a_dropped_adapter_waits_for_no_slot(pair: tuple[CountingServer, Adapters]) -> None:
    server, adapters = pair
    spec = made(0)
    for i in range(2):
        adapters.publish(made(i), 0).wait()
    with server.lease("a0@v0"):
        adapters.publish(spec, 1).wait()
        with server.lease("a0@v1"):
            handle = adapters.publish(spec, 2)
            wait_until(lambda: bool(adapters.waits))
            adapters.publisher.drop("a0")
            with pytest.raises(PublishError, match="dropped"):
                handle.wait()
            adapters.publish(spec, 0).wait()  # the name begins anew, beside the requests of its former bearer
            with pytest.raises(UnknownVersionError):
                server.held.resolve("a0@v1")
            server.assert_serves(spec, 0)


class Watch:
    def __init__(self, *servers: ServerEndpoint) -> None:
        self.servers = list(servers)

    def present(self) -> list[ServerEndpoint]:
        return list(self.servers)


def test_a_server_that_joins_late_gets_the_current_version_of_every_adapter() -> None:
    n = 4
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(CountingServer(n_slots=n + 2, adapters=n))
        watch = Watch(first.endpoint)
        adapters = stack.enter_context(Adapters(first.endpoint, watch=watch))
        for i in range(n):
            for version in range(1 + i):
                adapters.publish(made(i), version).wait()
        assert not adapters.publisher.changed()
        late = stack.enter_context(CountingServer(n_slots=n + 2, adapters=n, name="server-1"))
        watch.servers.append(late.endpoint)
        wait_until(adapters.publisher.changed)
        adapters.publish(made(0), 1).wait()  # a step of one adapter meets it first
        assert "a1" not in late.held.incarnations
        assert adapters.publisher.changed(), "three adapters are missing there"
        sent = first.versions
        for i in range(n):
            adapters.publisher.again(f"a{i}").wait()
        assert not adapters.publisher.changed()
        assert first.versions - sent == n - 1, "what all serve is not sent again"
        for i in range(n):
            late.assert_serves(made(i), max(i, 1))


def test_the_shard_of_a_dropped_adapter_is_freed_without_another_publish(pair: tuple[CountingServer, Adapters]) -> None:
    _, adapters = pair
    adapters.publish(made(0), 0).wait()
    shard = weakref.ref(adapters.publisher._lanes["a0"].shard)
    adapters.publisher.drop("a0")
    wait_until(lambda: shard() is None)


def resident_kib() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


CYCLES = size(300, 1000)


def test_adapters_come_and_go_and_leave_nothing() -> None:
    """Server and trainer in one process: its memory, descriptors and threads, and the rows of both."""
    with CountingServer(n_slots=4, adapters=2) as server, Adapters(server.endpoint) as adapters:
        adapters.publish(made(1), 0).wait()

        def cycle(k: int) -> None:
            spec = made(0)
            adapters.publish(spec, 0, numbers(spec, k)).wait()
            got = server.tensors(AdapterRef(name="a0", version=0))
            want = numbers(spec, k)
            assert all(torch.equal(torch.from_numpy(got[n]), t * (2.0 if "_B." in n else 1.0)) for n, t in want.items())
            adapters.publisher.drop("a0")

        def counts() -> tuple[int, int]:
            return len(os.listdir("/proc/self/fd")), threading.active_count()

        for k in range(30):
            cycle(k)
        gc.collect()  # what earlier tests left
        before, memory = counts(), resident_kib()
        for k in range(CYCLES):
            cycle(k)
        wait_until(lambda: "a0" not in server.held.incarnations)  # servers are not waited for
        more = [now - then for now, then in zip(counts(), before, strict=True)]
        # On a busy machine a drop overlaps the next publish: one connection and thread more, whatever the cycles.
        assert max(more) < 8, f"descriptors, threads: {more} more after {CYCLES} adapters"
        grown = resident_kib() - memory
        assert grown < 8 * max(CYCLES, 500), f"{grown} KiB more after {CYCLES} adapters"
        rows = (server.held._residents, server.held.incarnations, adapters.publisher._lanes)
        assert [len(row) for row in rows] == [1, 1, 1]
        assert (len(server.held._free), server.joins) == (3, 1)

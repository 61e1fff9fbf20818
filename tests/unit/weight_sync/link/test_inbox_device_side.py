"""Broadcasts through a device: what is queued in which order, and who waits for a library that takes its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from areal_lora.distributed.store import CurveStore
from areal_lora.errors import PublishError
from areal_lora.weight_sync.link import backends, broadcast_groups
from areal_lora.weight_sync.link.backends import Backend, GroupSeat
from areal_lora.weight_sync.link.broadcast_groups import CPU, BroadcastGroup, GroupListener, join_group
from areal_lora.weight_sync.messages import SourceEndpoint
from tests.support.weight_sync.recorded_lane import RecordedLane

ENDPOINT = SourceEndpoint(source=0, host="127.0.0.1", port=1, world=2, token="t", bucket_bytes=64, backend="recorder")
LONG_S = 120.0  # far more than any of these tests takes


class Library:
    """A process group of a device: it records its calls, and ``first`` runs inside the first broadcast."""

    def __init__(self, calls: list[str], first: Callable[[], object] = lambda: None) -> None:
        self.calls, self._first = calls, first
        self.sent: list[torch.Tensor] = []
        self.waited: list[timedelta] = []
        self.aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> SimpleNamespace:
        first, self._first = self._first, lambda: None
        first()
        self.calls.append("broadcast")
        self.sent.append(tensors[0])
        return SimpleNamespace(wait=self._wait, is_completed=lambda: True)

    def _wait(self, timeout: timedelta) -> None:
        self.calls.append("wait")
        self.waited.append(timeout)

    def abort(self) -> None:
        self.aborted.set()


@contextmanager
def member(rank: int, library: Library, calls: list[str]) -> Iterator[BroadcastGroup]:
    backend = Backend(library, RecordedLane(calls, CPU), timed_from_issue=True)
    group = BroadcastGroup(ENDPOINT, rank, backend, CPU, leave=lambda: None)
    try:
        yield group
    finally:
        group.close()


def test_a_source_copies_before_the_broadcast_and_touches_its_buffer_until_the_end_only() -> None:
    calls: list[str] = []
    library = Library(calls)
    with member(0, library, calls) as group:
        flat = torch.arange(5, dtype=torch.uint8)
        group.start(flat, time.monotonic() + LONG_S).wait()
        assert calls == ["copy", "queue", "broadcast", "queue", "wait", "synchronize"]
        assert torch.equal(library.sent[0], flat)
        assert library.sent[0].data_ptr() != flat.data_ptr()


def test_a_receiver_has_the_bytes_on_the_host_once_its_own_stream_has_ended() -> None:
    calls: list[str] = []
    library = Library(calls)
    with member(1, library, calls) as group:
        flat = torch.zeros(5, dtype=torch.uint8)
        transfer = group.start(flat, time.monotonic() + LONG_S)
        while not transfer.done():
            time.sleep(0.001)
        library.sent[0].copy_(torch.arange(5, dtype=torch.uint8))
        transfer.wait()
        assert calls == ["queue", "broadcast", "queue", "wait", "copy", "synchronize"]
        assert flat.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_the_device_is_sent_and_received_in_place(rank: int) -> None:
    calls: list[str] = []
    library, flat = Library(calls), torch.arange(9, dtype=torch.uint8)
    backend = Backend(library, RecordedLane(calls, CPU, [flat]), timed_from_issue=True)
    with closing(BroadcastGroup(ENDPOINT, rank, backend, CPU, leave=lambda: None)) as group:
        group.start(flat[2:6], time.monotonic() + LONG_S).wait()
    assert calls == ["queue", "broadcast", "queue", "wait", "synchronize"]
    assert library.sent[0].data_ptr() == flat[2:].data_ptr()


def test_memory_of_the_device_goes_through_the_host_where_the_library_sends_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    library, flat = Library(calls), torch.arange(9, dtype=torch.uint8)
    monkeypatch.setattr(broadcast_groups, "lane_of", lambda device: RecordedLane(calls, device, [flat]))
    with closing(BroadcastGroup(ENDPOINT, 0, Backend(library, None), CPU, leave=lambda: None)) as group:
        group.start(flat[2:6], time.monotonic() + LONG_S).wait()
    assert calls == ["copy", "synchronize", "broadcast", "wait"]
    assert library.sent[0].tolist() == [2, 3, 4, 5]


def test_a_library_that_does_not_return_makes_nobody_wait_but_who_asks_for_the_bytes() -> None:
    calls: list[str] = []
    goes_on = threading.Event()
    library = Library(calls, lambda: goes_on.wait(LONG_S))
    with member(0, library, calls) as group:
        began = time.monotonic()
        transfers = [group.start(torch.zeros(n, dtype=torch.uint8), began + LONG_S) for n in (1, 2, 3)]
        late = group.start(torch.zeros(4, dtype=torch.uint8), began + 0.2)
        assert "broadcast" not in calls
        assert not any(transfer.done() for transfer in transfers)
        with pytest.raises(PublishError, match="did not start it in time"):
            late.wait()
        goes_on.set()
        for transfer in transfers:
            transfer.wait()
        while not late.done():
            time.sleep(0.001)
        assert time.monotonic() - began < LONG_S / 2, "a start or a wait took the library's time"
    assert [sent.numel() for sent in library.sent] == [1, 2, 3, 4], "in order"


def test_a_wait_ends_at_the_deadline_though_the_library_took_long_to_issue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library counts from the issue. What it spent before is no more there to be waited."""
    calls: list[str] = []
    clock = SimpleNamespace(now=100.0)
    for module in (broadcast_groups, backends):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def form_a_communicator() -> None:
        clock.now += 3.0

    library = Library(calls, form_a_communicator)
    with member(1, library, calls) as group:
        transfer = group.start(torch.zeros(4, dtype=torch.uint8), clock.now + 5.0)
        while not transfer.done():
            time.sleep(0.001)
        clock.now += 1.0  # a late wait: it has 1 s, and the library counts the second that has passed
        transfer.wait()
    assert [waited.total_seconds() for waited in library.waited] == [2.0]


def test_a_communicator_that_does_not_form_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third member died after it had joined the store: the others are inside the library, which knows no deadline.

    Member 0's library ends the call when it is told to abort; member 1's never does.
    """
    made: dict[int, Library] = {}
    end = threading.Event()

    def lazy(seat: GroupSeat) -> Backend:
        library = made[seat.rank] = Library([])
        library._first = lambda: (library.aborted if seat.rank == 0 else end).wait(LONG_S)
        return Backend(library, RecordedLane(library.calls, CPU), timed_from_issue=True)

    monkeypatch.setitem(backends._BACKENDS, "lazy", lazy)
    secret, timeout_s = "ab" * 32, 5.0
    listener = GroupListener(
        source=0,
        bind="127.0.0.1",
        receivers=["a", "b"],
        bucket_bytes=64,
        backend="lazy",
        timeout_s=timeout_s,
        secret=secret,
    )
    began = time.monotonic()
    with closing(CurveStore("127.0.0.1", listener.endpoint.port, secret, LONG_S)) as third:
        dist.PrefixStore(listener.endpoint.token, third).set(broadcast_groups.MEMBER.format(2), "")
    with ThreadPoolExecutor(2) as pool:
        joins = [
            pool.submit(listener.accept),
            pool.submit(join_group, listener.endpoint, 1, "127.0.0.1", timeout_s, secret),
        ]
        for join in joins:
            with pytest.raises(PublishError, match="did not start it in time"):
                join.result(LONG_S / 2)
    assert time.monotonic() - began < LONG_S / 2
    assert [made[rank].aborted.is_set() for rank in (0, 1)] == [True, True]
    deadline = time.monotonic() + LONG_S / 2
    while "broadcast" not in made[0].calls:
        assert time.monotonic() < deadline, "the abort has not ended the call"
        time.sleep(0.01)
    assert "broadcast" not in made[1].calls
    end.set()

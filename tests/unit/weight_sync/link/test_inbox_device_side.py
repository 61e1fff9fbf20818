"""Broadcasts through a device: what is queued in which order, and who waits for a library that takes its time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
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
from areal_lora.weight_sync.server.reception import GroupLinks
from tests.support.weight_sync.recorded_lane import RecordedLane

ENDPOINT = SourceEndpoint(source=0, host="127.0.0.1", port=1, world=2, token="t", bucket_bytes=64, backend="recorder")
LONG_S = 120.0  # far more than any of these tests takes


class Library:
    """A process group of a device: it records its calls, and ``first`` runs inside the first broadcast."""

    def __init__(self, calls: list[str], first: Callable[[], object] = lambda: None) -> None:
        self.calls, self._first = calls, first
        self.sent: list[torch.Tensor] = []
        self.ended: Callable[[], bool] = lambda: True
        self.failure: Exception | None = None
        self.aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> SimpleNamespace:
        first, self._first = self._first, lambda: None
        first()
        self.calls.append("broadcast")
        self.sent.append(tensors[0])
        return SimpleNamespace(is_completed=lambda: self.ended(), exception=lambda: self.failure)

    def abort(self) -> None:
        self.aborted.set()


class HostLibrary(Library):
    """One that sends from the host: a wait for its works blocks."""

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> SimpleNamespace:
        super().broadcast(tensors, options)
        return SimpleNamespace(wait=lambda timeout: self.calls.append("wait"))


@contextmanager
def member(rank: int, library: Library, calls: list[str]) -> Iterator[BroadcastGroup]:
    backend = Backend(library, RecordedLane(calls, CPU))
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
        assert calls == ["copy", "queue", "broadcast", "synchronize"]
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
        assert calls == ["queue", "broadcast", "copy", "synchronize"]
        assert flat.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_the_device_is_sent_and_received_in_place(rank: int) -> None:
    calls: list[str] = []
    library, flat = Library(calls), torch.arange(9, dtype=torch.uint8)
    backend = Backend(library, RecordedLane(calls, CPU, [flat]))
    with closing(BroadcastGroup(ENDPOINT, rank, backend, CPU, leave=lambda: None)) as group:
        group.start(flat[2:6], time.monotonic() + LONG_S).wait()
    assert calls == ["queue", "broadcast", "synchronize"]
    assert library.sent[0].data_ptr() == flat[2:].data_ptr()


def test_memory_of_the_device_goes_through_the_host_where_the_library_sends_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    library, flat = HostLibrary(calls), torch.arange(9, dtype=torch.uint8)
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


class Slept:
    """Time that passes only while the code under test sleeps."""

    def __init__(self) -> None:
        self.now, self.naps = 100.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Slept:
    made = Slept()
    monkeypatch.setattr(broadcast_groups, "time", made)
    return made


def test_a_wait_ends_at_the_deadline_though_the_library_took_long_to_issue(slept: Slept) -> None:
    library = Library([], lambda: slept.sleep(3.0))
    library.ended = lambda: False
    with member(1, library, library.calls) as group:
        deadline = slept.now + 5.0
        transfer = group.start(torch.zeros(4, dtype=torch.uint8), deadline)
        while "broadcast" not in library.calls:
            time.sleep(0.001)
        with pytest.raises(PublishError, match="has not ended in time"):
            transfer.wait()
        assert slept.now == pytest.approx(deadline)


@pytest.mark.parametrize("lasts_s", [0.0, 2e-4, 1e-3, 0.02, 4.0])
def test_an_end_is_noticed_soon(slept: Slept, lasts_s: float) -> None:
    """Within the time that the broadcast took, and within 2 ms: a small adapter's publish is not made longer."""
    library, began = Library([]), slept.now
    library.ended = lambda: slept.now >= began + lasts_s
    with member(0, library, library.calls) as group:
        group.start(torch.zeros(4, dtype=torch.uint8), began + 5.0).wait()
    assert slept.now - began - lasts_s <= min(lasts_s, 2e-3) + 1e-4
    assert len(slept.naps) <= 10 + lasts_s / 2e-3


def test_an_error_of_the_library_is_one_of_the_publish() -> None:
    library = Library([])
    library.failure = RuntimeError("NCCL error: remote process exited")
    with member(1, library, library.calls) as group:
        transfer = group.start(torch.zeros(4, dtype=torch.uint8), time.monotonic() + LONG_S)
        with pytest.raises(PublishError, match=r"source rank 0 failed at member 1: NCCL error: remote process exited;"):
            transfer.wait()


class Spinning(Library):
    """A communicator on a device that it shares with ``others``: its receive spins until it is aborted.

    An abort waits for the device, so for all receives. ``is_completed`` waits for an abort and keeps the GIL meanwhile.
    """

    def __init__(self, others: list[Spinning]) -> None:
        super().__init__([])
        self._device = others
        self.asked_while_aborted = self.stuck = False
        self.ended = self._ended
        others.append(self)

    def _ended(self) -> bool:
        self.asked_while_aborted |= self.aborted.is_set()
        return False

    def abort(self) -> None:
        self.aborted.set()
        deadline = time.monotonic() + LONG_S / 4
        self.stuck = not all(other.aborted.wait(deadline - time.monotonic()) for other in self._device)


def test_the_groups_of_a_worker_are_left_at_once(slept: Slept) -> None:
    """One server is stopped: its receives and those of all others spin, in each group of each worker."""
    device: list[Spinning] = []
    lane = RecordedLane([], CPU)
    groups = [BroadcastGroup(ENDPOINT, 1, Backend(Spinning(device), lane), CPU, leave=lambda: None) for _ in range(3)]
    deadline = slept.now + 20.0
    transfers = [group.start(torch.zeros(4, dtype=torch.uint8), deadline) for group in groups]
    with pytest.raises(PublishError, match="has not ended in time"):
        transfers[0].wait()
    assert not any(library.aborted.is_set() for library in device), "aborted by a wait, one after the other"
    GroupLinks(above=dict(enumerate(groups[:2])), below={2: groups[2]}).close()
    assert [library.aborted.is_set() for library in device] == [True] * 3
    assert not any(library.stuck for library in device)


def test_who_waits_in_a_group_that_another_thread_leaves_does_not_call_into_it_any_more() -> None:
    device: list[Spinning] = []
    with member(1, Spinning(device), []) as group, ThreadPoolExecutor(1) as pool:
        transfer = group.start(torch.zeros(4, dtype=torch.uint8), time.monotonic() + LONG_S)
        waiting = pool.submit(transfer.wait)
        time.sleep(0.05)
        group.close()
        with pytest.raises(PublishError, match="has left the group"):
            waiting.result(LONG_S / 2)
        assert transfer.done()
        assert not device[0].asked_while_aborted


def test_nothing_is_polled_while_another_group_is_left() -> None:
    """A poll may wait for the abort, and would keep the GIL meanwhile."""
    first, second, polls = Library([]), Library([]), list[int]()
    entered, goes_on = threading.Event(), threading.Event()
    first.ended = lambda: bool(polls.append(0))
    second.abort = lambda: entered.set() or goes_on.wait(LONG_S)  # type: ignore[method-assign,return-value]
    with member(1, first, []) as waits, member(1, second, []) as leaves, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(waits.start(torch.zeros(4, dtype=torch.uint8), time.monotonic() + LONG_S).wait)
        while not polls:
            time.sleep(0.001)
        left = pool.submit(leaves.close)
        assert entered.wait(LONG_S)
        before = len(polls)
        time.sleep(0.05)
        assert len(polls) == before
        first.ended = lambda: True
        assert not waiting.done()
        goes_on.set()
        left.result(LONG_S)
        waiting.result(LONG_S)


def test_a_communicator_that_does_not_form_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third member died after it had joined the store: the others are inside the library, which knows no deadline.

    Member 0's library ends the call when it is told to abort; member 1's never does.
    """
    made: dict[int, Library] = {}
    end = threading.Event()

    def lazy(seat: GroupSeat) -> Backend:
        library = made[seat.rank] = Library([])
        library._first = lambda: (library.aborted if seat.rank == 0 else end).wait(LONG_S)
        return Backend(library, RecordedLane(library.calls, CPU))

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

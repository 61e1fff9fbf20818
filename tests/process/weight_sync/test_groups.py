from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import psutil
import pytest
import torch
import torch.distributed as dist

from areal_lora.distributed.store import CurveStore
from areal_lora.errors import ConfigError, PublishError
from areal_lora.weight_sync.link import backends, broadcast_groups, same_host
from areal_lora.weight_sync.link.backends import Backend
from areal_lora.weight_sync.link.broadcast_groups import GroupListener, join_group
from areal_lora.weight_sync.link.same_host import SharedSegment
from tests.support.sizes import size
from tests.support.weight_sync import SOCKETS
from tests.support.weight_sync.helpers import SECRET
from tests.support.weight_sync.recorded_lane import RecordedLane

pytestmark = pytest.mark.slow
LONG_S = 150.0


def listen(world=2, bucket_bytes=1000, timeout_s=LONG_S, bind="127.0.0.1", backend="gloo"):
    return GroupListener(
        source=0,
        bind=bind,
        receivers=[f"receiver {r}" for r in range(1, world)],
        bucket_bytes=bucket_bytes,
        backend=backend,
        timeout_s=timeout_s,
        secret=SECRET,
    )


def join(endpoint, rank, bind, timeout_s, secret=SECRET):
    return join_group(endpoint, rank, bind, timeout_s, secret)


def meet(world=2, bind="127.0.0.1", **options):
    """[source, receiver 1, ...] as threads of this process."""
    listener = listen(world, bind=bind, **options)
    with ThreadPoolExecutor(world) as pool:
        joins = [pool.submit(join, listener.endpoint, r, bind, LONG_S) for r in range(1, world)]
        source = listener.accept()
        return [source, *(j.result() for j in joins)]


def soon(s=LONG_S):
    return time.monotonic() + s


@pytest.mark.parametrize("nbytes", [1, 999, 12_345])
def test_a_broadcast_reaches_everybody(nbytes):
    groups = meet(3)
    g = torch.Generator().manual_seed(nbytes)
    sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=g)
    got = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    transfers = [grp.start(flat, soon()) for grp, flat in zip(groups, [sent, *got], strict=True)]
    for t in transfers:
        t.wait()
    assert all(torch.equal(sent, x) for x in got)
    for grp in groups:
        grp.close()


class InStreamOrder:
    """A gloo group of a device's stream: what is queued after a broadcast runs after its end."""

    def __init__(self, group):
        self._group = group

    def broadcast(self, tensors, options):
        work = self._group.broadcast(tensors, options)
        work.wait()
        return work

    def __getattr__(self, name):
        return getattr(self._group, name)


def test_a_backend_that_cannot_send_host_memory_goes_through_a_device(monkeypatch):
    def through(seat):
        return Backend(InStreamOrder(backends.gloo(seat).group), RecordedLane([], seat.device))

    monkeypatch.setitem(backends._BACKENDS, "through", through)
    members = meet(3, backend="through")
    g = torch.Generator().manual_seed(1)
    flat = torch.randint(0, 256, (9000,), dtype=torch.uint8, generator=g)
    pieces = [flat[:1000], flat[1000:4000], flat[4000:8000], flat[8000:]]

    def receive(member):
        """Two buffers in turn, each for pieces of several lengths, two under way at once."""
        ring, ahead, got = [torch.zeros(4000, dtype=torch.uint8) for _ in range(2)], [], []
        for i, piece in enumerate(pieces):
            if len(ahead) == 2:
                view, transfer = ahead.pop(0)
                transfer.wait()
                got.append(view.clone())
            view = ring[i % 2][: len(piece)]
            ahead.append((view, member.start(view, soon())))
        for view, transfer in ahead:
            transfer.wait()
            got.append(view.clone())
        return got

    with ThreadPoolExecutor(2) as pool:
        receivers = [pool.submit(receive, member) for member in members[1:]]
        sends = [members[0].start(piece, soon()) for piece in pieces]
        landed = [r.result() for r in receivers]
    for send in sends:
        send.wait()
    for got in landed:
        assert all(torch.equal(a, b) for a, b in zip(got, pieces, strict=True))
    for member in members:
        member.close()


def test_broadcasts_under_way_at_once_stay_in_order():
    groups = meet(3)
    sent = [torch.full((50 + i,), i, dtype=torch.uint8) for i in range(20)]
    got = [[torch.zeros_like(x) for x in sent] for _ in groups[1:]]
    transfers = [g.start(x, soon()) for g, part in zip(groups, [sent, *got], strict=True) for x in part]
    for t in transfers:
        t.wait()
    for part in got:
        assert all(torch.equal(a, b) for a, b in zip(part, sent, strict=True))
    for grp in groups:
        grp.close()


def listening():
    connections = psutil.Process().net_connections("tcp")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_store_and_pairs_listen_on_the_given_address_only():
    """127.0.0.2 is loopback too, but no default: a member that chooses its own address fails."""
    before = listening()
    groups = meet(2, bind="127.0.0.2")
    opened = listening() - before
    assert len(opened) == 3, opened  # the store, and each member's pairs
    assert {ip for ip, _ in opened} == {"127.0.0.2"}, opened
    for grp in groups:
        grp.close()


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", ""])
def test_all_interfaces_are_refused(bind):
    with pytest.raises(ConfigError, match="all interfaces"):
        GroupListener(
            source=0, bind=bind, receivers=["a"], bucket_bytes=1, backend="gloo", timeout_s=1.0, secret=SECRET
        )


def test_a_receiver_that_never_comes_is_an_error_in_time_that_names_it():
    listener = listen(3)
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(join, listener.endpoint, 1, "127.0.0.1", LONG_S)
        store = CurveStore(listener.endpoint.host, listener.endpoint.port, SECRET, LONG_S)
        dist.PrefixStore(listener.endpoint.token, store).wait(["member 1"])
        listener._deadline = time.monotonic() + 1.0
        with pytest.raises(PublishError, match=r"rank 0 was not complete .* 1 of 2 receivers are missing: receiver 2;"):
            listener.accept()
        assert time.monotonic() - listener._deadline < LONG_S / 2
        with pytest.raises(PublishError, match="not complete"):
            there.result()
        store.close()


def test_a_source_that_is_not_there_is_an_error_in_time():
    listener = listen()
    endpoint = listener.endpoint
    listener.close()
    began = time.monotonic()
    with pytest.raises(PublishError, match="cannot be reached"):
        join(endpoint, 1, "127.0.0.1", 1.0)
    assert time.monotonic() - began < LONG_S / 2


def test_a_source_that_nobody_listens_for_is_an_error_at_once():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))  # nobody else gets the port, on which nobody listens
        endpoint = msgspec.structs.replace(listen().endpoint, port=mute.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(PublishError, match=r"cannot be reached.*refused"):
            join(endpoint, 1, "127.0.0.1", LONG_S)
    assert time.monotonic() - began < LONG_S / 2


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_who_has_no_time_left_does_not_join(timeout_s):
    """As for the later of several sources, when the first took all of it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = msgspec.structs.replace(listen().endpoint, port=mute.getsockname()[1])
        with pytest.raises(PublishError, match="cannot be reached"):
            join(endpoint, 1, "127.0.0.1", timeout_s)


def test_a_source_that_is_reached_and_says_nothing_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = msgspec.structs.replace(listen().endpoint, port=mute.getsockname()[1])
        began = time.monotonic()
        with pytest.raises(PublishError, match=r"cannot be reached.*did not answer within"):
            join(endpoint, 1, "127.0.0.1", 1.0)
        assert time.monotonic() - began < LONG_S / 2


def test_who_does_not_know_the_token_is_not_a_member():
    listener = listen(timeout_s=1.5)
    stranger = msgspec.structs.replace(listener.endpoint, token="guess")
    errors = []

    def intrude():
        try:
            join(stranger, 1, "127.0.0.1", 1.0)
        except PublishError as e:
            errors.append(e)

    thread = threading.Thread(target=intrude)
    thread.start()
    with pytest.raises(PublishError):
        listener.accept()
    thread.join()
    assert len(errors) == 1


def test_a_late_member_is_an_error_at_the_deadline():
    source, receiver = meet()
    began = time.monotonic()
    with pytest.raises(PublishError, match="source rank 0"):
        receiver.start(torch.zeros(10, dtype=torch.uint8), soon(0.5)).wait()
    assert time.monotonic() - began < LONG_S / 2
    source.close()
    receiver.close()


def test_closing_one_member_wakes_the_other_before_the_deadline():
    source, receiver = meet()
    transfer = receiver.start(torch.zeros(10, dtype=torch.uint8), soon())
    began = time.monotonic()
    threading.Timer(0.2, source.close).start()
    with pytest.raises(PublishError) as failed:
        transfer.wait()
    assert time.monotonic() - began < LONG_S / 2
    for noise in ("pair.cc", "typically", "GLHF"):
        assert noise not in str(failed.value)
    receiver.close()


def test_two_threads_may_leave_at_once():
    """Each member leaves its store once, and no call that is in progress meets half a group."""
    left = []
    for _ in range(size(20, 200)):
        source, receiver = meet()
        for member in (source, receiver):
            leave = member._leave_store
            member._leave_store = lambda leave=leave: (left.append(1), time.sleep(0.001), leave())
        gate = threading.Barrier(5)

        def close(member, gate=gate):
            gate.wait()
            member.close()

        def use(gate=gate, receiver=receiver):
            gate.wait()
            with contextlib.suppress(PublishError):
                receiver.start(torch.zeros(10, dtype=torch.uint8), soon(0.2)).wait()

        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(close, member) for member in (source, source, receiver, receiver)]
            calls.append(pool.submit(use))
            for call in calls:
                call.result(LONG_S)
        assert left == [1, 1]
        left.clear()
        receiver.close()
        with pytest.raises(PublishError, match="closed"):
            receiver.start(torch.zeros(10, dtype=torch.uint8), soon()).wait()


def let_have(members, sizes):
    """What every receiver finds of a segment that rank 0 sends, or shows, in parts of these sizes."""
    segment = SharedSegment(sum(sizes), broadcast_groups.CPU)
    g = torch.Generator().manual_seed(1)
    segment.bytes[:] = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, generator=g).numpy()
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    parts = [(end - n, end) for end, n in zip(ends, sizes, strict=True)]
    inboxes = [m.receive(parts, soon()) for m in members[1:]]
    segment.advance(segment.bytes.size)
    if members[0].same_host:
        sends = [members[0].signal(segment, soon()) for _ in range(2)]
    else:
        sends = [members[0].start(torch.from_numpy(segment.bytes[a:b]), soon()) for a, b in parts]

    def empty(inbox):
        taken = [inbox.take().copy() for _ in sizes]
        inbox.finish()
        return taken

    with ThreadPoolExecutor(len(inboxes)) as pool:  # some get their bytes through others
        got = list(pool.map(empty, inboxes))
    for send in sends:
        send.wait()
        assert send.done()
    return segment.bytes, got


@pytest.mark.parametrize(("backend", "reads"), [("gloo", True), (SOCKETS, False)])
def test_receivers_on_the_same_machine_find_the_same_parts_as_others(backend, reads):
    members = meet(4, backend=backend, bucket_bytes=1 << 30)
    assert [m.same_host for m in members] == [reads] * 4
    assert {m.bucket_bytes for m in members} == {broadcast_groups.READ_BYTES if reads else 1 << 30}
    for sizes in ([5000, 1, 4096, 70_000, 24], [24]):
        sent, got = let_have(members, sizes)
        for parts in got:
            assert [len(p) for p in parts] == sizes
            assert b"".join(p.tobytes() for p in parts) == sent.tobytes()
    for m in members:
        m.close()


@pytest.mark.parametrize("who", ["a receiver elsewhere", "a receiver that may not look", "a source elsewhere"])
def test_one_member_that_cannot_read_the_source_has_the_bytes_sent_to_all(monkeypatch, who):
    """Each member is a thread here; one of them is told that it is at another place, or may not open the memory."""
    chosen, place, window = threading.local(), same_host._place, same_host.MappedSegment

    def other_place():
        return b"another machine!" if vars(chosen) and who != "a receiver that may not look" else place()

    def closed_window(signal):
        if vars(chosen) and who == "a receiver that may not look":
            raise PermissionError(13, "not yours")
        return window(signal)

    monkeypatch.setattr(same_host, "_place", other_place)
    monkeypatch.setattr(same_host, "MappedSegment", closed_window)

    def join_oddly(rank):
        chosen.it = True
        return join(listener.endpoint, rank, "127.0.0.1", LONG_S)

    listener = listen(4)
    with ThreadPoolExecutor(1) as odd, ThreadPoolExecutor(3) as pool:
        if who == "a source elsewhere":
            joins = [pool.submit(join, listener.endpoint, r, "127.0.0.1", LONG_S) for r in (1, 2, 3)]
            chosen.it = True
        else:
            joins = [pool.submit(join, listener.endpoint, r, "127.0.0.1", LONG_S) for r in (1, 2)]
            joins.append(odd.submit(join_oddly, 3))
        members = [listener.accept(), *(j.result() for j in joins)]
    assert [m.same_host for m in members] == [False] * 4
    assert {m.bucket_bytes for m in members} == {1000}
    sent, got = let_have(members, [500, 1000])
    assert all(b"".join(p.tobytes() for p in parts) == sent.tobytes() for parts in got)
    for m in members:
        m.close()

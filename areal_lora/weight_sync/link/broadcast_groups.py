"""Broadcast groups, one per source rank: the source is rank 0, or a relay of its bytes; the receivers are 1..n.

Each group is a process group on a store of its own: trainer and servers, which share no launcher, can form and leave
groups at any time. The store runs at the source and requires the run secret (``distributed.store``). gloo's own
connections do not: see "Security" in docs/en/cluster.md. Every wait has a deadline.

When all members have joined they agree whether every receiver can read the source's memory (``same_host``).
If so, broadcasts carry only signals about its versions. If one cannot, the bytes are sent to all.
"""

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.distributed.store import ENDED, CurveStore, StoreServer
from areal_lora.errors import ConfigError, PublishError, undo_on_error
from areal_lora.platforms.device import lane_of
from areal_lora.processes.log import get_logger
from areal_lora.weight_sync.link import backends
from areal_lora.weight_sync.link.inbox import Part, Ring, RingInbox, WindowInbox, Windows
from areal_lora.weight_sync.link.same_host import NO_CARD, SharedSegment, readable
from areal_lora.weight_sync.messages import SourceEndpoint, listed

READ_BYTES = 2 << 20  # largest bucket if receivers read memory: small buckets cost nothing there
CPU = torch.device("cpu")
POLL_S, LONGEST_POLL_S = 5e-5, 2e-3  # interval of polling a device's broadcast
END_S = 5.0  # for a source to answer that its formation has ended
GLOO_ADVICE = re.compile(r"^\[[^ ]*gloo[^ ]*\] |\. This is typically .*$")  # its source file; its general advice
MEMBER = "member {}"
"""A receiver by its rank, in errors and as the store's key with which it signs in."""

log = get_logger(__name__)


class Broadcast:
    """One broadcast in progress. The buffer must stay untouched until ``wait`` has returned or raised."""

    def __init__(self, group: "BroadcastGroup", flat: torch.Tensor, deadline: float) -> None:
        self._group, self._flat, self._deadline = group, flat, deadline
        with _named(group):
            self._issued = group.issue(flat, deadline)

    def wait(self) -> None:
        """Block until all bytes are received (or handed over). Raises PublishError at the deadline, for a dead peer."""
        with _named(self._group):
            try:
                issued = self._issued.result(max(self._deadline - time.monotonic(), 0.0))
            except TimeoutError:
                raise RuntimeError("the library did not start it in time") from None
            self._group.land(issued, self._flat, self._deadline)

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once, apart from copies of a device."""
        if not self._issued.done():
            return False
        return self._issued.exception() is not None or self._group.ended(self._issued.result())


class _Aborts:
    """Those of this process. Nothing is polled meanwhile: the call could wait for one, and would keep the GIL."""

    def __init__(self) -> None:
        self.lock, self.running = threading.Lock(), 0

    @contextmanager
    def one(self) -> Iterator[None]:
        with self.lock:
            self.running += 1
        try:
            yield
        finally:
            with self.lock:
                self.running -= 1


_aborts = _Aborts()


class BroadcastGroup:
    """Membership in the group of one source. After any failure it must be closed and a new group formed.

    All members start the same broadcasts, of equal sizes, in the same order, and have the same ``bucket_bytes``, the
    largest part of a shard in one broadcast, and ``same_host``: receivers read the source's memory.
    """

    def __init__(
        self,
        endpoint: SourceEndpoint,
        rank: int,
        backend: backends.Backend,
        device: torch.device = CPU,
        *,
        leave: Callable[[], None],
    ) -> None:
        self.source, self.rank, self._leave_store = endpoint.source, rank, leave
        self.bucket_bytes, self.same_host, self.on_device = endpoint.bucket_bytes, False, backend.through is not None
        self._group: dist.ProcessGroup | None = backend.group
        self._device = backends.DeviceSide(backend.through) if backend.through is not None else None
        self._lane = lane_of(device) if backend.through is None else None
        self._ring, self._windows = Ring(device), Windows()

    def agree(self, willing: bool, deadline: float) -> None:
        """Agree whether all receivers can read the source's memory. All members call this first.

        One member that is not ``willing``, or cannot, decides for all. A backend of a device connects its members in
        the first broadcast: here the caller waits for members anyway, in a publish not. Raises PublishError.
        """
        if self._device is not None:
            self.start(torch.zeros(1, dtype=torch.uint8), deadline).wait()
            return
        if (group := self._group) is None:
            return
        probe = SharedSegment(0, CPU) if willing and self.rank == 0 else None
        card = np.frombuffer(probe.card() if probe is not None and probe.shared else NO_CARD, dtype=np.uint8).copy()
        self.start(torch.from_numpy(card), deadline).wait()
        vote = torch.tensor([willing and readable(card.tobytes())], dtype=torch.uint8)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.timeout = backends.delta(deadline - time.monotonic())
        with _named(self):
            group.allreduce([vote], options).wait(backends.delta(deadline - time.monotonic()))
        self.same_host = bool(vote.item())
        if self.same_host:
            self.bucket_bytes = min(self.bucket_bytes, READ_BYTES)

    def signal(self, segment: SharedSegment, deadline: float) -> Broadcast:
        """Signal to receivers that read memory: the version in ``segment`` starts, or is complete (source)."""
        return self.start(torch.frombuffer(bytearray(segment.signal().encode()), dtype=torch.uint8), deadline)

    def receive(self, parts: Sequence[Part], deadline: float, on_device: bool = False) -> RingInbox | WindowInbox:
        """Receive one version, from the wire or from the source's memory; invalidates the previous inbox (receiver).

        With ``on_device`` the parts stay on the device if the backend sends through it.
        """
        start = partial(self.start, deadline=deadline)
        if self.same_host:
            return WindowInbox(self._windows, parts, start, deadline)
        return RingInbox(self._ring, parts, start, on_device and self._device is not None)

    def start(self, flat: torch.Tensor, deadline: float) -> Broadcast:
        """Send (rank 0) or receive (others) ``flat`` (uint8 [nbytes]) by ``deadline`` (time.monotonic).

        It is host memory, or complete memory of the device; where the backend sends from the host it is copied first.
        """
        if self._device is None and self._lane is not None and self._lane.reaches(flat):
            host = self._lane.host(flat.shape, flat.dtype)
            self._lane.copy(host, flat)
            self._lane.synchronize()
            flat = host
        return Broadcast(self, flat, deadline)

    def issue(self, flat: torch.Tensor, deadline: float) -> Future[dist.Work]:
        """Start a broadcast; never waits for a library that works on a device."""
        if (group := self._group) is None:
            raise PublishError(f"the group of source rank {self.source} is closed; form a new group")
        if self._device is not None:
            return self._device.issue(partial(self._through, group, flat, deadline))
        made: Future[dist.Work] = Future()
        made.set_result(group.broadcast([flat], self._options(deadline)))
        return made

    def _through(self, group: dist.ProcessGroup, flat: torch.Tensor, deadline: float) -> dist.Work:
        assert self._device is not None
        twin, lane = self._device.twin(flat, sends=self.rank == 0), self._device.lane
        if self.rank == 0 and twin is not flat:
            lane.copy(twin, flat)
        with lane.queue():
            return group.broadcast([twin], self._options(deadline))

    def ended(self, work: dist.Work) -> bool:
        """Whether ``work`` has ended. With a device also whether this member has left."""
        if self._device is None:
            return bool(work.is_completed())
        with _aborts.lock:
            return self._group is None or (not _aborts.running and bool(work.is_completed()))

    def land(self, work: dist.Work, flat: torch.Tensor, deadline: float) -> None:
        """Wait for a broadcast; data received through a device is in the buffer afterwards."""
        if self._device is None:
            work.wait(backends.delta(deadline - time.monotonic()))
            return
        lane, pause_s = self._device.lane, POLL_S
        while not self.ended(work):  # ``wait`` would abort in this thread, which may be the one to end other groups
            if (left_s := deadline - time.monotonic()) <= 0.0:
                raise RuntimeError("it has not ended in time")
            time.sleep(min(pause_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        if (failure := work.exception()) is not None:
            raise failure
        if self._group is None:
            raise RuntimeError("this member has left the group")
        if self.rank != 0 and (twin := self._device.twin(flat)) is not flat:
            lane.copy(flat, twin)
        lane.synchronize()

    def close(self) -> None:
        """Leave, from any thread; later calls do nothing. Members that wait for this one fail at once."""
        if left := self.detach():
            self.leave(left)

    def detach(self) -> list[dist.ProcessGroup]:
        """Let no thread call into the library any more. Return the group to leave; none from the second call on."""
        with _aborts.lock:
            left, self._group = [self._group] if self._group is not None else [], None
        return left

    def leave(self, left: list[dist.ProcessGroup]) -> None:
        """Leave the group that ``detach`` has returned; ``left`` is empty afterwards."""
        with _aborts.one(), suppress(dist.DistError):  # torch reports an abort that took long
            left[0].abort()
        left.clear()  # gloo's abort does nothing: its connections close with the last reference
        if self._device is not None:
            self._device.close()
        self._leave_store()

    @staticmethod
    def _options(deadline: float) -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = backends.delta(deadline - time.monotonic())
        return options


def start_leaving(groups: Sequence[BroadcastGroup]) -> list[threading.Thread]:
    """Leave all ``groups`` at once, each in a thread of its own.

    The abort of one waits for the device, on which receives of the others spin until they are aborted.
    """
    left = [(group, found) for group in groups if (found := group.detach())]
    threads = [threading.Thread(target=group.leave, args=(found,), name="leave", daemon=True) for group, found in left]
    for thread in threads:
        thread.start()
    return threads


def close_all(groups: Sequence[BroadcastGroup]) -> None:
    """Leave all ``groups``, and wait for the end of it."""
    for thread in start_leaving(groups):
        thread.join()


class GroupListener:
    """The source's side before the group exists: it binds and has an ``endpoint``, then ``accept``s or is closed.

    ``receivers``: what errors call the members, by rank from 1 on.
    """

    def __init__(
        self,
        *,
        source: int,
        bind: str,
        receivers: Sequence[str],
        bucket_bytes: int,
        backend: str,
        timeout_s: float,
        secret: str,
        device: torch.device = CPU,
    ) -> None:
        _check_bind(bind)
        self._bind, self._deadline, self._secret, self._device = bind, time.monotonic() + timeout_s, secret, device
        self._server, self._receivers = StoreServer(bind, secret), receivers
        self.endpoint = SourceEndpoint(
            source=source,
            host=bind,
            port=self._server.port,
            world=1 + len(receivers),
            token=secrets.token_hex(16),
            bucket_bytes=bucket_bytes,
            backend=backend,
            library=backends.library_of(backend),
        )

    def accept(self, shared: bool = True) -> BroadcastGroup:
        """Block until all receivers are members. The group closes the listener.

        ``shared``: they may read this process's memory. A relay has other memory.
        Raises PublishError ``timeout_s`` after the listener was created; it names the receivers that are missing.
        """
        place = self._bind, self._deadline, self._secret, self._device
        return _join(self.endpoint, 0, *place, receivers=self._receivers, shared=shared, closing=self.close)

    def close(self) -> None:
        """Stop listening; members that wait to join fail at once."""
        self._server.close()


def join_group(
    endpoint: SourceEndpoint, rank: int, bind: str, timeout_s: float, secret: str, device: torch.device = CPU
) -> BroadcastGroup:
    """Become receiver ``rank`` (1..world-1), or the relay in the source's place (0).

    ``bind`` is this machine's address towards the source. Raises PublishError if the group is not complete within
    ``timeout_s``, or if the source has another version or other settings of the backend's library.
    """
    _check_bind(bind)
    if (own := backends.library_of(endpoint.backend)) != endpoint.library:
        raise PublishError(
            f"source rank {endpoint.source} has {endpoint.library or 'no version'}, member {rank} has {own}: one "
            "communicator takes one version and one value of each variable; install the same in both roles "
            "(requirements/gpu-trainer.txt, requirements/gpu-rollout.txt) and set the same NCCL_* variables "
            "(VLLM_BATCH_INVARIANT=1 sets some in servers)"
        )
    receivers = [MEMBER.format(other) for other in range(1, endpoint.world)] if rank == 0 else ()
    return _join(
        endpoint, rank, bind, time.monotonic() + timeout_s, secret, device, receivers=receivers, shared=rank > 0
    )


def end_formation(endpoint: SourceEndpoint, secret: str, reason: str) -> None:
    """Fail all members that wait for others, with ``reason``; nothing if the source has ended it already."""
    with suppress(dist.DistError), closing(CurveStore(endpoint.host, endpoint.port, secret, END_S)) as store:
        store.set(ENDED, reason)


def _join(
    endpoint: SourceEndpoint,
    rank: int,
    bind: str,
    deadline: float,
    secret: str,
    device: torch.device,
    *,
    receivers: Sequence[str] = (),
    shared: bool = True,
    closing: Callable[[], None] = lambda: None,
) -> BroadcastGroup:
    """Join at the source's store. ``closing`` is called on leaving the group, or if it cannot be formed.

    Receivers sign in before they connect, and the source waits for that: a library does not name members it misses.
    """
    factory, leave = backends.backend_of(endpoint.backend), ExitStack()
    leave.callback(closing)
    with undo_on_error(leave.close):
        timeout_s = backends.delta(deadline - time.monotonic()).total_seconds()
        try:  # a refused connection is an error at once: a source listens before it invites
            store = CurveStore(endpoint.host, endpoint.port, secret, timeout_s)
        except dist.DistError as e:
            raise PublishError(
                f"source rank {endpoint.source} cannot be reached at {endpoint.host}:{endpoint.port} "
                f"within {timeout_s:.1f} s: {str(e).splitlines()[0]}"
            ) from e
        leave.callback(store.close)
        left_s = max(deadline - time.monotonic(), 0.0)
        store.set_timeout(backends.delta(left_s))
        prefixed = dist.PrefixStore(endpoint.token, store)
        try:
            if rank:
                prefixed.set(MEMBER.format(rank), "")
            else:
                _await_receivers(prefixed, endpoint.source, receivers, left_s)
                left_s = max(deadline - time.monotonic(), 0.0)
            backend = factory(
                backends.GroupSeat(
                    store=prefixed, rank=rank, world=endpoint.world, bind=bind, timeout_s=left_s, device=device
                )
            )
        except (dist.DistError, RuntimeError) as e:
            raise PublishError(
                f"group of source rank {endpoint.source} ({endpoint.world} members) was not complete within "
                f"{left_s:.1f} s at member {rank}: {str(e).splitlines()[0]}; see the servers' logs"
            ) from e
        group = BroadcastGroup(endpoint, rank, backend, device, leave=leave.close)
        with undo_on_error(group.close):  # also torch's own errors: an open group would keep its connections
            group.agree(shared and backend.same_host, deadline)
    if rank == 0:
        how = "read its memory" if group.same_host else "get its bytes over the network"
        log.info("the %d receivers of source rank %d %s", endpoint.world - 1, endpoint.source, how)
    return group


def _await_receivers(store: dist.Store, source: int, receivers: Sequence[str], timeout_s: float) -> None:
    """Wait until all have signed in. Raises PublishError with the names of those that have not."""
    keys, began_s = [MEMBER.format(rank) for rank, _ in enumerate(receivers, 1)], time.monotonic()
    try:
        store.wait(keys, backends.delta(timeout_s))
    except dist.DistError:
        timeout_s = min(timeout_s, time.monotonic() - began_s)
        if not (missing := [name for name, key in zip(receivers, keys, strict=True) if not store.check([key])]):
            return
        raise PublishError(
            f"group of source rank {source} was not complete within {timeout_s:.1f} s, {len(missing)} of "
            f"{len(receivers)} receivers are missing: {listed(missing)}; see the servers' logs"
        ) from None


@contextmanager
def _named(group: BroadcastGroup) -> Iterator[None]:
    """Turn what torch raises into a PublishError that names the group."""
    try:
        yield
    except (dist.DistError, RuntimeError) as e:
        cause = GLOO_ADVICE.sub("", str(e).splitlines()[0])
        raise PublishError(
            f"broadcast of source rank {group.source} failed at member {group.rank}: {cause}; "
            "a receiver or the source has ended or is late, see the servers' logs"
        ) from e


def _check_bind(bind: str) -> None:
    if bind in ("", "0.0.0.0", "::"):
        raise ConfigError("cluster.bind", f"{bind!r} would listen on all interfaces", "give this machine's own address")

"""Broadcast groups, one per source rank: the source is rank 0, the receivers are 1..n.

Each group is a process group on a store of its own, independent of any default group. Trainer and
servers, which share no launcher, can form and leave groups at any time. The store runs at the source
and requires the run secret (``distributed.store``). gloo's own connections do not: see "Security"
in docs/en/operations.md. Every wait has a deadline.

When all members have joined they agree whether every receiver can read the source's memory (``same_host``).
If so, broadcasts carry only signals about its versions. If one cannot, the bytes are sent to all.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from areal_lora.distributed.store import CurveStore
from areal_lora.distributed.store_server import StoreServer
from areal_lora.errors import ConfigError, PublishError
from areal_lora.processes.log import get_logger
from areal_lora.weight_sync.link.backends import Backend, Seat, backend_of, delta, library_of
from areal_lora.weight_sync.link.inbox import Inbox, Part, Ring, RingInbox, WindowInbox, Windows
from areal_lora.weight_sync.link.same_host import NO_CARD, SharedSegment, readable
from areal_lora.weight_sync.messages import SourceEndpoint

READ_BYTES = 2 << 20  # largest bucket if receivers read memory: small buckets cost nothing there
CPU = torch.device("cpu")

log = get_logger(__name__)


class Broadcast:
    """One broadcast in progress. The buffer must stay untouched until ``wait`` has returned or raised."""

    def __init__(self, group: BroadcastGroup, flat: torch.Tensor, deadline: float) -> None:
        self._group, self._flat, self._deadline = group, flat, deadline
        self._issued = time.monotonic()
        with _named(group):
            self._work = group.issue(flat, deadline)

    def wait(self) -> None:
        """Block until all bytes are received (or handed over). Raises PublishError at the deadline, for a dead peer."""
        with _named(self._group):
            self._group.land(self._work, self._flat, self._deadline, self._issued)

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once, apart from copies of a device."""
        return bool(self._work.is_completed())


class BroadcastGroup:
    """Membership in the group of one source. After any failure it must be closed and a new group formed.

    All members start the same broadcasts, of equal sizes, in the same order. All members have the same
    ``bucket_bytes``, the largest part of a shard in one broadcast, and the same ``same_host``: receivers read
    the source's memory.
    """

    def __init__(
        self,
        endpoint: SourceEndpoint,
        rank: int,
        backend: Backend,
        device: torch.device = CPU,
        *,
        leave: Callable[[], None],
    ) -> None:
        self.source, self.rank, self._leave_store = endpoint.source, rank, leave
        self.bucket_bytes, self.same_host = endpoint.bucket_bytes, False
        self._group: dist.ProcessGroup | None = backend.group
        self._timed_from_issue = backend.timed_from_issue
        self._twins = _Twins(backend.through) if backend.through is not None else None
        self._ring, self._windows = Ring(device), Windows()

    def agree(self, willing: bool, deadline: float) -> None:
        """Agree whether all receivers can read the source's memory. All members call this first.

        One member that is not ``willing``, or cannot, decides for all. A backend of a device connects its members
        in the first broadcast: it takes place here, where the caller waits for members anyway, and not in a publish.
        Raises PublishError.
        """
        if self._twins is not None:
            self.start(torch.zeros(1, dtype=torch.uint8), deadline).wait()
            return
        if self._group is None:
            return
        probe = SharedSegment(0, CPU) if willing and self.rank == 0 else None
        card = np.frombuffer(probe.card() if probe is not None and probe.shared else NO_CARD, dtype=np.uint8).copy()
        self.start(torch.from_numpy(card), deadline).wait()
        vote = torch.tensor([willing and readable(card.tobytes())], dtype=torch.uint8)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        options.timeout = delta(deadline - time.monotonic())
        with _named(self):
            self._group.allreduce([vote], options).wait(delta(deadline - time.monotonic()))
        self.same_host = bool(vote.item())
        if self.same_host:
            self.bucket_bytes = min(self.bucket_bytes, READ_BYTES)

    def signal(self, segment: SharedSegment, deadline: float) -> Broadcast:
        """Signal to receivers that read memory: the version in ``segment`` begins, or is complete (source)."""
        return self.start(torch.frombuffer(bytearray(segment.signal().encode()), dtype=torch.uint8), deadline)

    def receive(self, parts: Sequence[Part], deadline: float) -> Inbox:
        """Receive one version, from the wire or from the source's memory; invalidates the previous inbox (receiver)."""
        start = partial(self.start, deadline=deadline)
        if self.same_host:
            return WindowInbox(self._windows, parts, start, deadline)
        return RingInbox(self._ring, parts, start)

    def start(self, flat: torch.Tensor, deadline: float) -> Broadcast:
        """Send (rank 0) or receive (others) ``flat`` (uint8 [nbytes], host) by ``deadline`` (time.monotonic)."""
        return Broadcast(self, flat, deadline)

    def issue(self, flat: torch.Tensor, deadline: float) -> dist.Work:
        if self._group is None:
            raise PublishError(f"the group of source rank {self.source} is closed; form a new group")
        if self._twins is None:
            return self._group.broadcast([flat], self._options(deadline))
        twin = self._twins.of(flat)
        with self._twins.queue():
            if self.rank == 0:
                twin.copy_(flat, non_blocking=True)
            return self._group.broadcast([twin], self._options(deadline))

    def land(self, work: dist.Work, flat: torch.Tensor, deadline: float, issued: float) -> None:
        """Wait for a broadcast; data received through a device is on the host afterwards."""
        left = delta(deadline - (issued if self._timed_from_issue else time.monotonic()))
        if self._twins is None:
            work.wait(left)
            return
        with self._twins.queue():
            work.wait(left)
            if self.rank != 0:
                flat.copy_(self._twins.of(flat), non_blocking=True)
        self._twins.synchronize()

    def close(self) -> None:
        """Leave. Members that wait for this one fail at once; own transfers in progress end at their deadline first."""
        if self._group is not None:
            self._group.abort()
            self._group = None  # gloo's abort does nothing: its connections close with the last reference
            self._leave_store()

    @staticmethod
    def _options(deadline: float) -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = delta(deadline - time.monotonic())
        return options


class _Twins:
    """Device memory for host buffers, allocated once for each, and a stream apart from the model's."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, dict[int, torch.Tensor]()
        self._stream = torch.Stream(device=device) if device.type != "cpu" else None

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Device memory as long as ``flat``, the same memory for buffers that begin at the same address."""
        held = self._memory.get(flat.data_ptr())
        if held is None or held.numel() < flat.numel():
            held = self._memory[flat.data_ptr()] = torch.empty_like(flat, device=self._device)
        return held[: flat.numel()]

    def queue(self) -> AbstractContextManager[object]:
        """Context that issues work onto the stream."""
        return nullcontext() if self._stream is None else self._stream

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


class GroupListener:
    """The source's side before the group exists: it binds and has an ``endpoint``, then ``accept``s or is closed."""

    def __init__(
        self,
        *,
        source: int,
        bind: str,
        world: int,
        bucket_bytes: int,
        backend: str,
        timeout_s: float,
        secret: str,
        device: torch.device = CPU,
    ) -> None:
        _check_bind(bind)
        self._bind, self._deadline, self._secret, self._device = bind, time.monotonic() + timeout_s, secret, device
        self._server = StoreServer(bind, secret)
        self.endpoint = SourceEndpoint(
            source=source,
            host=bind,
            port=self._server.port,
            world=world,
            token=secrets.token_hex(16),
            bucket_bytes=bucket_bytes,
            backend=backend,
            library=library_of(backend),
        )

    def accept(self) -> BroadcastGroup:
        """Block until all receivers are members. The group closes the listener.

        Raises PublishError ``timeout_s`` after the listener was created.
        """
        return _join(self.endpoint, 0, self._bind, self._deadline, self._secret, self._device, closing=self.close)

    def close(self) -> None:
        """Stop listening; members that wait to join fail at once."""
        self._server.close()


def join_group(
    endpoint: SourceEndpoint, rank: int, bind: str, timeout_s: float, secret: str, device: torch.device = CPU
) -> BroadcastGroup:
    """Become receiver ``rank`` (1..world-1). ``bind`` is this machine's address towards the source.

    Raises PublishError if the group is not complete within ``timeout_s``, or if the source has another version of the
    backend's library.
    """
    _check_bind(bind)
    if (own := library_of(endpoint.backend)) != endpoint.library:
        raise PublishError(
            f"source rank {endpoint.source} has {endpoint.library or 'no version'}, member {rank} has {own}: one "
            "communicator takes one version; install the same in both roles (requirements/gpu-trainer.txt, "
            "requirements/gpu-rollout.txt)"
        )
    return _join(endpoint, rank, bind, time.monotonic() + timeout_s, secret, device)


def _join(
    endpoint: SourceEndpoint,
    rank: int,
    bind: str,
    deadline: float,
    secret: str,
    device: torch.device,
    closing: Callable[[], None] = lambda: None,
) -> BroadcastGroup:
    """Join at the source's store. ``closing`` is called on leaving the group, or if it cannot be formed."""
    leave = ExitStack()
    leave.callback(closing)
    try:
        store = _reach(endpoint, delta(deadline - time.monotonic()).total_seconds(), secret)
        leave.callback(store.close)
        return _member(store, endpoint, rank, bind, deadline, device, leave.close)
    except BaseException:
        leave.close()
        raise


def _reach(endpoint: SourceEndpoint, timeout_s: float, secret: str) -> CurveStore:
    """Connect to the source's store. A refused connection is an error at once: a source listens before it invites."""
    try:
        return CurveStore(endpoint.host, endpoint.port, secret, timeout_s)
    except dist.DistError as e:
        raise PublishError(
            f"source rank {endpoint.source} cannot be reached at {endpoint.host}:{endpoint.port} "
            f"within {timeout_s:.1f} s: {str(e).splitlines()[0]}"
        ) from e


def _member(
    store: CurveStore,
    endpoint: SourceEndpoint,
    rank: int,
    bind: str,
    deadline: float,
    device: torch.device,
    leave: Callable[[], None],
) -> BroadcastGroup:
    factory = backend_of(endpoint.backend)
    left_s = max(deadline - time.monotonic(), 0.0)
    store.set_timeout(delta(left_s))
    seat = Seat(
        store=dist.PrefixStore(endpoint.token, store),
        rank=rank,
        world=endpoint.world,
        bind=bind,
        timeout_s=left_s,
        device=device,
    )
    try:
        backend = factory(seat)
    except (dist.DistError, RuntimeError) as e:
        raise PublishError(
            f"group of source rank {endpoint.source} ({endpoint.world} members) was not complete within "
            f"{left_s:.1f} s at member {rank}: {str(e).splitlines()[0]}; see the servers' logs"
        ) from e
    group = BroadcastGroup(endpoint, rank, backend, device, leave=leave)
    try:
        group.agree(backend.same_host, deadline)
    except PublishError:
        group.close()
        raise
    if rank == 0:
        how = "read its memory" if group.same_host else "get its bytes over the network"
        log.info("the %d receivers of source rank %d %s", endpoint.world - 1, endpoint.source, how)
    return group


@contextmanager
def _named(group: BroadcastGroup) -> Iterator[None]:
    """Turn what torch raises into a PublishError that names the group."""
    try:
        yield
    except (dist.DistError, RuntimeError) as e:
        raise PublishError(
            f"broadcast of source rank {group.source} failed at member {group.rank}: {str(e).splitlines()[0]}; "
            "a receiver or the source has ended or is late, see the servers' logs"
        ) from e


def _check_bind(bind: str) -> None:
    if bind in ("", "0.0.0.0", "::"):
        raise ConfigError("cluster.bind", f"{bind!r} would listen on all interfaces", "give this machine's own address")

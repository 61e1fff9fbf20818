"""Broadcast groups: one per source rank, the source is rank 0, the receivers are 1..n.

Each group is a process group of its own on its own store, apart from any default group, so
that trainer and servers, which share no launcher, can meet and part at any time. The store
lives at the source on a socket bound here: a ``TCPStore`` that binds by itself listens on all
interfaces whatever host name it is given. Every wait has a deadline in seconds.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_lora.errors import ConfigError, PublishError
from areal_lora.weight_sync.transport import SourceEndpoint

_MIN_TIMEOUT_S = 0.001  # zero and negative timeouts mean "default" or are rejected by torch


@dataclass(frozen=True, slots=True)
class Backend:
    """A process group and the device its tensors must live on."""

    group: dist.ProcessGroup
    device: torch.device


BackendFactory = Callable[[dist.Store, int, int, str, float], Backend]
"""(store, rank, world, bind address, timeout_s) -> Backend; may block until all members are there."""


def _gloo(store: dist.Store, rank: int, world: int, bind: str, timeout_s: float) -> Backend:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = _delta(timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=bind)]
    return Backend(dist.ProcessGroupGloo(store, rank, world, options), torch.device("cpu"))


def _nccl(store: dist.Store, rank: int, world: int, bind: str, timeout_s: float) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _delta(timeout_s)
    return Backend(
        dist.ProcessGroupNCCL(store, rank, world, options), torch.device("cuda", torch.cuda.current_device())
    )


_BACKENDS: dict[str, BackendFactory] = {"gloo": _gloo, "nccl": _nccl}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Add a backend of a platform (for example HCCL), on both sides, before groups are made."""
    _BACKENDS[name] = factory


class Transfer:
    """One broadcast under way. The buffer must stay untouched until ``wait`` returned or raised."""

    def __init__(self, group: BroadcastGroup, flat: torch.Tensor, deadline: float) -> None:
        self._group, self._flat, self._deadline = group, flat, deadline
        with _named(group):
            self._work = group.issue(flat, deadline)

    def wait(self) -> None:
        """Block until all bytes are here (or handed over). Raises PublishError at the deadline or a dead peer."""
        with _named(self._group):
            self._work.wait(_delta(self._deadline - time.monotonic()))
            self._group.land(self._flat)


class BroadcastGroup:
    """Membership in the group of one source. After any failure it must be closed and made anew.

    All members start the same broadcasts, of equal sizes, in the same order.
    """

    def __init__(self, endpoint: SourceEndpoint, rank: int, backend: Backend) -> None:
        self.source, self.rank = endpoint.source, rank
        self.bucket_bytes = endpoint.bucket_bytes
        self._group: dist.ProcessGroup | None = backend.group
        self._device = backend.device
        self._on_device: dict[int, torch.Tensor] = {}

    def start(self, flat: torch.Tensor, deadline: float) -> Transfer:
        """Send (rank 0) or receive (others) ``flat`` (uint8 [nbytes], host) by ``deadline`` (time.monotonic)."""
        return Transfer(self, flat, deadline)

    def issue(self, flat: torch.Tensor, deadline: float) -> dist.Work:
        if self._group is None:
            raise PublishError(f"the group of source rank {self.source} is closed; connect again")
        piece = flat
        if self._device.type != "cpu":
            # Backends that cannot send host memory: every buffer has its twin on the device, made once.
            piece = self._on_device.setdefault(flat.data_ptr(), torch.empty_like(flat, device=self._device))
            if piece.numel() != flat.numel():
                piece = self._on_device[flat.data_ptr()] = torch.empty_like(flat, device=self._device)
            if self.rank == 0:
                piece.copy_(flat, non_blocking=True)
        return self._group.broadcast([piece], self._options(deadline))

    def land(self, flat: torch.Tensor) -> None:
        """After a broadcast through the device: bring what was received to the host."""
        if self._device.type != "cpu" and self.rank != 0:
            flat.copy_(self._on_device[flat.data_ptr()])

    def close(self) -> None:
        """Leave. Members that wait for this one fail at once; own transfers under way end at their deadline first."""
        if self._group is not None:
            self._group.abort()
            self._group = None  # gloo's abort does nothing: its connections close with the last reference

    @staticmethod
    def _options(deadline: float) -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = _delta(deadline - time.monotonic())
        return options


class GroupListener:
    """The source's side before the group exists: binds, publishes ``endpoint``, then ``accept``s."""

    def __init__(
        self, *, source: int, bind: str, world: int, bucket_bytes: int, backend: str, timeout_s: float
    ) -> None:
        _check_bind(bind)
        self._bind, self._timeout_s = bind, timeout_s
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((bind, 0))
            listener.listen(max(128, world))
            port = listener.getsockname()[1]
            self._store = dist.TCPStore(
                bind, port, None, True, _delta(timeout_s), wait_for_workers=False, master_listen_fd=listener.detach()
            )
        self.endpoint = SourceEndpoint(
            source=source, host=bind, port=port, world=world, token=secrets.token_hex(16),
            bucket_bytes=bucket_bytes, backend=backend,
        )

    def accept(self) -> BroadcastGroup:
        """Block until all receivers are members. Raises PublishError at the timeout."""
        return _member(self._store, self.endpoint, 0, self._bind, self._timeout_s)


def join_group(endpoint: SourceEndpoint, rank: int, bind: str, timeout_s: float) -> BroadcastGroup:
    """Become receiver ``rank`` (1..world-1). ``bind`` is this machine's address towards the source.

    Raises PublishError if the group is not complete within ``timeout_s``.
    """
    _check_bind(bind)
    try:
        store = dist.TCPStore(endpoint.host, endpoint.port, None, False, _delta(timeout_s), wait_for_workers=False)
    except (dist.DistError, RuntimeError) as e:
        raise PublishError(
            f"source rank {endpoint.source} cannot be reached at {endpoint.host}:{endpoint.port} "
            f"within {timeout_s:.1f} s: {str(e).splitlines()[0]}"
        ) from e
    return _member(store, endpoint, rank, bind, timeout_s)


def _member(store: dist.Store, endpoint: SourceEndpoint, rank: int, bind: str, timeout_s: float) -> BroadcastGroup:
    if endpoint.backend not in _BACKENDS:
        raise ConfigError("weight_sync", f"no broadcast backend {endpoint.backend!r}, known: {sorted(_BACKENDS)}")
    prefixed = dist.PrefixStore(endpoint.token, store)
    try:
        backend = _BACKENDS[endpoint.backend](prefixed, rank, endpoint.world, bind, timeout_s)
    except (dist.DistError, RuntimeError) as e:
        raise PublishError(
            f"group of source rank {endpoint.source} ({endpoint.world} members) was not complete within "
            f"{timeout_s:.1f} s at member {rank}: {str(e).splitlines()[0]}; see the servers' logs"
        ) from e
    return BroadcastGroup(endpoint, rank, backend)


@contextmanager
def _named(group: BroadcastGroup) -> Iterator[None]:
    """Turn what torch raises into a PublishError that names the group."""
    try:
        yield
    except (dist.DistError, RuntimeError) as e:
        raise PublishError(
            f"broadcast of source rank {group.source} failed at member {group.rank}: {str(e).splitlines()[0]}; "
            "a receiver or the source is gone or late, see the servers' logs"
        ) from e


def _check_bind(bind: str) -> None:
    if bind in ("", "0.0.0.0", "::"):
        raise ConfigError("cluster.bind", f"{bind!r} would listen on all interfaces", "give this machine's own address")


def _delta(seconds: float) -> timedelta:
    return timedelta(seconds=max(seconds, _MIN_TIMEOUT_S))

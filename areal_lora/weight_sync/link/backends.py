"""Process groups for broadcasts, by name: one row for each kind of network."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_lora.errors import ConfigError
from areal_lora.platforms.device import Lane, StreamLane

MOST_CTAS = 2  # blocks of a broadcast's kernel on the device: enough for a link, few beside a model
_MIN_TIMEOUT_S = 0.001  # zero and negative timeouts mean "default" or are rejected by torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSeat:
    """Place of one member in a group to be formed; ``bind`` is its own address, ``device`` the one it computes on."""

    store: dist.Store
    rank: int
    world: int
    bind: str
    timeout_s: float
    device: torch.device


@dataclass(frozen=True, slots=True)
class Backend:
    """A process group, and the lane of the device ``through`` which it sends; None if it sends host memory.

    ``same_host``: receivers on the source's machine may read its memory instead. A backend that
    sends through a device has its own way inside a machine. ``timed_from_issue``: the time-out of ``Work.wait``
    counts from the start of the work, not from the call.
    """

    group: dist.ProcessGroup
    through: Lane | None
    same_host: bool = False
    timed_from_issue: bool = False


BackendFactory = Callable[[GroupSeat], Backend]
"""May block until all members have joined. ``Work.wait`` of the group must block the host, up to its time-out."""


def gloo(seat: GroupSeat) -> Backend:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = delta(seat.timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=seat.bind)]
    group = dist.ProcessGroupGloo(seat.store, seat.rank, seat.world, options)
    return Backend(group, None, same_host=seat.device.type == "cpu")  # page-locked memory cannot be shared


def _nccl(seat: GroupSeat) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = delta(seat.timeout_s)
    # A receive that waits for its source spins on the device. One per source, with NCCL's usual number of blocks,
    # could hold most multiprocessors while the model's own collectives wait for some.
    options.config.min_ctas, options.config.max_ctas = 1, MOST_CTAS
    # The constructor reads it. Without it ``wait`` returns at once, and a lost peer ends this process.
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        group = dist.ProcessGroupNCCL(seat.store, seat.rank, seat.world, options)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before
    return Backend(group, StreamLane(seat.device), timed_from_issue=True)


def _nccl_version() -> str:
    return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))


_BACKENDS: dict[str, BackendFactory] = {"gloo": gloo, "nccl": _nccl}
_LIBRARIES: dict[str, Callable[[], str]] = {"nccl": _nccl_version}  # where one communicator takes one version only


def register_backend(name: str, factory: BackendFactory) -> None:
    """Add the backend of a platform (for example HCCL), on both sides, before groups are formed."""
    _BACKENDS[name] = factory


def backend_of(name: str) -> BackendFactory:
    """Raises ConfigError for a name that is not registered in this process."""
    if name not in _BACKENDS:
        raise ConfigError("weight_sync", f"no broadcast backend {name!r}, known: {sorted(_BACKENDS)}")
    return _BACKENDS[name]


def library_of(name: str) -> str:
    """Name and version of a backend's library, as all members of a group must have it; empty if it does not matter."""
    return _LIBRARIES[name]() if name in _LIBRARIES else ""


def delta(seconds: float) -> timedelta:
    """Convert remaining seconds, also zero or negative ones, for torch."""
    return timedelta(seconds=max(seconds, _MIN_TIMEOUT_S))

"""The process groups that adapters can be broadcast with, by name: one row for each kind of network."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_lora.errors import ConfigError

_MIN_TIMEOUT_S = 0.001  # zero and negative timeouts mean "default" or are rejected by torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One member's place in a group to be. ``bind`` is its own address, ``device`` what it computes on."""

    store: dist.Store
    rank: int
    world: int
    bind: str
    timeout_s: float
    device: torch.device


@dataclass(frozen=True, slots=True)
class Backend:
    """A process group, and the device through which host memory must go; None where it sends the host's.

    ``same_host``: receivers on the source's machine may read its memory instead. A backend that
    sends through a device has its own ways inside a machine.
    """

    group: dist.ProcessGroup
    through: torch.device | None
    same_host: bool = False


BackendFactory = Callable[[Seat], Backend]
"""May block until all members are there. ``Work.wait`` of the group must block the host, and no longer than asked."""


def gloo(seat: Seat) -> Backend:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = delta(seat.timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=seat.bind)]
    group = dist.ProcessGroupGloo(seat.store, seat.rank, seat.world, options)
    return Backend(group, None, same_host=seat.device.type == "cpu")  # memory for devices is theirs


def _nccl(seat: Seat) -> Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = delta(seat.timeout_s)
    # Read by the constructor. Else waiting would return at once, and a lost peer would end this process.
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        group = dist.ProcessGroupNCCL(seat.store, seat.rank, seat.world, options)
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before
    return Backend(group, seat.device)


_BACKENDS: dict[str, BackendFactory] = {"gloo": gloo, "nccl": _nccl}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Add a backend of a platform (for example HCCL), on both sides, before groups are made."""
    _BACKENDS[name] = factory


def backend_of(name: str) -> BackendFactory:
    """Raises ConfigError for a name that nobody registered in this process."""
    if name not in _BACKENDS:
        raise ConfigError("weight_sync", f"no broadcast backend {name!r}, known: {sorted(_BACKENDS)}")
    return _BACKENDS[name]


def delta(seconds: float) -> timedelta:
    """For torch, from seconds that may be used up."""
    return timedelta(seconds=max(seconds, _MIN_TIMEOUT_S))

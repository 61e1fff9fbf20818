"""Differences between device types, as data, and transfers of one device beside the model's kernels.

Copies must not queue behind kernels, nor kernels behind copies. Everything that a publish does on a device goes through
a `Lane`, so its order can be tested without one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from areal_lora.errors import ConfigError

COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""By device type, the torch.distributed backend string of the trainer's own groups."""
PAGE_BYTES = 4096


def own_device(kind: str, local_rank: int) -> torch.device:
    """Select this process's device among the visible ones and make it current in the calling thread.

    Every other thread must select it too: a thread starts on device 0.
    """
    if collective_of(kind) == COLLECTIVES["cpu"]:
        return torch.device("cpu")
    device = torch.device(kind, local_rank)
    torch.get_device_module(device).set_device(device)
    return device


def host_buffer(nbytes: int, device: torch.device) -> np.ndarray:
    """uint8 [nbytes] on the host with all pages mapped; page-locked if ``device`` is an accelerator."""
    if device.type != "cpu":
        pinned: np.ndarray = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    buffer = np.empty(nbytes, dtype=np.uint8)
    buffer[::PAGE_BYTES] = 0
    return buffer


def upload(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``. The host waits for nothing: an accelerator copies from page-locked memory by itself."""
    if device.type in COLLECTIVES and device.type != "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def collective_of(device: torch.device | str) -> str:
    """Raises ConfigError for a device type that is not in the table."""
    kind = torch.device(device).type
    if kind not in COLLECTIVES:
        raise ConfigError("cluster.device", f"{kind!r} is not supported", f"one of {', '.join(COLLECTIVES)}")
    return COLLECTIVES[kind]


class Lane:
    """A stream of an accelerator of any kind: work in the order in which it was queued.

    The host knows of an end only by ``synchronize``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.Stream(device=device)

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros on the host, in memory that the device copies from and to by itself."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def twin(self, host: Tensor) -> Tensor:
        """Memory on the device for the content of ``host``."""
        return torch.empty_like(host, device=self.device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device; neither may be touched before ``synchronize``."""
        with self._stream:
            target.copy_(source, non_blocking=True)

    def queue(self) -> AbstractContextManager[object]:
        """Context in which a library, for example NCCL, queues its own work."""
        stream: AbstractContextManager[object] = self._stream
        return stream

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        self._stream.synchronize()


def lane_of(device: torch.device) -> Lane | None:
    """None where host code reaches the device's memory."""
    return None if device.type == "cpu" else Lane(device)

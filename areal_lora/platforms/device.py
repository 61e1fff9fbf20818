"""Differences between device types, as data, and transfers of one device beside the model's kernels.

Copies must not queue behind kernels, nor kernels behind copies. Everything that a publish does on a device goes through
a `Lane`, so its order can be tested without one.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from areal_lora.errors import ConfigError

COLLECTIVES = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
"""By device type, the torch.distributed backend string of the trainer's own groups."""
PAGE_BYTES = 4096
PEAK_TFLOPS = {
    "A800": 312.0,  # as A100
    "A100": 312.0,  # NVIDIA A100 data sheet
    "H100 PCIe": 756.0,  # NVIDIA H100 data sheet of 2022: 1,513 with sparsity
    "H100 NVL": 835.0,  # NVIDIA H100 data sheet: 1,671 with sparsity
    "H100": 989.0,  # SXM, NVIDIA H100 data sheet: 1,979 with sparsity
    "H800": 989.0,  # as H100
    "H200 NVL": 835.0,  # NVIDIA H200 data sheet: 1,671 with sparsity
    "H200": 989.0,  # SXM, NVIDIA H200 data sheet: 1,979 with sparsity
    "GB200": 2500.0,  # NVIDIA GB200 NVL72 data sheet: 360 PFLOP/s of 72 with sparsity
    "B200": 2250.0,  # NVIDIA HGX B200 data sheet: 36 PFLOP/s of 8 with sparsity
    "L40S": 362.0,  # NVIDIA L40S data sheet
    "L4": 121.0,  # NVIDIA L4 data sheet: 242 with sparsity
}
"""Dense bfloat16 peaks in TFLOP/s by words of the device's name; the first row whose words are all in it counts. Data
sheets give the peak with sparsity, twice the dense one."""


def own_device(kind: str, local_rank: int) -> torch.device:
    """This process's device among the visible ones, selected in the calling thread."""
    if collective_of(kind) == COLLECTIVES["cpu"]:
        return torch.device("cpu")
    device = torch.device(kind, local_rank)
    select_device(device)
    return device


def select_device(device: torch.device) -> None:
    """Make ``device`` current in the calling thread. Call it in each thread that works on a device.

    A thread starts on device 0. Leaving a stream there would give this process a context on another one's device.
    """
    if device.type != "cpu":
        torch.get_device_module(device).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done everything that is queued there, collectives included."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def finish_stream(device: torch.device) -> None:
    """Wait until ``device`` has done what is queued on this thread's current stream, not on a `Lane`."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()


@contextmanager
def profiler_range(name: str) -> Iterator[None]:
    """A range of torch's profiler and, with CUDA, of NVIDIA's (NVTX); it costs microseconds without them."""
    with record_function(name), torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext():
        yield


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


def peak_flops(kind: str) -> float | None:
    """Dense bfloat16 peak of this process's device, FLOP/s; None for a CPU or a device without a row."""
    if collective_of(kind) == COLLECTIVES["cpu"]:
        return None
    words = {*torch.get_device_module(kind).get_device_name().replace("-", " ").split()}
    peaks = (1e12 * peak for row, peak in PEAK_TFLOPS.items() if {*row.split()} <= words)
    return None if "MIG" in words else next(peaks, None)  # a slice of a device has a part of it


def held_bytes(device: torch.device) -> int:
    """Bytes that torch has allocated on ``device``; 0 for a CPU."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).memory_allocated(device))


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that torch had allocated on ``device`` at a time since the last call; None for a CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    peak = int(module.max_memory_allocated(device))
    module.reset_peak_memory_stats(device)
    return peak


class Lane:
    """A stream of an accelerator of any kind: work in the order in which it was queued, by any threads.

    The host knows of an end only by ``synchronize``. torch gives streams out of a pool for each priority, and the 33rd
    is the first again: another pool than the default one keeps it apart from those on which models run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, torch.Stream(device=device, priority=-1)

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros on the host, in memory that the device copies from and to by itself."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def twin(self, host: Tensor) -> Tensor:
        """Memory on the device for the content of ``host``."""
        return self.empty(host.shape, host.dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory on the device. Another stream's may still be read by kernels that are queued there."""
        with self.queue():
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def reaches(self, memory: Tensor) -> bool:
        """Whether a library that works on the device takes ``memory`` as it is."""
        return bool(memory.device.type == self.device.type)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between host and device; neither may be touched before ``synchronize``."""
        with self.queue():
            target.copy_(source, non_blocking=True)

    def queue(self) -> AbstractContextManager[object]:
        """Context in which a library, for example NCCL, queues its own work."""
        own = self._stream
        # An object of its own for each entry: it keeps what to restore, and threads enter at once.
        entered: AbstractContextManager[object] = torch.Stream(
            stream_id=own.stream_id, device_index=own.device_index, device_type=own.device_type
        )
        return entered

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        self._stream.synchronize()


@cache
def lane_of(device: torch.device) -> Lane | None:
    """The one lane of this process on ``device``; None where host code reaches the device's memory.

    It waits for copies alone, never for other processes, so all publishes share it.
    """
    return None if device.type == "cpu" else Lane(device)

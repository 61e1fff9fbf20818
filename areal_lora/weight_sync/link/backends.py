"""Process groups for broadcasts, by name: one row for each kind of network."""

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_lora.errors import ConfigError
from areal_lora.platforms.device import Lane, lane_of, select_device
from areal_lora.processes.watched import watched_thread
from areal_lora.weight_sync.link.inbox import RING

MOST_CTAS = 2  # blocks of a broadcast's kernel on the device: enough for a link, few beside a model
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# NCCL does not compare these between the members of a communicator: it hangs where they differ. COLLNET_ENABLE is none
# of them: Megatron removes it from a trainer's environment.
SHARED_VARIABLES = (
    *("ALGO", "BUFFSIZE", "CUMEM_ENABLE", "MAX_CTAS", "MAX_NCHANNELS", "MIN_CTAS", "MIN_NCHANNELS"),
    *("NTHREADS", "NVLS_ENABLE", "P2P_NET_DISABLE", "PROTO", "SOCKET_NTHREADS"),
)
_ENVIRONMENT = threading.Lock()
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
    sends through a device has its own way inside a machine.
    """

    group: dist.ProcessGroup
    through: Lane | None
    same_host: bool = False


BackendFactory = Callable[[GroupSeat], Backend]
"""May block until all members have joined. ``Work.wait`` of the group must block the host, up to its time-out.

Works of a group that sends through a device are polled instead: ``is_completed`` must not block.
"""


def gloo(seat: GroupSeat) -> Backend:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = delta(seat.timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=seat.bind)]
    group = dist.ProcessGroupGloo(seat.store, seat.rank, seat.world, options)
    return Backend(group, None, same_host=seat.device.type == "cpu")  # page-locked memory cannot be shared


def _nccl(seat: GroupSeat) -> Backend:
    # Its stream must not be one of the pool that models take theirs from: a posted receive would stop the model.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = delta(seat.timeout_s)
    # A receive that waits for its source spins on the device. One per source, with NCCL's usual number of blocks,
    # could hold most multiprocessors while the model's own collectives wait for some.
    options.config.min_ctas, options.config.max_ctas = 1, MOST_CTAS
    # The constructor reads it. Without it torch's watchdog ends this process for a lost peer. It is set once and stays:
    # NCCL reads the environment in other threads meanwhile. The model's own groups exist when the first one is formed.
    with _ENVIRONMENT:
        if os.environ.get(BLOCKING_WAIT) != "1":
            os.environ[BLOCKING_WAIT] = "1"
    group = dist.ProcessGroupNCCL(seat.store, seat.rank, seat.world, options)
    return Backend(group, lane_of(seat.device))


_BACKENDS: dict[str, BackendFactory] = {"gloo": gloo, "nccl": _nccl}


def register_backend(name: str, factory: BackendFactory) -> None:
    """Add the backend of a platform (for example HCCL), on both sides, before groups are formed."""
    _BACKENDS[name] = factory


def backend_of(name: str) -> BackendFactory:
    """Raises ConfigError for a name that is not registered in this process."""
    if name not in _BACKENDS:
        raise ConfigError("weight_sync", f"no broadcast backend {name!r}, known: {sorted(_BACKENDS)}")
    return _BACKENDS[name]


def library_of(name: str) -> str:
    """Version and settings of a backend's library, as all members of a group must have them; empty if any will do."""
    if name != "nccl":
        return ""
    variables = (f"NCCL_{each}" for each in SHARED_VARIABLES)
    settings = [f"{each}={os.environ[each]}" for each in variables if os.environ.get(each)]
    return " ".join(["NCCL", ".".join(map(str, torch.cuda.nccl.version())), *settings])


def delta(seconds: float) -> timedelta:
    """Convert remaining seconds, also zero or negative ones, for torch."""
    return timedelta(seconds=max(seconds, _MIN_TIMEOUT_S))


class DeviceSide:
    """Twins of host buffers on the device, and the calls into the library, in order and in a thread of its own.

    NCCL forms a communicator inside the call that issues the first broadcast, and waits there without a time-out. Other
    threads wait up to their deadlines: a call that never returns costs this one thread.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane, self._memory, self._turn = lane, dict[int, torch.Tensor](), 0
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        watched_thread("device-broadcasts", self._run)

    def twin(self, flat: torch.Tensor, *, sends: bool = False) -> torch.Tensor:
        """Device memory as long as ``flat``, the same memory for buffers that start at the same address.

        One that ``sends`` has `RING` memories in turn, and as many broadcasts of host memory at a time. It is ``flat``
        itself if that is on the device.
        """
        if self.lane.reaches(flat):
            return flat
        self._turn = (self._turn + 1) % RING
        place = self._turn if sends else flat.data_ptr()
        held = self._memory.get(place)
        if held is None or held.numel() < flat.numel():
            held = self._memory[place] = self.lane.twin(flat)
        return held[: flat.numel()]

    def issue(self, call: Callable[[], dist.Work]) -> Future[dist.Work]:
        """Have ``call`` made after all earlier ones."""
        made: Future[dist.Work] = Future()

        def make() -> None:
            try:
                made.set_result(call())
            except BaseException as e:  # fault boundary: the waiting caller gets the error  # noqa: BLE001
                made.set_exception(e)

        self._calls.put(make)
        return made

    def close(self) -> None:
        """No ``issue`` may follow."""
        self._calls.put(None)

    def _run(self) -> None:
        select_device(self.lane.device)
        while (call := self._calls.get()) is not None:
            call()
            del call  # or it would keep the memory of a broadcast until the next one

"""What the processes of a run use of their machines. Each measures itself; trainer rank 0 reads all for its records.

process --every EVERY_S--> status/<role>-<index>.json (MachineUse) --> rank 0 --> machine/<role>/<node>/<figure>
"""

import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from statistics import fmean
from typing import Any

import msgspec
import psutil

from areal_lora.processes.log import get_logger
from areal_lora.processes.startup import VISIBLE
from areal_lora.processes.watched import watched_thread
from areal_lora.run_folder.paths import RunFolder, write_file
from areal_lora.run_folder.status import STALE_S

EVERY_S = 10.0
MAX_PLACES = 16  # of a role, with tags of their own: each step's record has all tags, and a chart a line for each
FIGURES: dict[str, Callable[[Collection[float]], float]] = {
    "cpu_share": sum,  # of all CPUs of the node, since the measurement before
    "core_share": max,  # of one CPU, by a process without its descendants: an event loop has one
    "memory_gib": sum,  # resident; pages that processes share count in each
    "gpu_share": fmean,  # of a GPU of the process, as the three below: NVML's utilisation, by any process
    "gpu_gib": max,  # in use
    "gpu_watts": max,
    "gpu_celsius": max,
    "sequences_running": sum,
    "sequences_waiting": sum,
    "preemptions_per_s": sum,  # of sequences: their KV cache is computed again
    "sequences_outstanding": sum,  # requested by the controller, not answered
    "kv_cache_share": max,
    "prefix_cache_share": fmean,  # of prompt tokens of requests that ended since the measurement before, if any
    "disk_free_gib": min,  # of the file system of the run folder, as trainer rank 0 sees it
}
"""The figures, and how those of the processes of one role on one node, or with one GPU, are joined."""
EXTREMES: dict[str, Callable[[float, float], float]] = {
    "memory_gib": max,
    "gpu_gib": max,
    "gpu_celsius": max,
    "kv_cache_share": max,
    "disk_free_gib": min,
}
"""Of the rounds between two records; of other figures the mean."""

GPU_READINGS: dict[str, Callable[[Any, Any], float]] = {  # of NVML and of the handle of a GPU
    "gpu_share": lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,  # percent
    "gpu_gib": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2).used / 2**30,  # v1: + reserved
    "gpu_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,  # milliwatts
    "gpu_celsius": lambda nvml, gpu: float(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
}

log = get_logger(__name__)


class MachineUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a process and its descendants on ``node`` use: ``FIGURES``, without those that it does not have.

    ``gpus`` are those of each of its GPUs, by number.
    """

    role: str
    node: str
    figures: dict[str, float]
    gpus: dict[str, dict[str, float]] = {}

    def places(self) -> Iterator[tuple[str, dict[str, float]]]:
        """The node and its GPUs, as in the names of metrics."""
        yield self.node, self.figures
        for gpu, figures in self.gpus.items():
            yield f"{self.node}/{gpu}", figures


def joined(uses: Iterable[MachineUse]) -> dict[str, float]:
    """``machine/<role>/<node>/<figure>`` of all processes, ``machine/<role>/<node>/<gpu>/<figure>`` of their GPUs.

    ``min``, ``mean`` and ``max`` replace the places of a figure that a role has at more than `MAX_PLACES`.
    """
    found, metrics = defaultdict[tuple[str, str], dict[str, list[float]]](dict), dict[str, float]()
    for use in uses:
        for place, figures in use.places():
            for name, value in figures.items():
                found[use.role, name].setdefault(place, []).append(value)
    for (role, name), places in found.items():
        each = {place: FIGURES[name](values) for place, values in places.items()}
        if len(each) > MAX_PLACES:
            each = {"min": min(each.values()), "mean": fmean(each.values()), "max": max(each.values())}
        metrics |= {f"machine/{role}/{place}/{name}": value for place, value in each.items()}
    return metrics


def load_nvml() -> Any | None:
    """NVIDIA's management library; None without the package ``nvidia-ml-py`` or without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        log.info("no figures of GPUs: the package nvidia-ml-py is missing")
        return None
    except pynvml.NVMLError as error:
        log.warning("no figures of GPUs: %s", error)
        return None
    return pynvml


def gpu_figures(nvml: Any, visible: str | None) -> dict[str, dict[str, float]]:
    """``GPU_READINGS`` by NVML's number of each GPU in ``visible``, as in CUDA_VISIBLE_DEVICES (None: all).

    A slice of a GPU (MIG) has its name instead. What is lost or not supported has no figures.
    """
    found: dict[str, dict[str, float]] = {}
    with suppress(nvml.NVMLError):
        names = visible.split(",") if visible is not None else map(str, range(nvml.nvmlDeviceGetCount()))
        for name in filter(None, map(str.strip, names)):
            with suppress(nvml.NVMLError):
                of_name = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
                gpu = of_name(int(name) if name.isdigit() else name)
                number = name if name.startswith("MIG") else str(nvml.nvmlDeviceGetIndex(gpu))
                figures = found.setdefault(number, {})
                for figure, read in GPU_READINGS.items():
                    with suppress(nvml.NVMLError):
                        figures[figure] = read(nvml, gpu)
    return found


class ProcessMeter:
    """CPU time and memory of this process and its descendants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._root = clock, psutil.Process()
        self._before, self._before_s = dict[psutil.Process, float](), clock() - time.time() + self._root.create_time()

    def figures(self) -> dict[str, float]:
        """Since the call before, or the start of the process. Time of a descendant that has ended does not count."""
        seconds, nbytes, now_s = dict[psutil.Process, float](), 0, self._clock()
        for process in (self._root, *self._root.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended
                seconds[process] = sum(process.cpu_times()[:2])  # user and system
                nbytes += process.memory_info().rss
        cores = {  # in use, on average
            process: (spent - self._before.get(process, 0.0)) / max(1.0, now_s - self._before_s)
            for process, spent in seconds.items()
        }
        self._before, self._before_s = seconds, now_s
        share = sum(cores.values()) / (psutil.cpu_count() or 1)
        return {"cpu_share": share, "core_share": cores[self._root], "memory_gib": nbytes / 2**30}


class Rounds:
    """`joined` figures of several rounds as one: their mean, or ``EXTREMES``. Callable from any thread."""

    def __init__(self) -> None:
        self._lock, self._taken = threading.Lock(), False
        self._found: dict[str, tuple[int, float]] = {}  # rounds, and what they are as one

    def add(self, metrics: Mapping[str, float]) -> None:
        with self._lock:
            if self._taken:
                self._found, self._taken = {}, False
            for tag, value in metrics.items():
                n, before = self._found.get(tag, (0, value))
                extreme = EXTREMES.get(tag.rpartition("/")[2])
                mean = before + (value - before) / (n + 1)
                self._found[tag] = n + 1, extreme(before, value) if extreme else mean

    def take(self) -> dict[str, float]:
        """The rounds since the call before; the same again if there is none."""
        with self._lock:
            self._taken = True
            return {tag: value for tag, (_, value) in self._found.items()}


class MachineWatch:
    """Writes this process's `MachineUse` now and every ``EVERY_S``, in a thread; a failure is a warning.

    ``device`` is that of a role that computes, else "cpu". ``figures`` are further ones of ``FIGURES``; the thread
    calls it. ``collects``: ``rounds`` has what all processes wrote.
    """

    def __init__(
        self,
        run_folder: RunFolder,
        role: str,
        index: int,
        *,
        device: str = "cpu",
        figures: Callable[[], Mapping[str, float]] = dict,
        collects: bool = False,
    ) -> None:
        self.rounds = Rounds()
        self._role, self._target = role, run_folder.status(f"{role}-{index}").with_suffix(".json")
        self._collects, self._device, self._figures = collects, device, figures
        self._seen: dict[str, tuple[bytes, float]] = {}  # content of each file, and since when
        self._stop = threading.Event()
        watched_thread("machine", self._run, lambda failed: log.warning("no figures of this machine: %s", failed))

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        nvml, meter = load_nvml() if self._device == "cuda" else None, ProcessMeter()
        while True:
            figures = meter.figures() | dict(self._figures())
            gpus = gpu_figures(nvml, os.environ.get(VISIBLE["cuda"])) if nvml else {}
            try:
                if self._collects:
                    figures["disk_free_gib"] = shutil.disk_usage(self._target.parent).free / 2**30
                use = MachineUse(role=self._role, node=os.uname().nodename, figures=figures, gpus=gpus)
                write_file(self._target, msgspec.json.encode(use))
                if self._collects:
                    self.rounds.add(joined(self._collect(time.monotonic())))
            except OSError as error:
                log.warning("figures of this machine: %s", error)
            if self._stop.wait(EVERY_S):
                return

    def _collect(self, now_s: float) -> list[MachineUse]:
        """What all processes wrote; a file that has not changed for ``STALE_S`` is that of one that has ended."""
        for path in self._target.parent.glob("[!.]*.json"):
            with suppress(FileNotFoundError):
                if (raw := path.read_bytes()) != self._seen.get(path.name, (b"", 0.0))[0]:
                    self._seen[path.name] = raw, now_s
        fresh = (raw for raw, since_s in self._seen.values() if now_s < since_s + STALE_S)
        return [msgspec.json.decode(raw, type=MachineUse) for raw in fresh]

"""A machine's GPUs as ``pynvml`` presents them.

It hides what only a driver has: whether a figure is true, how long a reading takes, and handles of slices (MIG), whose
names only the driver resolves. Names and parameters of its functions are compared with the package's
(`test_the_fake_has_the_functions_of_the_package`); `tests/gpu/test_4_machine.py` reads a real GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

RESERVED = 500 << 20
"""Bytes that the driver reserves: in use by the first version of `nvmlDeviceGetMemoryInfo` alone."""


class NvmlError(Exception):
    pass


@dataclass(frozen=True)
class FakeGpu:
    """``utilisation`` in percent; None: a device that has no such figure, as a slice of one. ``lost``: off the bus."""

    uuid: str
    used_gib: float
    utilisation: int | None
    milliwatts: int = 300_500
    celsius: int = 40
    lost: bool = False

    def reading(self, value: float | None) -> float:
        if value is None or self.lost:
            raise NvmlError("GPU is lost" if self.lost else "Not Supported")
        return value


@dataclass(frozen=True)
class FakeNvml:
    """``driver`` is False once the driver has been unloaded."""

    gpus: tuple[FakeGpu, ...]
    driver: bool = True
    NVMLError = NvmlError
    NVML_TEMPERATURE_GPU = 0
    nvmlMemory_v2 = 2

    def nvmlDeviceGetCount(self) -> int:
        if not self.driver:
            raise NvmlError("Uninitialized")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise NvmlError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        found = [gpu for gpu in self.gpus if gpu.uuid == uuid]
        if not found:
            raise NvmlError("Not Found")
        return found[0]

    def nvmlDeviceGetIndex(self, handle: FakeGpu) -> int:
        return self.gpus.index(handle)

    def nvmlDeviceGetMemoryInfo(self, handle: FakeGpu, version: int | None = None) -> SimpleNamespace:
        reserved = 0 if version == self.nvmlMemory_v2 else RESERVED
        return SimpleNamespace(total=80 << 30, used=int(handle.reading(handle.used_gib * 2**30)) + reserved)

    def nvmlDeviceGetUtilizationRates(self, handle: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(gpu=handle.reading(handle.utilisation), memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:
        return int(handle.reading(handle.milliwatts))

    def nvmlDeviceGetTemperature(self, handle: FakeGpu, sensor: int) -> int:
        if sensor != self.NVML_TEMPERATURE_GPU:
            raise NvmlError("Invalid Argument")
        return int(handle.reading(handle.celsius))

"""A machine's GPUs as ``pynvml`` presents them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace


class NvmlError(Exception):
    pass


@dataclass(frozen=True)
class FakeGpu:
    """``utilisation`` in percent; None: a device that has no such figure, as a slice of one (MIG)."""

    uuid: str
    used_gib: float
    utilisation: int | None


@dataclass(frozen=True)
class FakeNvml:
    gpus: tuple[FakeGpu, ...]
    NVMLError = NvmlError

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if index >= len(self.gpus):
            raise NvmlError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        return next(gpu for gpu in self.gpus if gpu.uuid == uuid)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30, used=int(gpu.used_gib * 2**30))

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> SimpleNamespace:
        if gpu.utilisation is None:
            raise NvmlError("Not Supported")
        return SimpleNamespace(gpu=gpu.utilisation, memory=0)

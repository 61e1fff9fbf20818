"""Small messages between trainer ranks, apart from the groups that train."""

from __future__ import annotations

from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from areal_lora.errors import PublishError


class Exchange(Protocol):
    """Collective over all trainer ranks; called from each rank's main thread in the same order."""

    @property
    def rank(self) -> int: ...

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What every rank gave, in rank order. Raises PublishError if a rank does not come."""
        ...


class SoloExchange:
    """A trainer of one rank."""

    rank = 0

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


class GroupExchange:
    """A gloo group of its own over all ranks of the default process group (made collectively)."""

    def __init__(self, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank()
        self._world = dist.get_world_size()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world)]
            dist.all_gather(sizes, torch.tensor([len(data)]), group=self._group)
            widest = max(int(s) for s in sizes)
            padded = torch.zeros(max(widest, 1), dtype=torch.uint8)
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
            rows = [torch.empty_like(padded) for _ in range(self._world)]
            dist.all_gather(rows, padded, group=self._group)
        except RuntimeError as e:
            raise PublishError(
                f"trainer rank {self.rank}: a trainer rank is gone or late ({str(e).splitlines()[0]}); see its log"
            ) from e
        return [bytes(row[: int(size)].numpy()) for row, size in zip(rows, sizes, strict=True)]

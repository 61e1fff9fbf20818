"""The exchange of one rank, without torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


class SoloExchange:
    """Exchange of a trainer with one rank."""

    rank = 0

    def all_gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        return [data]

    def broadcast_bytes(self, data: bytes | None, timeout_s: float | None = None) -> bytes:
        assert data is not None
        return data

    def scatter(self, part: Callable[[int], np.ndarray], of_ranks: Sequence[int], room: np.ndarray) -> None:
        assert list(of_ranks) == [0]

    def send(self, data: np.ndarray, to: int) -> None:
        raise AssertionError("a trainer of one rank has no other rank")

    def receive(self, room: np.ndarray, source: int) -> None:
        raise AssertionError("a trainer of one rank has no other rank")

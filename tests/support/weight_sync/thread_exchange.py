"""Exchange between trainer ranks that are threads of one process."""

from __future__ import annotations

import threading

from areal_lora.errors import PublishError


class ThreadExchange:
    """An ``Exchange`` between ranks that are threads of one process."""

    def __init__(self, rank: int, meeting: threading.Barrier, messages: list[bytes]) -> None:
        self.rank, self._meeting, self._messages = rank, meeting, messages

    @classmethod
    def world(cls, size: int) -> list[ThreadExchange]:
        meeting, messages = threading.Barrier(size), [b""] * size
        return [cls(rank, meeting, messages) for rank in range(size)]

    def all_gather_bytes(self, data: bytes, timeout_s: float | None = None) -> list[bytes]:
        self._messages[self.rank] = data
        try:
            self._meeting.wait(timeout_s)
            messages = list(self._messages)
            self._meeting.wait(timeout_s)
        except threading.BrokenBarrierError:
            raise PublishError(f"trainer rank {self.rank}: a trainer rank is gone or late; see its log") from None
        return messages

    def broadcast_bytes(self, data: bytes | None, timeout_s: float | None = None) -> bytes:
        return self.all_gather_bytes(data or b"", timeout_s)[0]

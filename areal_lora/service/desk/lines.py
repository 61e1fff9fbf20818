"""Which numbers of each adapter are to be sent now, over one connection to rank 0 after another. Pure."""

from __future__ import annotations

from dataclasses import dataclass

AHEAD = 16
"""Operations that an adapter is sent ahead of their outcomes."""


@dataclass(slots=True)
class _Line:
    """``next`` is the number to send next, ``heard`` the newest one with an outcome."""

    next: int
    heard: int


class Lines:
    """Begins where the trainer `Expects`; nothing is sent of an adapter that it has not named since the last one."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def expected(self, adapter: str, number: int) -> None:
        self._lines[adapter] = _Line(number, number - 1)

    def closed(self, adapter: str) -> None:
        self._lines.pop(adapter, None)

    def heard(self, adapter: str, number: int) -> None:
        """The trainer has carried out ``number``, whoever sent that."""
        if (line := self._lines.get(adapter)) is not None:
            line.heard = max(line.heard, number)
            line.next = max(line.next, number + 1)

    def due(self, adapter: str) -> tuple[int, int] | None:
        """The number from which on operations may be sent, and how many; None for none."""
        line = self._lines.get(adapter)
        if line is None or (most := AHEAD - (line.next - 1 - line.heard)) <= 0:
            return None
        return line.next, most

    def sends(self, adapter: str, number: int) -> bool:
        """Whether ``number`` is still what is to be sent next; it then counts as sent."""
        line = self._lines.get(adapter)
        if line is None or line.next != number:
            return False  # the trainer has begun again meanwhile
        line.next += 1
        return True

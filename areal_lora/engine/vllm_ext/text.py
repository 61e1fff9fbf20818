"""The text of an answer that is made in several parts, and the stop strings that may end it across two of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # prompt tokens that tell how the first token of the answer is spelled
PENDING = 4  # tokens that may be a part of one character


class AnswerText:
    """Grows token by token; ``text`` is complete, but for a character of which not all bytes are there."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(prompt[-CONTEXT:])
        self._seen, self._read = 0, len(self._ids)  # of _ids; text comes from what the tokens after _read add
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._given = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> bool:
        """Whether this token has completed a stop string; ``text`` then ends before it."""
        self._ids.append(token)
        before, now = self._decode(self._ids[self._seen : self._read]), self._decode(self._ids[self._seen :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._read < PENDING:
            return False
        begin = len(self.text)
        self.text += now[len(before) :]
        self._seen, self._read = self._read, len(self._ids)
        found = [(at + len(s), at) for s in self._stop if (at := self.text.find(s, max(0, begin - len(s) + 1))) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)[1]], True
        return self.stopped

    def take(self, finished: bool) -> str:
        """What was not given out before, without what may be the beginning of a stop string."""
        end = len(self.text) if finished else max(self._given, len(self.text) - self._hold)
        piece, self._given = self.text[self._given : end], max(self._given, end)
        return piece

"""Decode the text of an answer that arrives in parts, and find stop strings across parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

CONTEXT = 6  # prompt tokens that decide how the first token of the answer is decoded
PENDING = 4  # largest number of tokens of one character


class AnswerText:
    """Decode token by token; ``text`` lacks only a last character whose bytes are incomplete."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(prompt[-CONTEXT:])
        self._seen, self._read = 0, len(self._ids)  # of _ids; text comes from what the tokens after _read add
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._given = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> bool:
        """Add a token and return whether it completes a stop string; ``text`` then ends before the string."""
        self._ids.append(token)
        before, now = self._decode(self._ids[self._seen : self._read]), self._decode(self._ids[self._seen :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._read < PENDING:
            return False
        start = len(self.text)
        self.text += now[len(before) :]
        self._seen, self._read = self._read, len(self._ids)
        found = [(at + len(s), at) for s in self._stop if (at := self.text.find(s, max(0, start - len(s) + 1))) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)[1]], True
        return self.stopped

    def take(self, finished: bool) -> str:
        """Return the text since the last call, without a possible beginning of a stop string."""
        end = len(self.text) if finished else max(self._given, len(self.text) - self._hold)
        piece, self._given = self.text[self._given : end], max(self._given, end)
        return piece

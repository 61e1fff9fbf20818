"""The picture of how several adapters share the trained tokens over time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from areal_lora.obs.metrics.records import Record, ResumeRecord, StepRecord
from areal_lora.obs.report import svg

BARS = 80
TURNS, MIN_BARS = 2, 4
"""A bar holds so many steps of each adapter on average, unless there would be fewer bars than these."""
DRAWN = 6
"""Adapters with a colour of their own; the rest is drawn as one."""
REST = "others"
UNITS = ((36_000.0, 3600.0, "hours"), (600.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
"""From this many seconds on, the axis has this many seconds in a unit of this name."""


class Shares:
    """Sums trained tokens by adapter over equal spans of time; ``add`` valid records. Memory is bounded.

    A span is a second at first; when there are more than ``BARS``, its length doubles and neighbours are merged.
    """

    def __init__(self, adapters: Sequence[str]) -> None:
        self._names = list(adapters)
        self._span_s = 1.0
        self._tokens: dict[int, Counter[str]] = {}
        self._steps = 0
        self._resumed_s: list[float] = []

    def add(self, record: Record) -> None:
        match record:
            case StepRecord():
                span = self._tokens.setdefault(int(record.time_s // self._span_s), Counter())
                self._steps += 1
                span[record.adapter] += record.trained_tokens
                while max(self._tokens) >= BARS:
                    self._merge()
            case ResumeRecord():
                self._resumed_s.append(record.time_s)
            case _:
                pass

    def rows(self) -> list[tuple[float, dict[str, float]]]:
        """(middle of a bar in seconds, share by adapter), from the start to the last step; 0 where none was trained."""
        spans = max(self._tokens, default=-1) + 1
        bars = min(BARS, max(MIN_BARS, self._steps // (TURNS * len(self._names))))
        width, found = max(1, math.ceil(spans / bars)), []
        for start in range(0, spans, width):
            tokens: Counter[str] = Counter()
            for place in range(start, start + width):
                tokens.update(self._tokens.get(place, ()))
            total = tokens.total()
            shares = {name: tokens[name] / total if total else 0.0 for name in self._names}
            found.append(((start + width / 2) * self._span_s, shares))
        return found

    def draw(self) -> str:
        rows = self.rows()
        last_s = rows[-1][0] if rows else 0.0
        unit_s, unit = next((size, name) for limit, size, name in UNITS if last_s >= limit)
        layers = {name: [shares[name] for _, shares in rows] for name in self._names}
        sums = sum(self._tokens.values(), Counter[str]())
        largest = sorted(self._names, key=lambda name: -sums[name])
        drawn = [name for name in self._names if name in largest[: DRAWN if len(largest) > DRAWN + 1 else None]]
        columns = {name: layers[name] for name in drawn}
        if rest := [layers[name] for name in self._names if name not in drawn]:
            columns[REST] = [sum(values) for values in zip(*rest, strict=True)]
        times = [at / unit_s for at, _ in rows]
        marks = [at / unit_s for at in self._resumed_s]
        return svg.stacked_bars(times, columns, x_label=f"{unit} since the start", max_bars=BARS, marks=marks)

    def _merge(self) -> None:
        self._span_s *= 2
        merged: dict[int, Counter[str]] = {}
        for place, tokens in self._tokens.items():
            merged.setdefault(place // 2, Counter()).update(tokens)
        self._tokens = merged

"""Rates between steps from the controller's counters, which go on over restarts of either side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """``servers_idle`` is the fraction of the time in which no group was in flight. None: not known."""

    tokens_per_s: float | None = None
    servers_idle: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    at_s: float
    tokens: int
    idle_s: float


class RateMeter:
    """``fresh`` are the adapters whose counters begin at 0 now; of others the first step tells no rate."""

    def __init__(self, fresh: Iterable[str], now_s: float) -> None:
        self._marks = {name: _Mark(at_s=now_s, tokens=0, idle_s=0.0) for name in fresh}

    def step(self, adapter: str, *, tokens: int, idle_s: float, now_s: float) -> Rates:
        """Rates since the adapter's step before. Counters that went back say nothing."""
        before = self._marks.get(adapter)
        self._marks[adapter] = _Mark(at_s=now_s, tokens=tokens, idle_s=idle_s)
        if before is None or tokens < before.tokens or idle_s < before.idle_s or now_s <= before.at_s:
            return Rates()
        elapsed_s = now_s - before.at_s
        return Rates(
            tokens_per_s=(tokens - before.tokens) / elapsed_s,
            servers_idle=min(1.0, (idle_s - before.idle_s) / elapsed_s),
        )

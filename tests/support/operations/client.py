"""A client of adapters at the service's end of the link: sends from what is expected, keeps what it hears."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from areal_lora.operations.link import ServiceEnd
from areal_lora.operations.protocol import (
    Acknowledgement,
    Datum,
    Durable,
    Expects,
    Operation,
    OperationCompletion,
    OperationFailure,
    Outcome,
    Pass,
    Poison,
    ToService,
    What,
    ends_window,
)
from areal_lora.run_folder.paths import RunFolder

WAIT_S = 300.0


def datum(
    tokens: list[int], weights: list[float], logprobs: list[float] | None = None, advantages: list[float] | None = None
) -> Datum:
    def floats(values: list[float] | None) -> bytes:
        return np.array(values or [], "<f4").tobytes()

    return Datum(
        tokens=np.array(tokens, "<i4").tobytes(),
        weights=floats(weights),
        logprobs=floats(logprobs),
        advantages=floats(advantages),
    )


def floats(data: bytes) -> list[float]:
    return [float(x) for x in np.frombuffer(data, "<f4")]


class Client:
    """All adapters of a run folder, in a thread of its own; its methods are for another one.

    What it is given to do, it sends again from every `Expects` on, with a `Poison` in place of a pass that failed.
    """

    def __init__(self, run_folder: RunFolder) -> None:
        self.heard: list[ToService] = []
        self.expects: dict[str, int] = {}
        self._script: dict[str, list[What]] = defaultdict(list)
        self._news = threading.Condition(threading.RLock())
        self._end = ServiceEnd(run_folder, self._hear)
        self._loop = asyncio.new_event_loop()
        self._running = self._loop.create_task(self._end.run())
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._running)

    def _hear(self, message: ToService) -> None:
        with self._news:
            self.heard.append(message)
            match message:
                case Expects(adapter=adapter, number=number):
                    self.expects[adapter] = number
                    for again in range(number, len(self._script[adapter]) + 1):
                        self._send(adapter, again)
                case OperationCompletion(adapter=adapter, number=number):
                    self._loop.create_task(self._end.send(Acknowledgement(adapter=adapter, number=number)))
            self._news.notify_all()

    def _send(self, adapter: str, number: int) -> None:
        what = self._script[adapter][number - 1]
        failed = self._outcomes(adapter).get(number)
        if isinstance(what, Pass) and isinstance(failed, OperationFailure):
            what = Poison(reason=failed.reason, by_client=failed.by_client)
        self._loop.create_task(self._end.send(Operation(adapter=adapter, number=number, what=what)))

    def _outcomes(self, adapter: str) -> dict[int, Outcome]:
        found: dict[int, Outcome] = {}
        for m in self.heard:
            if isinstance(m, OperationCompletion) and m.adapter == adapter:
                found.setdefault(m.number, m.outcome)
        return found

    def do(self, adapter: str, *whats: What) -> list[Any]:
        """Add operations, and wait for their outcomes."""
        last = self.begin(adapter, *whats)
        self.wait(lambda: last in self._outcomes(adapter))
        return [self._outcomes(adapter)[n] for n in range(last - len(whats) + 1, last + 1)]

    def begin(self, adapter: str, *whats: What) -> int:
        """Add operations without waiting; returns the number of the last one."""
        with self._news:
            begin = len(self._script[adapter]) + 1
            self._script[adapter] += whats
            last = len(self._script[adapter])
            if adapter in self.expects:
                for number in range(begin, last + 1):
                    self._loop.call_soon_threadsafe(self._send, adapter, number)
        return last

    def outcomes(self, adapter: str) -> dict[int, Outcome]:
        with self._news:
            return self._outcomes(adapter)

    def settle(self, adapter: str) -> None:
        """Wait until a checkpoint has the newest version of which there is an answer."""
        found = self.outcomes(adapter)
        made = [n for n, what in enumerate(self._script[adapter], 1) if ends_window(what) and n in found]
        self.wait(lambda: max(self.durable(adapter), default=0) >= max(made, default=0))

    def durable(self, adapter: str) -> list[int]:
        with self._news:
            return [m.number for m in self.heard if isinstance(m, Durable) and m.adapter == adapter]

    def wait(self, ready: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(ready, WAIT_S), f"waited for {WAIT_S:.0f} s; heard {self.heard[-5:]}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._running.cancel)
        self._thread.join(150)

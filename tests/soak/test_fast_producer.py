"""Servers ten times faster than the trainer: queue, memory and ledger file stay bounded.

The nightly run stretches twice as many steps over ten minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.rollout.fake_server import FakeServer
from tests.support.rollout.helpers import NAME
from tests.support.rollout.running import Running
from tests.support.sizes import size

STEPS, WARM_UP, ETA, B = size(400, 800), 100, 4, 4
SECONDS = size(5, 600)


class LastOnly(list[dict[str, Any]]):
    """A server's memory of its requests, which a long test must not keep."""

    def append(self, request: dict[str, Any]) -> None:
        if len(self) > 100:
            self.clear()
        super().append(request)


def long_answer(prompt: list[int], sample: int) -> tuple[list[int], str]:
    return [1000 + sample] * 200 + [2], f"{sum(prompt)}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 260)
def test_a_fast_producer_is_held_back(controller: Callable[..., Running], tmp_path: Path) -> None:
    server = FakeServer(answer=long_answer, requests=LastOnly())
    run = controller(server, eta=ETA, b=B, steps=STEPS)
    process, base, most_held, most_bytes = psutil.Process(), 0, 0, 0
    start = time.monotonic()
    for step in range(STEPS):
        run.activate(step)
        server.models.discard(f"{NAME}@v{step - ETA - 2}")
        assert len(run.batch(step).groups) == B
        run.client.commit(NAME, step)
        stats = run.stats(NAME)
        most_held = max(most_held, stats.issued - stats.consumed - stats.leased - sum(stats.dropped.values()))
        most_bytes = max(most_bytes, sum(f.stat().st_size for f in tmp_path.glob("ledger.sqlite*")))
        if step == WARM_UP:
            base = process.memory_info().rss
        time.sleep(max(0.0, start + (step + 1) * SECONDS / STEPS - time.monotonic()))
    wall_s, grown = time.monotonic() - start, process.memory_info().rss - base
    busy = 1 - run.stats(NAME).idle_s / wall_s
    print(
        f"{wall_s:.0f} s, {STEPS * B} groups, at most {most_held} held, rollouts busy {busy:.0%}, "
        f"RSS +{grown / 2**20:.1f} MiB, ledger at most {most_bytes / 2**20:.1f} MiB"
    )
    assert most_held <= (ETA + 1) * B
    assert grown <= 64 * 2**20
    assert most_bytes <= 16 * 2**20
    if SECONDS >= 300:  # else a busy machine may not be ten times faster than the consumer
        assert busy < 0.5

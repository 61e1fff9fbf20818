"""What a server counts, with a clock of the test's own."""

from __future__ import annotations

import pytest

from areal_lora.engine.vllm_ext.generate import RequestCounters

pytestmark = pytest.mark.slow  # importing vLLM


def test_idle_is_the_time_without_a_running_sequence() -> None:
    now = [100.0]
    counters = RequestCounters(4, clock=lambda: now[0])

    def after(seconds: float) -> tuple[float, float]:
        now[0] += seconds
        stats = counters.stats()
        return stats.idle_s, stats.up_s

    assert after(3.0) == (3.0, 3.0)
    counters.begin(2)
    assert after(5.0) == (3.0, 8.0)
    counters.begin(6)
    counters.end(2)
    assert (counters.stats().running, counters.stats().waiting) == (4, 2)
    assert after(1.0) == (3.0, 9.0)
    counters.end(6)
    assert after(2.0) == (5.0, 11.0)
    counters.begin(1)
    counters.end(1)
    assert after(0.5) == (5.5, 11.5)

"""What a server counts, with a clock of the test's own; what remains of a request that is cut off."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.lazy import Lazy

engine = Lazy("areal_lora.engine.vllm_ext.compat.engine")
generate = Lazy("areal_lora.engine.vllm_ext.server.generate")

pytestmark = pytest.mark.slow  # importing vLLM


def test_idle_is_the_time_without_a_running_sequence() -> None:
    now = [100.0]
    counters = generate.RequestCounters(clock=lambda: now[0])

    def after(seconds: float) -> tuple[float, float]:
        now[0] += seconds
        stats = counters.stats()
        return stats.idle_s, stats.up_s

    assert after(3.0) == (3.0, 3.0)
    counters.start(2)
    assert after(5.0) == (3.0, 8.0)
    counters.start(6)
    counters.end(2)
    assert after(1.0) == (3.0, 9.0)
    counters.end(6)
    assert after(2.0) == (5.0, 11.0)
    counters.start(1)
    counters.end(1)
    assert after(0.5) == (5.5, 11.5)
    assert "prefix_cache_share" not in counters.figures(), "no request has ended"
    for ended, cached in ((80, 60), (40, 10)):
        counters.prompt_tokens += 1000  # of running requests, too
        counters.ended_prompt_tokens += ended
        counters.cached_tokens += cached
        assert counters.figures()["prefix_cache_share"] == cached / ended
    assert "prefix_cache_share" not in counters.figures()


def test_preemptions_are_counted_once_and_told_by_time() -> None:
    now = [100.0]
    counters = generate.RequestCounters(clock=lambda: now[0])

    def rate(seconds: float, running: int = 0, waiting: int = 0, **preempted: int) -> float:
        now[0] += seconds
        counters.take(engine.EngineLoad(0.5, running, waiting, preempted))
        figures = counters.figures()
        assert (figures["sequences_running"], figures["sequences_waiting"]) == (running, waiting)
        return float(figures["preemptions_per_s"])

    assert rate(10.0, 3, 237) == 0
    assert rate(10.0, 2, 238, a=2, b=1) == 0.3
    assert rate(10.0, a=2, b=2, c=4) == 0.5
    assert rate(5.0, b=2) == 0, "others have ended"
    assert counters.stats().preemptions == 8


class SlowEngine:
    """Knows a request from the beginning of ``add_request`` on, by an id of its own, as vLLM's engine does."""

    errored = False

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.entered = asyncio.Event()

    async def add_request(self, request_id: str, *_: Any, **__: Any) -> Any:
        self.known[f"{request_id}-internal"] = request_id
        self.entered.set()
        await asyncio.Event().wait()  # the engine's process is busy

    async def abort(self, request_id: str, internal: bool = False) -> None:
        await asyncio.sleep(0)
        self.known = {own: given for own, given in self.known.items() if (own if internal else given) != request_id}


def test_a_request_that_is_cut_off_while_it_is_handed_over_leaves_nothing_in_the_engine() -> None:
    async def main() -> tuple[dict[str, str], generate.RequestCounters]:
        engine: Any = SlowEngine()
        generator = generate.Generator(
            engine=engine, max_model_len=64, vocab_size=9, counters=generate.RequestCounters()
        )
        lease: Any = SimpleNamespace(name="math@v1", ref=None, incarnation=0, lora=None)
        params: Any = SimpleNamespace(n=1, prompt_logprobs=None)

        async def ask() -> None:
            async with aclosing(generator.stream([1, 2], params, lease)) as outputs:
                async for _ in outputs:
                    pass

        asking, other = asyncio.create_task(ask()), asyncio.create_task(ask())
        await engine.entered.wait()
        await asyncio.sleep(0)
        assert len(engine.known) == 2
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        left, counters = dict(engine.known), generator.counters
        assert (counters.in_flight, counters.aborted) == (1, 1)
        other.cancel()
        await asyncio.wait([other])
        assert engine.known == {}
        return left, counters

    left, counters = asyncio.run(main())
    assert list(left.values()) == ["math@v1-1"], "the other request is untouched"
    assert (counters.in_flight, counters.aborted) == (0, 2)

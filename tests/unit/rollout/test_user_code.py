"""User code is called where it can do least harm, and what it raises is typed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from areal_lora.errors import RolloutError
from areal_lora.rollout import user_code
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.user_code import call
from tests.support.clocks import wait_until

ENV = FaultKind.ENVIRONMENT


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end, so that no test leaves a thread to the next."""
    event = threading.Event()
    yield event
    event.set()
    wait_until(lambda: not any(t.name.startswith(user_code._ABANDONED) for t in threading.enumerate()))


def where() -> int:
    return threading.get_ident()


async def where_async() -> int:
    return threading.get_ident()


def makes_coroutine() -> Any:
    return where_async()


def test_only_coroutines_run_in_the_event_loop() -> None:
    here = threading.get_ident()
    assert asyncio.run(call(ENV, "math", where)) != here
    assert asyncio.run(call(ENV, "math", where_async)) == here
    assert asyncio.run(call(ENV, "math", makes_coroutine)) == here


@pytest.mark.parametrize("error", [StopIteration(), SystemExit(3), ValueError("x"), TimeoutError()])
def test_whatever_it_raises_is_a_fault(error: BaseException) -> None:
    def function() -> None:
        raise error

    async def coroutine() -> None:
        raise error

    for raising in (function, coroutine):
        # Out of a coroutine Python makes a RuntimeError of StopIteration.
        name = "RuntimeError: .*StopIteration" if isinstance(error, StopIteration) else type(error).__name__
        with pytest.raises(GenerationFault, match=f"environment: {name}"):
            asyncio.run(call(ENV, "math", raising))


def test_faults_and_errors_of_the_package_pass_as_they_are() -> None:
    def function(error: Exception) -> None:
        raise error

    with pytest.raises(GenerationFault, match="connection: gone"):
        asyncio.run(call(ENV, "math", function, GenerationFault(FaultKind.CONNECTION, "gone")))
    with pytest.raises(RolloutError, match="closed"):
        asyncio.run(call(ENV, "math", function, RolloutError("closed")))


def test_a_thread_that_hangs_is_left_alone_until_there_are_too_many(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code, "MAX_ABANDONED", 2)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await call(ENV, "math", release.wait)
        with pytest.raises(RolloutError, match="2 calls of user code of math hang"):
            await call(ENV, "math", where)
        assert await call(ENV, "poems", where), "another adapter has threads of its own"
        release.set()
        while any(t.name.startswith(user_code._ABANDONED) for t in threading.enumerate()):
            await asyncio.sleep(0.01)
        assert await call(ENV, "math", where)

    asyncio.run(main())


def test_a_thread_may_end_after_the_loop(release: threading.Event) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call(ENV, "math", release.wait)

    asyncio.run(main())  # ends although the thread does not


def test_code_that_cancels_itself_is_a_fault_and_not_the_end_of_its_group() -> None:
    async def awaits_a_task_it_cancelled() -> None:
        task = asyncio.create_task(asyncio.sleep(9))
        task.cancel()
        await task

    def loop_of_its_own() -> None:
        asyncio.run(awaits_a_task_it_cancelled())

    for raising in (awaits_a_task_it_cancelled, loop_of_its_own):
        with pytest.raises(GenerationFault, match="environment: CancelledError"):
            asyncio.run(call(ENV, "math", raising))


def test_a_call_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def main() -> None:
        task = asyncio.create_task(call(ENV, "math", asyncio.sleep, 9))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await call(ENV, "math", asyncio.sleep, 9)

    asyncio.run(main())

"""Calls of user code from the controller's event loop.

User code of `multi_turn` environments and custom workflows is trusted: it runs in the controller's process, unlike
rewards. What it raises is a typed fault of its group, never the end of the controller.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from areal_lora.errors import ArealLoraError, RolloutError
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.tasks.reward_calls import Traces, cause_of, describe, trace

MAX_ABANDONED = 64
"""Threads of one adapter that may be stuck; another adapter's do not count."""
_ABANDONED = "areal_lora-abandoned-"
_traces = Traces()


async def call(kind: FaultKind, adapter: str, function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Any:
    """The function's result: a coroutine function runs here, anything else in a thread of its own.

    It is code of ``adapter``. The caller bounds it with ``asyncio.timeout``. An abandoned thread cannot be stopped; its
    result is dropped. Raises GenerationFault of ``kind`` for what the function raises, RolloutError when
    ``MAX_ABANDONED`` threads of the adapter are stuck.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments, **keywords)
        result = await _in_thread(adapter, partial(function, *arguments, **keywords))
        return await result if inspect.isawaitable(result) else result
    except ArealLoraError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The task itself was not cancelled: passed on, the error would end it silently, and its group without a retry.
        raise GenerationFault(kind, describe(error, function)) from error
    except (Exception, SystemExit) as error:  # fault boundary: user code may fail in any way
        detail = describe(error, function)
        _traces.log(f"the {kind} of {adapter}", detail, trace(error))
        raise GenerationFault(kind, detail, cause_of(error, alone=False)) from error


async def _in_thread(adapter: str, work: Callable[[], Any]) -> Any:
    """A daemon thread for each call: one that hangs holds up neither other calls nor the controller's end."""
    abandoned = _ABANDONED + adapter
    stuck = sum(thread.name == abandoned for thread in threading.enumerate())
    if stuck >= MAX_ABANDONED:
        raise RolloutError(
            f"{stuck} calls of user code of {adapter} hang in threads that nothing can stop "
            "(fix: give the environment's or agent's waits time-outs below sampling.timeout_s, or make it async)"
        )
    # Pairs, because an asyncio future takes neither StopIteration nor SystemExit as its exception.
    future = Future[tuple[Any, BaseException | None]]()
    future.set_running_or_notify_cancel()  # from here on a caller's cancellation leaves it as it is

    def run() -> None:
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = work(), None
        except BaseException as error:  # fault boundary: raised again where the future is awaited  # noqa: BLE001
            outcome = None, error
        future.set_result(outcome)

    thread = threading.Thread(target=run, name="areal_lora-user-code", daemon=True)
    thread.start()
    try:
        result, error = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        thread.name = abandoned
        raise
    if error is not None:
        raise error
    return result

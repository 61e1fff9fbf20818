"""Calls of user code from the controller's event loop, and trajectories from what it and the model wrote.

User code (environments, agents, workflows) is trusted: it runs in the controller's process, unlike rewards. What it
raises is a typed fault of its group, never the end of the controller.

`PackedTurns` is the only place of the rollout plane that lays tokens out (contract C10): entry t of every array
describes token t, and the loss mask is on exactly where the model itself sampled::

    token_ids         p0  p1 | a0  a1  a2 | r0  r1 | b0  b1
    loss_mask          0   0    1   1   1    0   0    1   1
    rollout_logprobs   0   0  -.2 -.7 -.1    0   0  -.3 -.4
    versions          -1  -1    4   4   4   -1  -1    5   5

Tokens are never made from text again once they exist: what the model sampled is what is trained on.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal_lora.errors import ArealLoraError, RolloutError
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.tasks.reward_calls import Traces, cause_of, describe, trace
from areal_lora.tasks.scorer import Score
from areal_lora.types import AdapterRef, Generation, Trajectory

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
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            outcome = partial(_settle, future, work(), None)
        except BaseException as error:  # fault boundary: raised again where the future is awaited  # noqa: BLE001
            outcome = partial(_settle, future, None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(outcome)

    thread = threading.Thread(target=run, name="areal_lora-user-code", daemon=True)
    thread.start()
    try:
        result, error = await future
    except asyncio.CancelledError:
        thread.name = abandoned
        raise
    if error is not None:
        raise error
    return result


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    # A pair, because a future takes neither StopIteration nor SystemExit as its exception.
    if not future.done():
        future.set_result((result, error))


@dataclass(slots=True)
class PackedTurns:
    """One growing sequence: the prompt, then in turn the model's answers and the replies."""

    token_ids: list[int] = field(default_factory=list)  # [T], as all below
    loss_mask: list[int] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""

    def given(self, token_ids: Sequence[int]) -> None:
        """Append what the model did not sample: the prompt, or a reply."""
        n = len(token_ids)
        self.token_ids += token_ids
        self.loss_mask += [0] * n
        self.rollout_logprobs += [0.0] * n
        self.versions += [-1] * n

    def sampled(self, answer: Generation) -> None:
        """Append what the model answered to all of the tokens so far."""
        self.token_ids += answer.token_ids
        self.loss_mask += [1] * len(answer.token_ids)
        self.rollout_logprobs += answer.logprobs
        self.versions += answer.versions
        self.finish_reason = answer.finish_reason

    def trajectory(self, uid: str, sample: int, adapter: str, score: Score) -> Trajectory:
        """At least one answer must be there; its oldest token's version is the trajectory's."""
        return Trajectory(
            uid=uid,
            sample=sample,
            adapter=AdapterRef(name=adapter, version=min(v for v in self.versions if v >= 0)),
            token_ids=self.token_ids,
            loss_mask=self.loss_mask,
            rollout_logprobs=self.rollout_logprobs,
            versions=self.versions,
            reward=score.reward,
            outcome=score.outcome,
            finish_reason=self.finish_reason,
            detail=score.detail,
            components=dict(score.components),
            correct=score.correct,
            cause=score.cause,
        )


def join(conversations: list[PackedTurns], prompt_ids: Sequence[int], answer: Generation) -> PackedTurns:
    """Record one completion, and return the conversation it now is the end of.

    It continues the longest of ``conversations`` whose tokens its prompt starts with, else it starts one of its own.
    """
    fitting = [c for c in conversations if c.token_ids == prompt_ids[: len(c.token_ids)]]
    conversation = max(fitting, key=lambda c: len(c.token_ids), default=None)
    if conversation is None:
        conversation = PackedTurns()
        conversations.append(conversation)
    conversation.given(prompt_ids[len(conversation.token_ids) :])
    conversation.sampled(answer)
    return conversation

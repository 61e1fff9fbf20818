"""Run the samples of agents and environments in worker processes (`environment_child`) with their own interpreter.

    AgentWorkflow --task: endpoint, key, sample--> EnvironmentWorkers --pipe--> worker process --HTTP--> agent_gateway
                  <--------- reward, metrics ----                      <------

To the workflow a sample in a worker is an agent: the worker's completions are those of its session. A worker runs many
samples at a time. When it ends, it is started again with the next sample, and its samples are repeated one by one, in
sessions of their own: none of the group's other samples is. A sample that does not end within ``CANCEL_S`` of its
cancellation costs its worker.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import Process
from dataclasses import replace
from functools import partial
from typing import Any, Self

import msgspec

from areal_lora.config.sections.section import Section
from areal_lora.config.sections.task import WorkerWorkflowConfig
from areal_lora.errors import ConfigError, undo_on_error
from areal_lora.processes.watched import watched_task
from areal_lora.rollout import environment_child
from areal_lora.rollout.agents import AgentTask, WorkerLost
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import derived_seed, given_score
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import Cause

START_S = 300.0  # importing an environment with its packages and data
CANCEL_S = 10.0
LARGEST_BYTES = 16 << 20


class WorkflowSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker: its section of the configuration, and folders of modules."""

    settings: dict[str, Any]
    search_path: list[str]


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Start sample ``number``; without a task, cancel it."""

    number: int
    task: dict[str, Any] | None = None


class PlayResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Play`, and with number 0 to `WorkflowSetup`. Without a reward the configured one scores the sample.

    ``reward`` is a number's text, because JSON has no NaN."""

    number: int
    reward: bool | str | None = None
    metrics: dict[str, float] = {}
    error: str = ""
    cause: Cause = Cause.OTHER


class EnvironmentWorkers:
    """``chosen.workers`` processes, used with ``async with``; none for workflows that need none.

    `play` is the agent of an `AgentWorkflow`.
    """

    def __init__(self, chosen: Section) -> None:
        self._workers = list[_Worker]()
        if isinstance(chosen, WorkerWorkflowConfig):
            self._workers += (_Worker(chosen) for _ in range(chosen.workers))

    async def play(self, task: AgentTask) -> Score | None:
        """Score of one sample, None for the configured reward's. Raises GenerationFault, WorkerLost."""
        return await min(self._workers, key=lambda worker: worker.n_running).play(task)

    async def __aenter__(self) -> Self:
        """Start the first worker; the others start with their first sample. Raises ConfigError."""
        for worker in self._workers[:1]:
            await worker.ready()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        for worker in self._workers:
            await worker.close()


class _Worker:
    """One process, and the next one after its end. ``_results`` are by the number of a sample that runs in it."""

    def __init__(self, chosen: WorkerWorkflowConfig) -> None:
        self._chosen = chosen
        self._fault = FaultKind.AGENT if chosen.kind == "agent" else FaultKind.ENVIRONMENT
        self._running: asyncio.Task[Process] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._results: dict[int, asyncio.Future[PlayResult]] = {}
        self.n_running = 0

    async def play(self, task: AgentTask) -> Score | None:
        self.n_running += 1
        try:
            return await self._play(task)
        finally:
            self.n_running -= 1

    async def _play(self, task: AgentTask) -> Score | None:
        try:
            process = await self.ready()
        except ConfigError as error:  # it has started before: this is no reason to end the run
            raise GenerationFault(self._fault, str(error)) from error
        if self._running is None:
            raise WorkerLost("its worker process ended before the sample started")
        fields = {**msgspec.to_builtins(task), "seed": derived_seed(0, task.sample.uid)}
        number = next(self._numbers)
        self._results[number] = result = asyncio.get_running_loop().create_future()
        self._send(process, Play(number=number, task=fields))
        try:
            played = await result
        except asyncio.CancelledError:
            if number in self._results:
                self._send(process, Play(number=number))
                asyncio.get_running_loop().call_later(CANCEL_S, self._kill_if_running, process, number)
            raise
        if played.error:
            raise GenerationFault(self._fault, played.error, played.cause)
        if played.reward is None:
            return None
        reward = played.reward if isinstance(played.reward, bool) else float(played.reward)
        return replace(given_score(reward), components=played.metrics)

    async def ready(self) -> Process:
        """The process, started if none runs. Raises ConfigError where it cannot be started.

        A start continues when the sample that it is for is cancelled: it may take longer than a sample.
        """
        if self._running is None or (self._running.done() and (self._running.cancelled() or self._running.exception())):
            self._running = asyncio.create_task(self._started())
        return await asyncio.shield(self._running)

    async def _started(self) -> Process:
        chosen = self._chosen
        # Without PYTHONPATH and the folder of the script: `workflow` and `agents` are not this package's modules there.
        argv = [chosen.python or sys.executable, "-I", environment_child.__file__]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise ConfigError("workflow.python", f"{argv[0]} cannot be started: {error}", "name a Python") from error
        with undo_on_error(partial(_kill_group, process)):
            await self._set_up(process)
        self._reader = watched_task("environment-worker", partial(self._read, process))
        return process

    async def _set_up(self, process: Process) -> None:
        """Raises ConfigError where the environment cannot be loaded."""
        chosen = self._chosen
        search_path = [os.getcwd()] if chosen.python else [folder or os.getcwd() for folder in sys.path]
        self._send(process, WorkflowSetup(settings=chosen.model_dump(mode="json"), search_path=search_path))
        try:
            async with asyncio.timeout(START_S):
                started = await _received(process)
        except (TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            started = PlayResult(
                number=0, error=f"it does not start: {type(error).__name__}, and its log is the reason"
            )
        if started.error:
            raise ConfigError("workflow", f"its worker: {started.error}", "correct its code")

    def _send(self, process: Process, message: WorkflowSetup | Play) -> None:
        """A worker whose pipe is full does not read: its samples time out, and it is killed."""
        assert process.stdin is not None
        body = msgspec.json.encode(message)
        process.stdin.write(len(body).to_bytes(4, "big") + body)

    async def _read(self, process: Process) -> None:
        """Pass answers on until the process ends or writes anything else."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            while True:
                played = await _received(process)
                if (result := self._results.pop(played.number, None)) is not None and not result.done():
                    result.set_result(played)
        self._running, lost, self._results = None, self._results, {}
        _kill_group(process)
        await process.wait()
        for result in lost.values():
            if not result.done():
                result.set_exception(WorkerLost(f"its worker process ended with status {process.returncode}"))

    def _kill_if_running(self, process: Process, number: int) -> None:
        if number in self._results:  # else it has ended, or its process has
            _kill_group(process)

    async def close(self) -> None:
        if self._running is None:
            return
        if not self._running.cancel() and not self._running.cancelled() and self._running.exception() is None:
            _kill_group(self._running.result())
        if self._reader is not None:
            await self._reader


async def _received(process: Process) -> PlayResult:
    stream = process.stdout
    assert stream is not None
    size = int.from_bytes(await stream.readexactly(4), "big")
    if size > LARGEST_BYTES:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    return msgspec.json.decode(await stream.readexactly(size), type=PlayResult)


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

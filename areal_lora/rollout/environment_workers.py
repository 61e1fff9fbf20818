"""Run the samples of agents and environments in worker processes (`environment_child`) with their own interpreter.

    AgentWorkflow --task: endpoint, key, sample--> EnvironmentWorkers --pipe--> worker process --HTTP--> agent_gateway
                  <--------- reward, metrics ----                      <------

What calls the endpoint is an agent to its workflow: its completions are those of a session. `multi_turn` environments
and custom workflows call the controller over the pipe. A worker runs many samples at a time. When it ends, it is
started again with the next sample, and its samples are repeated one by one: none of the group's other samples is. A
sample that does not end within ``CANCEL_S`` of its cancellation costs its worker.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from areal_lora.config.sections.section import Section
from areal_lora.config.sections.task import WorkerWorkflowConfig
from areal_lora.errors import AlignmentError, ConfigError, undo_on_error
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task
from areal_lora.rollout import environment_child
from areal_lora.rollout.agents import AgentTask
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import Answer, WorkerLost
from areal_lora.rollout.custom_child import ContextFields
from areal_lora.rollout.workflow import derived_seed, given_score
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import Cause

START_S = 300.0  # importing an environment with its packages and data
CANCEL_S = 10.0
MEMORY_S = 1.0  # between two looks at the memory of workers
LARGEST_BYTES = 1 << 30  # routes of the long answers of a custom workflow

log = get_logger(__name__)


class WorkflowSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker: its section of the configuration, and folders of modules."""

    settings: dict[str, Any]
    search_path: list[str]


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Start sample ``number``; without a task, cancel it."""

    number: int
    task: dict[str, Any] | None = None


class CallReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `WorkerCall`."""

    number: int
    request: int
    answer: Any


class WorkerCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="call"):
    """Code of sample ``number`` calls the controller; without a body, it no longer waits for the answer."""

    number: int
    request: int
    body: Any


class PlayResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="result"):
    """Answer to `Play`, and with number 0 to `WorkflowSetup`. Without a reward the configured one scores the sample.

    ``reward`` is a number's text, because JSON has no NaN. A custom workflow has an ``episode``, or one that is
    ``untrainable``. ``fault`` is the kind of an error that is not the code's own.
    """

    number: int
    reward: bool | str | None = None
    metrics: dict[str, float] = {}
    episode: str = ""
    error: str = ""
    fault: FaultKind | None = None
    cause: Cause = Cause.OTHER
    untrainable: bool = False


async def _no_calls(body: Any) -> Any:
    raise GenerationFault(FaultKind.PROTOCOL, "its code calls the endpoint, not the controller")


@dataclass(frozen=True, slots=True)
class _RunningSample:
    """A sample that runs in a worker, and the calls of its code, by number."""

    answer: Answer
    result: asyncio.Future[PlayResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    calls: dict[int, asyncio.Task[Any]] = field(default_factory=dict)

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)


class EnvironmentWorkers:
    """``chosen.workers`` processes, used with ``async with``; none for workflows that need none.

    `play` is the agent of an `AgentWorkflow`. ``context`` is that of the adapter's training.
    """

    def __init__(self, chosen: Section, context: ContextFields) -> None:
        self.context, self._workers, self._most_gib = context, list[_Worker](), None
        self._watch: asyncio.Task[None] | None = None
        if isinstance(chosen, WorkerWorkflowConfig):
            self._most_gib = chosen.memory_gib
            self._workers += (_Worker(chosen, context) for _ in range(chosen.workers))

    async def play(self, task: AgentTask) -> Score | None:
        """Score of one sample, None for the configured reward's. Raises GenerationFault, WorkerLost."""
        played = await self.run({**msgspec.to_builtins(task), "seed": derived_seed(0, task.sample.uid)})
        if played.reward is None:
            return None
        reward = played.reward if isinstance(played.reward, bool) else float(played.reward)
        return replace(given_score(reward), components=played.metrics)

    async def run(self, fields: Mapping[str, Any], answer: Answer = _no_calls) -> PlayResult:
        """Run a sample with these fields, and answer its calls; what ``answer`` raises ends it.

        Raises GenerationFault, WorkerLost, and AlignmentError for an episode that cannot be trained on.
        """
        return await min(self._workers, key=lambda worker: worker.n_running).play(fields, answer)

    async def __aenter__(self) -> Self:
        """Start the first worker; the others start with their first sample. Raises ConfigError."""
        for worker in self._workers[:1]:
            await worker.ready()
        if self._most_gib is not None:
            self._watch = watched_task("environment-memory", partial(self._bound_memory, self._most_gib))
        return self

    async def _bound_memory(self, most_gib: float) -> None:
        """Kill each worker that has more, which repeats its samples."""
        while True:
            await asyncio.sleep(MEMORY_S)
            running = [process for worker in self._workers if (process := worker.process) is not None]
            used = await asyncio.to_thread(list, map(resident_bytes, [process.pid for process in running]))
            for process, size in zip(running, used, strict=True):
                if size > most_gib * 2**30 and process.returncode is None:
                    text = "an environment worker has %.2f GiB, workflow.memory_gib is %g: it is started again"
                    log.warning(text, size / 2**30, most_gib)
                    _kill_group(process)

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for worker in self._workers:
            await worker.close()


class _Worker:
    """One process, and the next one after its end. ``_samples`` are by the number of a sample that runs in it."""

    def __init__(self, chosen: WorkerWorkflowConfig, context: ContextFields) -> None:
        self._chosen, self._context = chosen, context
        own = {"agent": FaultKind.AGENT, "custom": FaultKind.WORKFLOW}
        self._fault = own.get(chosen.kind, FaultKind.ENVIRONMENT)
        self._running: asyncio.Task[Process] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._samples: dict[int, _RunningSample] = {}
        self.n_running = 0

    @property
    def process(self) -> Process | None:
        """None while none has started."""
        running = self._running
        if running is None or not running.done() or running.cancelled() or running.exception() is not None:
            return None
        return running.result()

    async def play(self, fields: Mapping[str, Any], answer: Answer) -> PlayResult:
        self.n_running += 1
        try:
            return await self._play(fields, answer)
        finally:
            self.n_running -= 1

    async def _play(self, fields: Mapping[str, Any], answer: Answer) -> PlayResult:
        try:
            process = await self.ready()
        except ConfigError as error:  # it has started before: this is no reason to end the run
            raise GenerationFault(self._fault, str(error)) from error
        if self._running is None:
            raise WorkerLost("its worker process ended before the sample started")
        number = next(self._numbers)
        self._samples[number] = sample = _RunningSample(answer)
        self._send(process, Play(number=number, task=dict(fields)))
        try:
            played = await sample.result
        finally:
            for call in sample.calls.values():
                call.cancel()
            if number in self._samples:  # cancelled, or a call failed
                self._send(process, Play(number=number))
                asyncio.get_running_loop().call_later(CANCEL_S, self._kill_if_running, process, number)
        if played.untrainable:
            raise AlignmentError(played.error)
        if played.error:
            raise GenerationFault(played.fault or self._fault, played.error, played.cause)
        return played

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
        settings = {**chosen.model_dump(mode="json"), "context": msgspec.to_builtins(self._context)}
        self._send(process, WorkflowSetup(settings=settings, search_path=search_path))
        try:
            async with asyncio.timeout(START_S):
                started = await _received(process)
                if not isinstance(started, PlayResult):
                    raise msgspec.DecodeError("a call before its start")
        except (TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            started = PlayResult(
                number=0, error=f"it does not start: {type(error).__name__}, and its log is the reason"
            )
        if started.error:
            _kill_group(process)
            await process.wait()
            raise ConfigError("workflow", f"its worker: {started.error}", "correct its code")

    def _send(self, process: Process, message: WorkflowSetup | Play | CallReply) -> None:
        """A worker whose pipe is full does not read: its samples time out, and it is killed."""
        assert process.stdin is not None
        body = msgspec.json.encode(message)
        process.stdin.write(len(body).to_bytes(4, "big") + body)

    async def _read(self, process: Process) -> None:
        """Pass answers on until the process ends or writes anything else."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            while True:
                received = await _received(process)
                if isinstance(received, WorkerCall):
                    self._called(process, received)
                elif (ended := self._samples.pop(received.number, None)) is not None and not ended.result.done():
                    ended.result.set_result(received)
        self._running, lost, self._samples = None, self._samples, {}
        _kill_group(process)
        await process.wait()
        for sample in lost.values():
            sample.fail(WorkerLost(f"its worker process ended with status {process.returncode}"))

    def _called(self, process: Process, received: WorkerCall) -> None:
        """Answer a call of a sample's code, beside others, or cancel the answer."""
        sample = self._samples.get(received.number)
        if sample is None or sample.result.done():
            return
        if received.body is None:
            if received.request in sample.calls:
                sample.calls[received.request].cancel()
            return
        task = sample.calls[received.request] = asyncio.create_task(sample.answer(received.body))

        def answered(task: asyncio.Task[Any]) -> None:
            del sample.calls[received.request]
            if task.cancelled():
                return
            if (error := task.exception()) is not None:
                sample.fail(error)
            elif self._samples.get(received.number) is sample:
                self._send(process, CallReply(number=received.number, request=received.request, answer=task.result()))

        task.add_done_callback(answered)

    def _kill_if_running(self, process: Process, number: int) -> None:
        if number in self._samples:  # else it has ended, or its process has
            _kill_group(process)

    async def close(self) -> None:
        if self._running is None:
            return
        if not self._running.cancel() and not self._running.cancelled() and self._running.exception() is None:
            _kill_group(self._running.result())
        if self._reader is not None:
            await self._reader


async def _received(process: Process) -> PlayResult | WorkerCall:
    stream = process.stdout
    assert stream is not None
    size = int.from_bytes(await stream.readexactly(4), "big")
    if size > LARGEST_BYTES:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    received: PlayResult | WorkerCall = _decode(await stream.readexactly(size))
    return received


_decode = msgspec.json.Decoder(PlayResult | WorkerCall).decode


def resident_bytes(pid: int) -> int:
    """Of a process and its descendants; pages that they share count in each. 0 for one that has ended."""
    size = 0
    with contextlib.suppress(OSError):  # it ends meanwhile
        place = Path("/proc", str(pid))
        size = int((place / "statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for children in place.glob("task/*/children"):
            size += sum(resident_bytes(int(child)) for child in children.read_text(encoding="ascii").split())
    return size


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)

"""One process in which samples of environments and agents run (`environment_child`), and the messages on its pipe."""

import asyncio
import contextlib
import itertools
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import msgspec

from areal_lora.errors import AlignmentError
from areal_lora.processes.log import get_logger
from areal_lora.rollout.channel.tunnel import StreamBytes, Tunnel
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import Answer
from areal_lora.rollout.workflow import WorkerLost
from areal_lora.types import Cause

CANCEL_S = 10.0
END_S = 20.0  # that srun has to end its task
LARGEST_BYTES = 1 << 30  # routes of the long answers of a custom workflow

log = get_logger(__name__)


class WorkflowSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker: its section of the configuration with ``held_out``, and folders of modules.

    ``silence_s``: on another node, else 0.
    """

    settings: dict[str, Any]
    search_path: list[str]
    silence_s: float


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """Start sample ``number``; without a task, cancel it. Number 0 is none: it ends the silence."""

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
    """Answer to `Play`. Without a reward the configured one scores the sample. Number 0: to a setup, a cancellation.

    Rewards are texts, because JSON has no NaN; ``turn_rewards`` and ``finish_reason`` as in `AgentResult`. A custom
    workflow has an ``episode``, or one that is ``untrainable``. ``fault``: the kind of an error that is not the code's.
    """

    number: int
    reward: bool | str | dict[str, bool | str | None] | None = None
    turn_rewards: list[tuple[int, str]] = []
    metrics: dict[str, float] = {}
    finish_reason: str = ""
    episode: str = ""
    error: str = ""
    fault: FaultKind | None = None
    cause: Cause = Cause.OTHER
    untrainable: bool = False


@dataclass(frozen=True, slots=True)
class _RunningSample:
    """A sample that runs in a worker, and the calls of its code, by number."""

    answer: Answer
    result: asyncio.Future[PlayResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    calls: dict[int, asyncio.Task[Any]] = field(default_factory=dict)

    def fail(self, error: BaseException) -> None:
        if not self.result.done():
            self.result.set_exception(error)


@dataclass(slots=True, eq=False, kw_only=True)
class WorkerProcess:
    """One process. It takes no more samples when one of them is ``hung``, and ends with the last other one.

    ``samples`` are by the number of a sample that runs in it.
    """

    process: Process
    launcher: Sequence[str]
    fault: FaultKind
    numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1))
    samples: dict[int, _RunningSample] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)
    n_cancelled: int = 0
    n_answered: int = 0  # of the cancellations
    ports: set[int] = field(default_factory=set)  # of endpoints
    ended: bool = False
    reader: asyncio.Task[None] = field(init=False)

    async def play(self, fields: Mapping[str, Any], answer: Answer) -> PlayResult:
        if self.ended:
            raise WorkerLost("its worker process ended before the sample started")
        self.ports.add(urlsplit(fields.get("base_url", "")).port or 0)
        number = next(self.numbers)
        self.samples[number] = sample = _RunningSample(answer)
        self.send(Play(number=number, task=dict(fields)))
        try:
            played = await sample.result
        finally:
            for call in sample.calls.values():
                call.cancel()
            if number in self.samples:  # cancelled, or a call failed
                self.send(Play(number=number))
                self.n_cancelled += 1
                asyncio.get_running_loop().call_later(CANCEL_S, self._hang, number, self.n_cancelled)
        if played.untrainable:
            raise AlignmentError(played.error)
        if played.error:
            raise GenerationFault(played.fault or self.fault, played.error, played.cause)
        return played

    def send(self, message: WorkflowSetup | Play | CallReply | StreamBytes) -> None:
        """A worker whose pipe is full does not read: its samples time out, and it is killed."""
        assert self.process.stdin is not None
        body = msgspec.json.encode(message)
        self.process.stdin.write(len(body).to_bytes(4, "big") + body)

    async def read(self) -> None:
        """Pass answers on until the process ends or writes anything else."""
        tunnel = Tunnel(self.send, self.ports)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            while True:
                received = await received_from(self.process)
                if isinstance(received, WorkerCall):
                    self._called(received)
                elif isinstance(received, StreamBytes):
                    tunnel.receive(received)
                elif not received.number:
                    self.n_answered += 1
                elif (ended := self.samples.pop(received.number, None)) is not None:
                    if not ended.result.done():
                        ended.result.set_result(received)
                    self._end_if_hung()
        tunnel.close()
        self.ended, lost, self.samples = True, self.samples, {}
        self.kill()
        await self.process.wait()
        for sample in lost.values():
            sample.fail(WorkerLost(f"its worker process ended with status {self.process.returncode}"))

    def _called(self, received: WorkerCall) -> None:
        """Answer a call of a sample's code, beside others, or cancel the answer."""
        sample = self.samples.get(received.number)
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
            elif self.samples.get(received.number) is sample:
                self.send(CallReply(number=received.number, request=received.request, answer=task.result()))

        task.add_done_callback(answered)

    def _hang(self, number: int, cancellation: int) -> None:
        """Let the other samples end, unless the process's event loop hangs."""
        if number not in self.samples:  # it has ended, or the process has
            return
        log.warning("a sample runs %g s after it was cancelled: its worker process takes no more", CANCEL_S)
        self.hung |= {number} if cancellation <= self.n_answered else self.samples.keys()
        self._end_if_hung()

    def _end_if_hung(self) -> None:
        if self.hung and self.samples.keys() <= self.hung:
            self.kill()

    def kill(self) -> None:
        """srun ends its task at SIGTERM; after SIGKILL it would continue."""
        self.ended = True  # it takes no sample, and is none of those that a worker drains
        if not self.launcher:
            _signal_group(self.process, signal.SIGKILL)
        elif self.process.returncode is None:
            _signal_group(self.process, signal.SIGTERM)
            asyncio.get_running_loop().call_later(END_S, _end, self.process)


async def received_from(process: Process) -> PlayResult | WorkerCall | StreamBytes:
    stream = process.stdout
    assert stream is not None
    size = int.from_bytes(await stream.readexactly(4), "big")
    if size > LARGEST_BYTES:
        raise msgspec.DecodeError(f"a message of {size} bytes")
    received: PlayResult | WorkerCall | StreamBytes = _decode(await stream.readexactly(size))
    return received


_decode = msgspec.json.Decoder(PlayResult | WorkerCall | StreamBytes).decode


def _signal_group(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end(process: Process) -> None:
    if process.returncode is None:
        _signal_group(process, signal.SIGKILL)

"""Run the samples of agents and environments in worker processes (`environment_child`) with their own interpreter.

    AgentWorkflow --task: endpoint, key, sample--> EnvironmentWorkers --pipe--> worker process --HTTP--> agent_gateway
                  <--------- reward, metrics ----                      <------

What calls the endpoint is an agent to its workflow: its completions are those of a session. `multi_turn` environments
and custom workflows call the controller over the pipe. A worker runs many samples at a time. When it ends, it is
started again with the next sample, and its samples are repeated one by one: none of the group's other samples is. A
sample that does not end within ``CANCEL_S`` of its cancellation costs its worker.

A Slurm job with a component of role `environment` has the workers on its nodes, in turn. srun passes their pipe on, and
the pipe their connections to the endpoint, which stays on loopback at both ends. A worker that no message has reached
for ``SILENCE_S`` ends itself: srun that is killed with the controller leaves its task running.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import msgspec

from areal_lora.config.sections.run import ClusterConfig, Role
from areal_lora.config.sections.section import Section
from areal_lora.config.sections.task import WorkerWorkflowConfig
from areal_lora.config.sizing.slots import pools_of
from areal_lora.errors import AlignmentError, ConfigError, undo_on_error
from areal_lora.network.addresses import NODES_VARIABLE
from areal_lora.processes.loading import UserFile
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task
from areal_lora.rollout import environment_child
from areal_lora.rollout.agents import AgentResult, AgentTask
from areal_lora.rollout.channel.tunnel import StreamBytes, Tunnel
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import Answer
from areal_lora.rollout.custom_child import ContextFields
from areal_lora.rollout.workflow import WorkerLost, derived_seed, given_score
from areal_lora.types import Cause

START_S = 300.0  # importing an environment with its packages and data
CANCEL_S = 10.0
SILENCE_S = 120.0  # six times the interval of messages to workers on other nodes
END_S = 20.0  # that srun has to end its task
LARGEST_BYTES = 1 << 30  # routes of the long answers of a custom workflow

log = get_logger(__name__)
_Launchers: TypeAlias = Iterator[tuple[str, Sequence[str]]]


class WorkflowSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker: its section of the configuration with ``held_out``, and folders of modules.

    ``silence_s``: `SILENCE_S` on another node, else 0.
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
    """Answer to `Play`, and with number 0 to `WorkflowSetup`. Without a reward the configured one scores the sample.

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

    `play` is the agent of an `AgentWorkflow`. ``context`` is that of the adapter's training; ``launchers``:
    `worker_launchers`; ``held_out``: `ranks_of` its evaluations.
    """

    def __init__(
        self,
        chosen: Section,
        context: ContextFields,
        launchers: Mapping[str, Sequence[str]] = {},
        held_out: Mapping[str, int] = {},
    ) -> None:
        self.context, self._workers, self._nodes = context, list[_Worker](), launchers or {"": ()}
        turns = itertools.cycle(self._nodes.items())
        self._beats: asyncio.Task[None]
        if isinstance(chosen, WorkerWorkflowConfig):
            settings = {**chosen.model_dump(mode="json"), "context": msgspec.to_builtins(context), "held_out": held_out}
            file = UserFile(chosen.env or chosen.path)
            self._workers += (_Worker(chosen, settings, turns, file) for _ in range(chosen.workers))

    async def play(self, task: AgentTask) -> AgentResult:
        """Run one sample. Raises GenerationFault, WorkerLost."""
        played = await self.run({**msgspec.to_builtins(task), "seed": derived_seed(0, task.sample.uid)})
        reward = msgspec.convert(played.reward, bool | float | dict[str, bool | float | None] | None, strict=False)
        if reward is not None:
            reward = replace(score := given_score(reward), components={**score.components, **played.metrics})
        turns = tuple((answer, float(earned)) for answer, earned in played.turn_rewards)
        return AgentResult(reward=reward, turn_rewards=turns, finish_reason=played.finish_reason)

    async def run(self, fields: Mapping[str, Any], answer: Answer = _no_calls) -> PlayResult:
        """Run a sample with these fields, and answer its calls; what ``answer`` raises ends it.

        Raises GenerationFault, WorkerLost, and AlignmentError for an episode that cannot be trained on.
        """
        return await min(self._workers, key=lambda worker: worker.n_running).play(fields, answer)

    async def __aenter__(self) -> Self:
        """Start the first worker, on the first node that can; the others start with their first sample.

        Raises ConfigError, with the reason of each node.
        """
        for worker in self._workers[:1]:
            reasons = list[str]()
            while len(reasons) < len(self._nodes):
                try:
                    await worker.ready()
                    break
                except ConfigError as error:
                    reasons.append(error.reason)
                    if len(reasons) == len(self._nodes):
                        raise ConfigError(error.path, "; ".join(reasons), error.fix) from error
                    log.warning("%s: trying the next node", error)
        self._beats = watched_task("environment-beats", self._beat)
        return self

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_S / 6)
            for worker in self._workers:
                worker.beat()

    async def __aexit__(self, *exc_info: object) -> None:
        self._beats.cancel()
        await asyncio.gather(*(worker.close() for worker in self._workers))  # srun takes seconds to end its task


class _Worker:
    """One process, and the next one after its end. ``_samples`` are by the number of a sample that runs in it."""

    def __init__(
        self, chosen: WorkerWorkflowConfig, settings: dict[str, Any], launchers: _Launchers, file: UserFile
    ) -> None:
        self._chosen, self._settings, self._launchers, self._file = chosen, settings, launchers, file
        self._node, self._ports = "", set[int]()  # of the newest process, as its launcher; of endpoints
        self._launcher: Sequence[str] = ()
        self._fault = {"agent": FaultKind.AGENT, "custom": FaultKind.WORKFLOW}.get(chosen.kind, FaultKind.ENVIRONMENT)
        self._running: asyncio.Task[Process] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers, self.n_running = itertools.count(1), 0
        self._samples: dict[int, _RunningSample] = {}

    def beat(self) -> None:
        """Send the process, if it runs on another node, a message that needs no answer."""
        if self._launcher and (process := self._process()) is not None:
            self._send(process, Play(number=0))

    def _process(self) -> Process | None:
        """The newest process, from its start to the end of its pipe."""
        made = self._running
        return None if made is None or not made.done() or made.cancelled() or made.exception() else made.result()

    async def play(self, fields: Mapping[str, Any], answer: Answer) -> PlayResult:
        self.n_running += 1
        try:
            return await self._play(fields, answer)
        finally:
            self.n_running -= 1

    async def _play(self, fields: Mapping[str, Any], answer: Answer) -> PlayResult:
        try:
            process = await self.ready()
        except ConfigError as error:  # one has started before: this is no reason to end the run
            if self._launcher:  # the next start is on another node
                raise WorkerLost(str(error)) from error
            raise GenerationFault(self._fault, str(error)) from error
        if self._process() is not process:
            raise WorkerLost("its worker process ended before the sample started")
        self._ports.add(urlsplit(fields.get("base_url", "")).port or 0)
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
        if self._running is None or (self._running.done() and self._process() is None):
            self._running = asyncio.create_task(self._started())
        return await asyncio.shield(self._running)

    async def _started(self) -> Process:
        chosen = self._chosen
        self._file.note_start(log)
        # Without PYTHONPATH and the folder of the script: `workflow` and `agents` are not this package's modules there.
        self._node, self._launcher = next(self._launchers)
        argv = [*self._launcher, chosen.python or sys.executable, "-I", environment_child.__file__]
        # srun takes the variables of the step that it is called in for its own.
        env = {key: value for key, value in os.environ.items() if key == "SLURM_CONF" or not key.startswith("SLURM_")}
        # A client in an agent takes the proxy of the environment, which does not lead to the endpoint on this host.
        direct = ",".join(filter(None, (env.get("no_proxy") or env.get("NO_PROXY"), "127.0.0.1")))
        env |= {"no_proxy": direct, "NO_PROXY": direct}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=pipe, stdout=pipe, env=env, start_new_session=True
            )
        except OSError as error:
            raise ConfigError("workflow.python", f"{argv[0]} cannot be started: {error}", "name a Python") from error
        with undo_on_error(partial(self._kill, process)):
            await self._set_up(process)
        self._reader = watched_task("environment-worker", partial(self._read, process))
        return process

    async def _set_up(self, process: Process) -> None:
        """Raises ConfigError where the environment cannot be loaded."""
        chosen = self._chosen
        search_path = [folder for folder in ([] if chosen.python else sys.path) if folder] + [os.getcwd()]
        silence_s = SILENCE_S if self._launcher else 0.0
        self._send(process, WorkflowSetup(settings=self._settings, search_path=search_path, silence_s=silence_s))
        try:
            async with asyncio.timeout(START_S):
                started = await _received(process)
                if not isinstance(started, PlayResult):
                    raise msgspec.DecodeError("a call before its start")
        except (TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            started = PlayResult(number=0, error=f"it does not start: {type(error).__name__}, its log has the reason")
        if started.error:
            self._kill(process)
            await process.wait()
            where = f" on {self._node}" if self._node else ""
            raise ConfigError("workflow", f"its worker{where}: {started.error}", "correct its code")

    def _send(self, process: Process, message: WorkflowSetup | Play | CallReply | StreamBytes) -> None:
        """A worker whose pipe is full does not read: its samples time out, and it is killed."""
        assert process.stdin is not None
        body = msgspec.json.encode(message)
        process.stdin.write(len(body).to_bytes(4, "big") + body)

    async def _read(self, process: Process) -> None:
        """Pass answers on until the process ends or writes anything else."""
        tunnel = Tunnel(partial(self._send, process), self._ports)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            while True:
                received = await _received(process)
                if isinstance(received, WorkerCall):
                    self._called(process, received)
                elif isinstance(received, StreamBytes):
                    tunnel.receive(received)
                elif (ended := self._samples.pop(received.number, None)) is not None and not ended.result.done():
                    ended.result.set_result(received)
        tunnel.close()
        self._running, lost, self._samples = None, self._samples, {}
        self._kill(process)
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
            self._kill(process)

    def _kill(self, process: Process) -> None:
        """srun ends its task at SIGTERM; after SIGKILL it would continue."""
        if not self._launcher:
            _signal_group(process, signal.SIGKILL)
        elif process.returncode is None:
            _signal_group(process, signal.SIGTERM)
            asyncio.get_running_loop().call_later(END_S, _end, process)

    async def close(self) -> None:
        if self._running is None:
            return
        if not self._running.cancel() and (process := self._process()) is not None:
            self._kill(process)
        if self._reader is not None:
            await self._reader


async def _received(process: Process) -> PlayResult | WorkerCall | StreamBytes:
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


def worker_launchers(cluster: ClusterConfig, environ: Mapping[str, str]) -> dict[str, list[str]]:
    """Words before the interpreter of a worker, by node with the role `environment`; empty without such nodes.

    ``environ``: of a step of the Slurm job.
    """
    role: Role = "environment"
    for i, pool in enumerate(pools := pools_of(cluster)):
        if role in pool.roles:
            job = environ.get("SLURM_JOB_ID_HET_GROUP_0", environ["SLURM_JOB_ID"])
            of_the_job = [f"--jobid={job}", *([f"--het-group={i}"] if len(pools) > 1 else [])]
            options = [*of_the_job, "--nodes=1", "--ntasks=1", f"--job-name={role}"]
            hosts = environ[NODES_VARIABLE].split()[pool.first_node :][: pool.nodes]
            return {host: cluster.slurm.step(role, *options, f"--nodelist={host}") for host in hosts}
    return {}

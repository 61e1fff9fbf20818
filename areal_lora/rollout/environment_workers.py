"""Run the samples of agents and environments in worker processes (`environment_child`) with their own interpreter.

    AgentWorkflow --task: endpoint, key, sample--> EnvironmentWorkers --pipe--> worker process --HTTP--> agent_gateway
                  <--------- reward, metrics ----                      <------

What calls the endpoint is an agent to its workflow: its completions are those of a session. `multi_turn` environments
and custom workflows call the controller over the pipe. A worker runs many samples at a time. When it ends, it is
started again with the next sample, and its samples are repeated one by one: none of the group's other samples is. If a
sample does not end within ``CANCEL_S`` of its cancellation, the next ones run in a new process, and the old one is
killed when the others in it have ended, or when the new one must be replaced in turn.

A Slurm job with a component of role `environment` has the workers on its nodes, in turn. srun passes their pipe on, and
the pipe their connections to the endpoint, which stays on loopback at both ends. A worker that no message has reached
for ``SILENCE_S`` ends itself: srun that is killed with the controller leaves its task running.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeAlias

import msgspec

from areal_lora.config.sections.run import ClusterConfig, Role
from areal_lora.config.sections.section import Section
from areal_lora.config.sections.task import WorkerWorkflowConfig
from areal_lora.config.sizing.slots import pools_of
from areal_lora.errors import ConfigError, undo_on_error
from areal_lora.network.addresses import NODES_VARIABLE
from areal_lora.processes.loading import UserFile
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import watched_task
from areal_lora.rollout import environment_child
from areal_lora.rollout.agents import AgentResult, AgentTask
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import Answer
from areal_lora.rollout.custom_child import ContextFields
from areal_lora.rollout.worker_process import Play, PlayResult, WorkerProcess, WorkflowSetup, received_from
from areal_lora.rollout.workflow import WorkerLost, derived_seed, given_score

START_S = 300.0  # importing an environment with its packages and data
SILENCE_S = 120.0  # six times the interval of messages to workers on other nodes

log = get_logger(__name__)
_Launchers: TypeAlias = Iterator[tuple[str, Sequence[str]]]


async def _no_calls(body: Any) -> Any:
    raise GenerationFault(FaultKind.PROTOCOL, "its code calls the endpoint, not the controller")


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
    """A process that takes samples, the next one after its end, and one in which samples end beside a hung one."""

    def __init__(
        self, chosen: WorkerWorkflowConfig, settings: dict[str, Any], launchers: _Launchers, file: UserFile
    ) -> None:
        self._chosen, self._settings, self._launchers, self._file = chosen, settings, launchers, file
        self._node = ""  # of the newest process
        self._launcher: Sequence[str] = ()
        self._fault = {"agent": FaultKind.AGENT, "custom": FaultKind.WORKFLOW}.get(chosen.kind, FaultKind.ENVIRONMENT)
        self._newest: asyncio.Task[WorkerProcess] | None = None
        self._processes: list[WorkerProcess] = []
        self.n_running = 0

    def beat(self) -> None:
        """Send processes on other nodes a message that needs no answer."""
        for each in self._processes:
            if each.launcher and not each.ended:
                each.send(Play(number=0))

    async def play(self, fields: Mapping[str, Any], answer: Answer) -> PlayResult:
        self.n_running += 1
        try:
            process = await self.ready()
        except ConfigError as error:  # one has started before: this is no reason to end the run
            if self._launcher:  # the next start is on another node
                raise WorkerLost(str(error)) from error
            raise GenerationFault(self._fault, str(error)) from error
        else:
            return await process.play(fields, answer)
        finally:
            self.n_running -= 1

    async def ready(self) -> WorkerProcess:
        """A process that takes samples, started if none does. Raises ConfigError where it cannot be started.

        A start continues when the sample that it is for is cancelled: it may take longer than a sample.
        """
        made = self._newest
        failed = made is not None and made.done() and (made.cancelled() or made.exception() is not None)
        if made is None or failed or (made.done() and (made.result().ended or made.result().hung)):
            self._newest = made = asyncio.create_task(self._started())
        return await asyncio.shield(made)

    async def _started(self) -> WorkerProcess:
        for each in [each for each in self._processes if not each.ended][:-1]:  # samples of the last one may still end
            each.kill()
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
        made = WorkerProcess(process=process, launcher=self._launcher, fault=self._fault)
        with undo_on_error(made.kill):
            await self._set_up(made)
        self._processes.append(made)
        made.reader = watched_task("environment-worker", partial(self._read, made))
        return made

    async def _read(self, made: WorkerProcess) -> None:
        await made.read()
        self._processes.remove(made)

    async def _set_up(self, made: WorkerProcess) -> None:
        """Raises ConfigError where the environment cannot be loaded."""
        chosen = self._chosen
        search_path = [folder for folder in ([] if chosen.python else sys.path) if folder] + [os.getcwd()]
        silence_s = SILENCE_S if made.launcher else 0.0
        made.send(WorkflowSetup(settings=self._settings, search_path=search_path, silence_s=silence_s))
        try:
            async with asyncio.timeout(START_S):
                started = await received_from(made.process)
                if not isinstance(started, PlayResult):
                    raise msgspec.DecodeError("a call before its start")
        except (TimeoutError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            started = PlayResult(number=0, error=f"it does not start: {type(error).__name__}, its log has the reason")
        if started.error:
            made.kill()
            await made.process.wait()
            where = f" on {self._node}" if self._node else ""
            raise ConfigError("workflow", f"its worker{where}: {started.error}", "correct its code")

    async def close(self) -> None:
        if self._newest is not None:
            self._newest.cancel()
        for each in self._processes:
            each.kill()
        await asyncio.gather(*(each.reader for each in self._processes))


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

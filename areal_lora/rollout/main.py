"""The rollout controller: ``python -m areal_lora.rollout.main --run-folder DIR``.

Reads prompts and tokenizer while the servers start, binds its control socket and publishes it as
``controller-0``. The trainer's announcements name the servers. SIGTERM, SIGINT, a Shutdown message or the
parent's death end it and its scorer children.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from areal_lora.config.models import AdapterConfig, Config, SingleTurnWorkflowConfig
from areal_lora.config.recorded import adapter_run, alone, read_config, sampled_as
from areal_lora.config.sections.run import own_place
from areal_lora.data.prompts import Formatter, PromptStream, TextTokenizer, load_tokenizer
from areal_lora.errors import ArealLoraError
from areal_lora.obs.machine import MachineWatch
from areal_lora.processes.log import get_logger
from areal_lora.processes.startup import collector_paused, rare_full_collections
from areal_lora.processes.watched import watched_task
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.agent_api.gateways import Gateways, processes_of_this_machine
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.channel.channel_messages import ControlSocket
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.controller.controller import Controller
from areal_lora.rollout.controller.eval_sets import BaseEvals, EvalSet, load_sets, ranks_of
from areal_lora.rollout.controller.evaluation import EvalPlaces, Evaluator
from areal_lora.rollout.controller.feed import AdapterFeed
from areal_lora.rollout.controller.groups import Ticket
from areal_lora.rollout.controller.pacing import StalenessBudget
from areal_lora.rollout.controller.runtime import AdapterRuntime, Capacity
from areal_lora.rollout.custom_child import ContextFields
from areal_lora.rollout.environment_workers import EnvironmentWorkers, worker_launchers
from areal_lora.rollout.ledger.curricula import Curriculum, SolvedShares
from areal_lora.rollout.ledger.ledger import Ledger, LedgerFile
from areal_lora.rollout.ledger.reconcile import write_counts
from areal_lora.rollout.routing import Router
from areal_lora.rollout.workflow import Episode, Scorer, Workflow, WorkflowContext
from areal_lora.rollout.workflow_loading import Teacher, build_training, build_workflow
from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import publish_endpoint, read_secret
from areal_lora.run_folder.status import EVENT_LOOP, EVERY_S, Heart, run_role, set_status, signalled
from areal_lora.tasks.datasets import load_samples
from areal_lora.tasks.scorer import RewardSum

ROLE = "controller"
LEASE_SLACK_S = 60.0  # a rollout ends at its own deadline; its lease, after this, is for workflows that do not end
EPISODE_LEASE = 3  # times `sampling.timeout_s`: a sample whose time is over is repeated once
SINGLE_TURN_LEASE = 20
"""Times `sampling.timeout_s`, of which half may be a wait for places: an answer lost by a live server is repeated."""
COUNTS_S = 5.0

log = get_logger("areal_lora.rollout.main")  # __name__ is __main__ here


class _Stop(Exception):
    """Ends the controller's tasks; the only ordinary way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterData:
    """Prompts of one adapter: the training stream, and the sets of its evaluations."""

    config: AdapterConfig
    formatter: Formatter
    prompts: PromptStream
    sets: tuple[EvalSet, ...]


def main(argv: list[str] | None = None) -> int:
    return run_role(ROLE, _control, argv)


def _control(run_folder: RunFolder) -> None:
    config = read_config(run_folder)
    data = load_data(config, run_folder)
    asyncio.run(serve(config, run_folder, data))


def load_data(config: Config, run_folder: RunFolder) -> list[AdapterData]:
    set_status(run_folder, ROLE, 0, "reading prompts")
    with collector_paused():
        tokenizer = load_tokenizer(config.model.folder)
    return [adapter_data(config, adapter, tokenizer, run_folder) for adapter in config.adapters]


def adapter_data(
    config: Config, adapter: AdapterConfig, tokenizer: TextTokenizer, folder: RunFolder | None = None
) -> AdapterData:
    """Rows of data sets are kept in ``folder``."""
    formatter = Formatter(tokenizer=tokenizer, how=adapter.task.format)
    samples = load_samples(adapter.task, "train", folder.path if folder else None)
    seed = adapter_run(config, adapter).seed
    staged = adapter.sampling.staged
    curriculum = Curriculum(staged, samples, seed) if staged is not None else None
    max_prompt_tokens = config.rollout.max_model_len - adapter.sampling.max_new_tokens
    return AdapterData(
        config=adapter,
        formatter=formatter,
        prompts=PromptStream(samples, formatter, seed=seed, max_prompt_tokens=max_prompt_tokens, order=curriculum),
        sets=load_sets(config, adapter, tokenizer),
    )


@dataclass(frozen=True, slots=True)
class SharedResources:
    config: Config
    run_folder: RunFolder
    client: CompletionClient
    sessions: Sessions
    ledger: LedgerFile
    base: BaseEvals
    places: EvalPlaces

    async def runtime(self, part: AdapterData, stack: AsyncExitStack) -> AdapterRuntime:
        """Start the scorers and workers of an adapter, which end with ``stack``, and build what rolls out for it.

        Raises ConfigError or EnvironmentError_ for a teacher that cannot be its reference.
        """
        adapter, sampling, rollout = part.config, part.config.sampling, self.config.rollout
        run, hidden = adapter_run(self.config, adapter), self.run_folder.path
        scorer = await stack.enter_async_context(RewardSum(adapter.rewards, adapter.reward_weights, hidden))
        launchers = worker_launchers(self.config.cluster, os.environ)
        workers = await stack.enter_async_context(
            EnvironmentWorkers(adapter.workflow, ContextFields.of(self.config, adapter), launchers, ranks_of(part.sets))
        )
        teacher = None
        if (model := adapter.algorithm.teacher) is not None:
            teacher = Teacher(model, partial(set_status, self.run_folder, ROLE, 0))
            stack.push_async_callback(teacher.close)
            await teacher.check(part.formatter.tokenizer, rollout.max_model_len)
        n_samples = sampling.n_samples + adapter.algorithm.has_baseline
        capacity = Capacity(sequences=rollout.max_num_seqs, n_samples=n_samples)
        context = WorkflowContext(
            client=self.client,
            scorer=scorer,
            sampling=sampling,
            formatter=part.formatter,
            max_model_len=rollout.max_model_len,
            streams=self.config.behaviour.router_replay != "rollout",
            has_reward=adapter.has_reward,
        )
        evaluator = build_evaluator(
            self.config, adapter, part.sets, self.client, scorer, self.sessions, self.places, self.run_folder, workers
        )
        evaluator.base = self.base
        tasks = dict[int, asyncio.Task[None]]()

        def cancel(ticket: Ticket) -> None:
            if (task := tasks.get(ticket.seq)) is not None:  # else it has ended without a report
                task.cancel()

        solved = None
        if sampling.difficulty == "learnability":
            solved = SolvedShares(self.ledger, adapter.name, part.prompts, run.seed)
        single_turn = isinstance(adapter.workflow, SingleTurnWorkflowConfig)
        feed = AdapterFeed(
            adapter.name,
            budget=StalenessBudget(
                max_staleness=run.max_staleness, prompts_per_step=sampling.prompts_per_step, last_version=run.steps - 1
            ),
            pacing=rollout.pacing,
            prompts=part.prompts,
            ledger=Ledger(self.ledger, adapter.name, part.prompts.digest, sampled_as(self.config, adapter)),
            max_running=capacity.groups(rollout.servers),  # until the first announcement
            on_expire=cancel,
            clock=time.monotonic,
            lease_s=(SINGLE_TURN_LEASE if single_turn else EPISODE_LEASE) * sampling.timeout_s + LEASE_SLACK_S,
            drop_uniform=adapter.algorithm.drop_uniform,
            solved=solved,
        )
        return AdapterRuntime(
            feed=feed,
            tasks=tasks,
            seed=run.seed,
            capacity=capacity,
            weight=adapter.weight,
            workflow=build_training(adapter, context, self.sessions, self.run_folder, workers, teacher),
            evaluator=evaluator,
            take_costs=scorer.take_costs,
            texts=bool(self.config.run.keep_rollouts_mib),
            lengths=_lengths if self.config.waits_on_servers else None,
        )

    async def open(self, raw: bytes) -> AdapterRuntime:
        """Open an adapter that joins, from its entry of the configuration. Prompts are read in a thread."""
        adapter = AdapterConfig.model_validate_json(raw)
        # With a tokenizer of its own: that of the others is in use in the event loop.
        [part] = await asyncio.to_thread(load_data, alone(self.config, adapter), self.run_folder)
        async with AsyncExitStack() as stack:
            made = await self.runtime(part, stack)
            made.close = stack.pop_all().aclose
        set_status(self.run_folder, ROLE, 0, "serving")
        return made


async def serve(
    config: Config, run_folder: RunFolder, data: Sequence[AdapterData], stop: asyncio.Event | None = None
) -> None:
    """Serve until ``stop`` is set, by default by a signal, and end all children.

    Raises the first error of any rollout or request.
    """
    stop = stop or signalled()
    secret = read_secret(run_folder)
    rollout = config.rollout
    router = Router(
        max_behind=rollout.max_num_seqs // 4,  # of a batch: less than computing a long prefix again
        max_lag=rollout.max_staleness if rollout.in_flight_policy == "finish" else 0,
    )
    async with AsyncExitStack() as stack:
        routes = config.behaviour.router_replay == "rollout"  # megabytes of a group
        ledger = LedgerFile(run_folder.ledger, config.run.name, page_bytes=65536 if routes else 4096)
        stack.callback(ledger.close)
        stack.callback(write_counts, run_folder, ledger)
        client = await stack.enter_async_context(CompletionClient(router, secret))
        sessions = Sessions()
        if config.service or any(part.config.workflow.calls_endpoint for part in data):
            gateways = Gateways(config.model.folder, run_folder, router, processes_of_this_machine())
            sessions = await stack.enter_async_context(agent_gateway(await stack.enter_async_context(gateways)))
        places = EvalPlaces(0)  # until the first announcement
        shared = SharedResources(config, run_folder, client, sessions, ledger, BaseEvals(run_folder), places)
        runtimes = {part.config.name: await shared.runtime(part, stack) for part in data}
        host = own_place(config.cluster, run_folder).address
        socket = ControlSocket(host, secret)
        stack.callback(socket.close)
        try:
            async with asyncio.TaskGroup() as tasks:
                controller = Controller(runtimes, router, tasks=tasks, stop=stop, open_adapter=shared.open)
                stack.push_async_callback(controller.close)
                watched_task("control-socket", partial(socket.serve, controller.handle, tasks), tasks)
                watched_task("leases", controller.watch_leases, tasks)
                watched_task("event-loop-ticks", partial(_tick, config, run_folder), tasks)
                watched_task("group-counts", partial(_count, run_folder, ledger), tasks)
                ports = {"control": socket.port} | ({"agents": sessions.port} if sessions.port else {})
                publish_endpoint(run_folder, ROLE, 0, ports, host=host)
                notes = [note for part in data for each in part.sets if (note := each.held_out.note())]
                set_status(run_folder, ROLE, 0, "; ".join(["serving", *notes]))
                stack.callback(MachineWatch(run_folder, ROLE, 0, figures=router.figures).stop)
                log.info("serving %s on port %d", ", ".join(runtimes), socket.port)
                await stop.wait()
                raise _Stop
        except* _Stop:
            log.info("stopping")
        except* ArealLoraError as errors:
            raise _first(errors) from errors


def _lengths(episode: Episode) -> list[int]:
    return [trajectory.columns.n_sampled for trajectory in episode.group.trajectories]


async def _tick(config: Config, run_folder: RunFolder) -> None:
    """Keep the heart beating for as long as this event loop runs."""
    heart = Heart(run_folder, ROLE, 0, {EVENT_LOOP: config.run.stall_s})
    try:
        with rare_full_collections() as collect:
            while True:
                heart.progress(EVENT_LOOP)
                collect()
                await asyncio.sleep(EVERY_S)
    finally:
        heart.stop()  # the tasks are being ended; one that does not let itself be ended must not look alive


async def _count(run_folder: RunFolder, ledger: LedgerFile) -> None:
    while True:
        write_counts(run_folder, ledger)
        await asyncio.sleep(COUNTS_S)


def _first(errors: BaseExceptionGroup[ArealLoraError]) -> ArealLoraError:
    first = errors.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def build_evaluator(
    config: Config,
    adapter: AdapterConfig,
    sets: Sequence[EvalSet],
    client: CompletionClient,
    scorer: Scorer,
    sessions: Sessions,
    places: EvalPlaces,
    folder: RunFolder | None = None,
    workers: EnvironmentWorkers | None = None,
) -> Evaluator:
    """``client`` has been entered. Conversations of agents are kept in ``folder``.

    Raises ConfigError for a workflow that cannot be built.
    """
    pinned, longest = client.pinned(), config.rollout.max_model_len
    workflows = dict[str, Workflow]()
    for each in sets:
        context = WorkflowContext(
            client=pinned,
            scorer=scorer,
            sampling=each.sampling,
            formatter=each.formatter,
            max_model_len=longest,
            has_reward=adapter.has_reward,
        )
        workflows[each.name] = build_workflow(each.workflow, context, sessions, folder, workers)
    return Evaluator(
        reward_kind=adapter.rewards[0].kind,
        sets=sets,
        workflows=workflows,
        places=places,
        seed=adapter_run(config, adapter).seed,
    )


if __name__ == "__main__":
    sys.exit(main())

"""A run in virtual time: the real controller around servers, a trainer and publishes that take modelled seconds.

real      controller, admission, pacing, feed, ledger and retries; router; judgement of a publish and of its members
modelled  seconds of sampling, training and transfers (`cost_model`); an answer is a token, whose id is its length,
          and the answers of a group are one trajectory

One seed decides everything. Not modelled: evaluations, checkpoints, preemptions by a full KV cache, agents and tools,
``in_flight: interrupt``, all adapters but the first.
"""

import asyncio
import math
import random
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, cast

from rich.table import Table

from areal_lora.config.models import Config
from areal_lora.data.prompts import Formatter, Prompt, PromptStream
from areal_lora.errors import ArealLoraError, ConfigError, ManifestError, PublishError, RefusalReason, RolloutError
from areal_lora.launcher.dry_run import make_table
from areal_lora.launcher.simulation.cost_model import CostModel, VirtualLoop, VirtualServer
from areal_lora.obs.console import duration, histogram, percent
from areal_lora.rollout.channel import channel_messages as m
from areal_lora.rollout.channel.client import SHORT_POLL_S
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.controller import controller, evaluation, feed, groups, pacing, runtime
from areal_lora.rollout.ledger.ledger import Ledger, LedgerFile
from areal_lora.rollout.routing import Router, VersionRetired
from areal_lora.rollout.workflow import Episode
from areal_lora.types import AdapterRef, Sample, TokenColumns, Trajectory, TrajectoryGroup
from areal_lora.weight_sync.link.relays import REQUEST_S, RelayGroup, form_s, relay_tree
from areal_lora.weight_sync.messages import ServerEndpoint
from areal_lora.weight_sync.trainer import decisions, membership

PROMPTS = 10_000  # of an epoch
NOISE = 0.05  # a step takes so much less or more
STEPS, SPLIT_STEPS, SPLITS = 100, 20, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Sizes of a simulated run. At half of its steps the ``lost`` last servers fall silent and stay so.

    ``per_host`` servers share a host. ``slow`` multiplies the seconds of servers, by index.
    """

    servers: int
    ranks: int
    steps: int
    seed: int = 1
    lost: int = 0
    per_host: int = 1
    slow: Mapping[int, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class SimulatedRun:
    """Figures of a simulated run, from its first batch to its last; ``taken_s`` are the times of the batches.

    ``staleness`` counts trained tokens by lag, ``trained`` has the stream positions of the trained prompts,
    ``publishes`` the seconds of each publish by phase, and of all. ``stats`` are those of the last batch.
    """

    taken_s: list[float] = field(default_factory=list)
    trainer_idle: float = 0.0
    servers_idle: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)
    trained: list[int] = field(default_factory=list)
    publishes: list[Mapping[str, float]] = field(default_factory=list)
    excluded: dict[str, str] = field(default_factory=dict)
    stats: m.Stats | None = None

    @property
    def seconds(self) -> float:
        return self.taken_s[-1] - self.taken_s[0]

    @property
    def steps_per_hour(self) -> float:
        return 3600 * (len(self.taken_s) - 1) / self.seconds

    def phase_s(self, phase: str) -> tuple[float, float]:
        """p50 and p99 over all publishes."""
        seconds = sorted(publish.get(phase, 0.0) for publish in self.publishes)
        return seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]


def simulate(config: Config, costs: CostModel, scenario: Scenario) -> SimulatedRun:
    """Run the first adapter of ``config``. Raises ArealLoraError where the run would end with one."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(_World(config, costs, scenario).outcome())


class _Numbers(Formatter):
    """The prompt of a position is one token: the position."""

    def prompt(self, sample: Sample, uid: str, position: int) -> Prompt:
        return Prompt(uid=uid, position=position, sample=sample, text=sample.prompt, token_ids=[position])


def _lengths(episode: Episode) -> list[int]:
    (answers,) = episode.group.trajectories
    return answers.token_ids[1:]


class _World:
    """Workflow, servers and trainer around the controller of one simulated run."""

    def __init__(self, config: Config, costs: CostModel, scenario: Scenario) -> None:
        self.config, self.costs, self.scenario = config, costs, scenario
        self.rng, self.result = random.Random(scenario.seed), SimulatedRun()
        self.adapter, self.name = config.adapters[0], config.adapters[0].name
        hosts, tp = [f"host-{i // scenario.per_host}" for i in range(scenario.servers)], config.rollout.tp
        self.members = tuple(
            ServerEndpoint(name=f"server-{i}", host=host, admin_port=1, data_port=i, workers=tp)
            for i, host in enumerate(hosts)
        )
        self.tree, self.formed = tuple[RelayGroup, ...](), set[RelayGroup]()
        self.lost: dict[str, str] = {}  # since the last announcement

    async def outcome(self) -> SimulatedRun:
        self.loop, seats = asyncio.get_running_loop(), self.costs.seats(self.config)
        self.router = Router(self.loop.time)
        self.servers = {
            member.data_url: VirtualServer(self.costs, seats, self.scenario.slow.get(index, 1.0))
            for index, member in enumerate(self.members)
        }
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start_controller(tasks)
                leases = tasks.create_task(self.controller.watch_leases())
                await self._train()
                leases.cancel()
                self.runtime.feed.end()
        except* ArealLoraError as errors:
            raise errors.exceptions[0] from errors
        return self.result

    def _start_controller(self, tasks: asyncio.TaskGroup) -> None:
        """As `rollout.main` does, with prompts that are numbers and nothing to score or to evaluate."""
        sampling, rollout, seed = self.adapter.sampling, self.config.rollout, self.scenario.seed
        samples = [Sample(uid=str(i), prompt=str(i), answer=None) for i in range(PROMPTS)]
        prompts = PromptStream(samples, _Numbers(tokenizer=cast(Any, None)), seed=seed, max_prompt_tokens=1)
        capacity = runtime.Capacity(sequences=rollout.max_num_seqs, n_samples=sampling.n_samples)
        running = dict[int, asyncio.Task[None]]()

        def cancel(ticket: groups.Ticket) -> None:
            if (task := running.get(ticket.seq)) is not None:
                task.cancel()

        made = feed.AdapterFeed(
            self.name,
            budget=pacing.StalenessBudget(
                max_staleness=rollout.max_staleness,
                prompts_per_step=sampling.prompts_per_step,
                last_version=self.scenario.steps - 1,
            ),
            pacing=rollout.pacing,
            prompts=prompts,
            ledger=Ledger(LedgerFile(":memory:", self.config.run.name), self.name, prompts.digest),
            max_running=capacity.groups(len(self.servers)),
            on_expire=cancel,
            clock=self.loop.time,
        )
        places = evaluation.EvalPlaces(0)
        self.runtime = runtime.AdapterRuntime(
            feed=made,
            tasks=running,
            workflow=self,
            evaluator=evaluation.Evaluator(reward_kind="", sets=(), workflows={}, places=places),
            seed=seed,
            capacity=capacity,
            weight=1.0,
            lengths=_lengths if self.config.waits_on_servers else None,
        )
        adapters, stop = {self.name: self.runtime}, asyncio.Event()
        self.controller = controller.Controller(adapters, self.router, tasks=tasks, stop=stop, open_adapter=_unused)

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """The workflow: one request for all answers of a group; a prompt has the same lengths at every issue."""
        lengths = self.costs.lengths(f"{self.scenario.seed} {prompt.position}", self.adapter.sampling.n_samples)
        ref = self.router.newest(ref)
        try:
            async with asyncio.timeout(None) as clock, self.router.lease(ref, len(lengths), clock) as lease:
                await self.servers[lease.server.url].generate(lengths)
        except TimeoutError:
            raise GenerationFault(FaultKind.CONNECTION, f"{lease.server.url}: excluded by the trainer") from None
        except VersionRetired as error:
            raise GenerationFault(FaultKind.RETIRED, str(error)) from None
        n = len(lengths)
        ids, versions = struct.pack(f"<{n + 1}i", prompt.position, *lengths), struct.pack("<4i", -1, 1, ref.version, n)
        columns = TokenColumns(ids, bytes(len(ids)), versions)
        answers = Trajectory(uid=prompt.uid, sample=0, adapter=ref, columns=columns, reward=0.0)
        return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=(answers,)), texts=("",))

    # ------------------------------------------------------------ trainer

    async def _train(self) -> None:
        """The line of `trainer.loop`: a step waits for its batch, trains, joins the last publish, starts its own."""
        hello = m.Hello(trainer="simulated", versions={self.name: 0}, snapshots={})
        self.session = cast(m.Welcome, await self.controller.handle(hello)).session
        await self._publish(0)
        published, result, waited_s = self.loop.create_task(_unused()), self.result, 0.0
        busy_s = list[float]()
        for step in range(self.scenario.steps):
            requested_s = self.loop.time()
            batch = await self._batch(step, published)
            result.taken_s.append(self.loop.time())
            busy_s.append(sum(server.busy_s for server in self.servers.values()))
            waited_s += self.loop.time() - requested_s if step else 0.0
            train_s = self._train_s(step, batch)
            if self.scenario.lost and step == self.scenario.steps // 2:
                self.loop.call_later(train_s / 2, self._lose)
            if step == self.scenario.steps - 1:
                break
            await asyncio.sleep(train_s)
            await self.controller.handle(m.CommitStep(adapter=self.name, step=step, session=self.session))
            trained_s = self.loop.time()
            await published
            waited_s += self.loop.time() - trained_s
            published = self.loop.create_task(self._publish(step + 1))
        await published
        result.trainer_idle, result.stats = waited_s / result.seconds, batch.stats
        result.servers_idle = 1 - (busy_s[-1] - busy_s[0]) / result.seconds / self.scenario.servers

    async def _batch(self, step: int, published: asyncio.Task[None]) -> m.Batch:
        """The groups of ``step``; silent servers are excluded meanwhile, as by `next_work.catch_up`."""
        wanted = (AdapterRef(name=self.name, version=step),)
        request = m.GetBatch(wanted=wanted, timeout_s=SHORT_POLL_S, session=self.session)
        while not isinstance(reply := await self.controller.handle(request), m.Batch):
            if isinstance(reply, m.AdapterFailed):
                raise RolloutError(reply.reason)
            if self._silent() and published.done():
                await self._publish(step)
        return reply

    def _train_s(self, step: int, batch: m.Batch) -> float:
        """Seconds of the step on ``batch``, which is recorded."""
        tokens = 0.0
        for group in batch.groups:
            [answers] = group.trajectories
            position, *lengths = answers.token_ids
            self.result.trained.append(position)
            self.result.staleness[step - answers.adapter.version] += sum(lengths)
            tokens += sum(lengths) + self.costs.prompt_tokens
        seconds = tokens * self.costs.trained_token_s / self.scenario.ranks
        return seconds * self.rng.uniform(1 - NOISE, 1 + NOISE)

    # ------------------------------------------------------------ publishes

    async def _publish(self, version: int) -> None:
        """Attempts until all members that remain serve the version. `Leader` sends, the judgement is its own."""
        sync, costs, ref = self.config.weight_sync, self.costs, AdapterRef(name=self.name, version=version)
        progress, phases, move = decisions.Progress(), {"pack": costs.merge_s}, decisions.Move.RETRY
        await asyncio.sleep(costs.merge_s)  # no time-out counts it

        async def spend(phase: str, seconds: float) -> None:
            phases[phase] = phases.get(phase, 0.0) + seconds
            await asyncio.sleep(seconds)

        while move is decisions.Move.RETRY:
            if silent := self._silent():
                await spend("form", sync.ping_s)
                self._exclude(membership.judge(self._findings(silent, set()), retried=False))
            n = len(self.members)
            if n < (fewest := self.config.cluster.min_servers):
                raise PublishError(f"{ref}: {n} servers remain, cluster.min_servers is {fewest}")
            self.tree = relay_tree(self.members, self.tree)
            if forming := set(self.tree) - self.formed:  # rank 0 pings all members first
                await spend("form", n * REQUEST_S + form_s(list(forming), costs.sources))
                self.formed = set(self.tree)
            await spend("announce", costs.requests_s(self.tree))
            await spend("wire", costs.wire_s(self.tree))
            # A version becomes active between two iterations; the server with the longest wait counts.
            iteration_s = costs.iteration_s(costs.seats(self.config))
            await spend("activate", costs.activate_s + iteration_s * self.rng.random() ** (1 / n))
            dead = {s for s in self.members if self.servers[s.data_url].silent_since is not None}
            without = without_version(self.tree, dead)
            if dead:  # their groups and those below get nothing more, either, and wait for the time limit
                await spend("wire", sync.attempt_s + sync.ping_s)
                self.formed = {group for group in self.formed if without.isdisjoint({*group.members, group.relay})}
            findings = self._findings(dead, without)
            judgement = progress.judge(findings, now=self.loop.time(), timeout_s=sync.timeout_s)
            self._exclude(judgement)
            left_s = sync.timeout_s + costs.merge_s - sum(phases.values())
            move = progress.move(findings, judgement, enough=True, left_s=left_s, ping_s=sync.ping_s)
        if move is not decisions.Move.FINISH:
            raise PublishError(f"{ref} did not reach all servers within {sync.timeout_s:g} s")
        await spend("probe", costs.requests_s(self.tree) + costs.probe_s)
        self.result.publishes.append({**phases, "all": sum(phases.values())})
        self.result.excluded |= self.lost
        urls, lost, self.lost = {s.name: s.data_url for s in self.members}, tuple(self.lost), {}
        announcement = m.AnnounceVersion(
            adapter=self.name, version=version, servers=urls, lost=lost, session=self.session
        )
        await self.controller.handle(announcement)

    def _findings(self, dead: set[ServerEndpoint], without: set[ServerEndpoint]) -> list[membership.ServerFinding]:
        silent, cut_off = PublishError("it does not answer pings"), ManifestError(RefusalReason.WIRE, "one is silent")
        errors: dict[ServerEndpoint, ArealLoraError] = dict.fromkeys(without, cut_off) | dict.fromkeys(dead, silent)
        return [membership.ServerFinding(server=s, error=errors.get(s), alive=s not in dead) for s in self.members]

    def _exclude(self, judgement: membership.Judgement) -> None:
        self.lost |= {server.name: reason for server, reason in judgement.lost.items()}
        self.members = judgement.keep

    def _silent(self) -> set[ServerEndpoint]:
        """Members that have missed the pings of `membership.ServerWatcher`."""
        pings_s = membership.MISSES * membership.WATCH_S * membership.rounds(len(self.members))
        until = self.loop.time() - pings_s - self.config.weight_sync.ping_s
        since = {member: self.servers[member.data_url].silent_since for member in self.members}
        return {member for member, at in since.items() if at is not None and at <= until}

    def _lose(self) -> None:
        for member in self.members[-self.scenario.lost :]:
            self.servers[member.data_url].fall_silent()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """A configuration simulated as it is, with a lost host of ``lost`` servers at half, and with other splits.

    ``splits`` are of as many devices: the ones with the most steps per hour of those simulated, the best first.
    ``resident``: sequences of a server that fit its KV cache.
    """

    run: SimulatedRun
    resident: float
    lost: int
    after_loss: SimulatedRun | None
    splits: tuple[tuple[Scenario, SimulatedRun], ...]

    @classmethod
    def of(cls, config: Config, costs: CostModel, *, host: int, gpus: int | None) -> "SimulationReport":
        """``host`` servers share a node; ``gpus`` replaces the number of devices that the splits are of."""
        trainer, rollout = config.trainer, config.rollout
        lost = host if host < rollout.servers else min(1, rollout.servers - 1)
        steps = min(STEPS, max(3, config.run.steps))
        alone = Scenario(servers=rollout.servers, ranks=trainer.world_size, steps=steps, per_host=host)
        devices = gpus or trainer.world_size + rollout.servers * rollout.tp
        unit = trainer.pp * math.lcm(trainer.tp * trainer.cp, trainer.ep * trainer.etp)
        ranks = range(unit, devices - rollout.tp + 1, unit)
        if not ranks:
            raise ConfigError("--gpus", f"{devices} devices hold no {unit} trainer ranks and a server", "give more")
        found, every = list[tuple[Scenario, SimulatedRun]](), 0
        while every != 1:  # the next sweep is between the neighbours of the best
            every = math.ceil(len(ranks) / SPLITS)
            for n in set(ranks[::every]) - {split.ranks for split, _ in found}:
                servers = (devices - n) // rollout.tp
                split = Scenario(servers=servers, ranks=n, steps=min(SPLIT_STEPS, steps), per_host=host)
                found.append((split, simulate(config, costs, split)))
            found.sort(key=lambda each: -each[1].steps_per_hour)
            at = ranks.index(found[0][0].ranks)
            ranks = ranks[max(0, at - every + 1) : at + every]
        return cls(
            run=simulate(config, costs, alone),
            resident=costs.resident(config),
            lost=lost,
            after_loss=simulate(config, costs, replace(alone, lost=lost)) if lost else None,
            splits=tuple(found[:SPLITS]),
        )


def tables(report: SimulationReport) -> Iterator[Table]:
    """What `areal-lora plan --simulate` prints."""
    run, first = report.run, report.run.stats
    stale = "" if first is None else f"{first.reissued:,} of {first.issued:,}"
    rows = [
        ("steps per hour", f"{run.steps_per_hour:.1f}"),
        ("trainer idle", percent(run.trainer_idle)),
        ("servers idle", percent(run.servers_idle)),
        ("sequences that fit the KV cache", f"{report.resident:,.0f}" if report.resident < math.inf else "unknown"),
        ("staleness of trained tokens", histogram(dict(run.staleness))),
        ("groups issued again as stale", stale),
    ]
    if (after := report.after_loss) is not None:
        later_s = after.seconds - run.seconds
        rows.append((f"{report.lost} servers of a host lost at half", f"{duration(later_s)} later at the end"))
        rows.append(("steps that this costs", f"{later_s * run.steps_per_hour / 3600:.1f}"))
        rows.append(("longest step then", f"{max(b - a for a, b in pairwise(after.taken_s)):.1f} s"))
    yield make_table(f"Simulated, {len(run.taken_s)} steps", ("figure", "value"), rows)
    phases = {phase: run.phase_s(phase) for phase in ("pack", "form", "announce", "wire", "activate", "probe", "all")}
    lines = [(phase, f"{1e3 * p50:,.0f}", f"{1e3 * p99:,.0f}") for phase, (p50, p99) in phases.items()]
    yield make_table("Publish, ms", ("phase", "p50", "p99"), lines, right=("p50", "p99"))
    columns = ("trainer ranks", "servers", "steps per hour", "trainer idle", "servers idle")
    splits = [
        (str(of.ranks), str(of.servers), f"{r.steps_per_hour:.1f}", percent(r.trainer_idle), percent(r.servers_idle))
        for of, r in report.splits
    ]
    yield make_table("Splits of the devices, best first; memory is not checked", columns, splits, right=columns)


def without_version(tree: Sequence[RelayGroup], dead: Collection[ServerEndpoint]) -> set[ServerEndpoint]:
    """Members that do not get the version: a group in which one is dead breaks, and so do the groups below."""
    without = set[ServerEndpoint]()
    for group in tree:  # each after that of its relay
        if group.relay in without or any(server in dead for server in group.members):
            without.update(group.members)
    return without


async def _unused(*_: object) -> Any:
    """Closes what is never opened, opens what never joins."""

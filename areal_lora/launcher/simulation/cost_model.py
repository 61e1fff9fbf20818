"""Seconds of a simulated run (`simulate`): by arithmetic, and where there is a run, scaled to what it measured;
and the event loop and the servers that spend them.

Operations are those of `PassSizes`, rates those of an H100 as in docs/tools/sizes.py. Requests and connections were
measured on CPUs: `AdminClient` over TLS, gloo on one host.
"""

import asyncio
import heapq
import math
import random
import selectors
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, pstdev

from areal_lora.config.models import Config
from areal_lora.config.sections.run import LINK_BITS
from areal_lora.config.sizing import memory, slots
from areal_lora.errors import ConfigError, RolloutError
from areal_lora.families.shape import DTYPE_BYTES, ModelShape
from areal_lora.families.sites import PassSizes
from areal_lora.obs.metrics.records import RunMetrics
from areal_lora.weight_sync.link.relays import RELAYED_BYTES, REQUEST_S, RelayGroup, workers_of
from areal_lora.weight_sync.messages import ServerEndpoint

FLOPS_PER_S, BYTES_PER_S = 600e12, 3.35e12
HOP_S = 50e-6  # of a chunk for one member of a ring
FIRST = 2
"""First steps of a run, which do not count: they compile, and wait for the first answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A server's iteration takes ``read_s`` and ``sampled_token_s`` for each sequence; its prompts stop the others.

    ``trained_token_s`` are those of one trainer rank, a group's prompt counted once. Answers are lognormal with
    ``sigma``, cut at ``longest`` tokens. ``sources`` trainer ranks send ``nbytes``, at ``link_s`` seconds a byte (0:
    over no link), and merge before for ``merge_s``. The KV cache of a server holds ``kv_tokens``.
    """

    read_s: float
    sampled_token_s: float
    prompt_token_s: float
    trained_token_s: float
    prompt_tokens: float
    answer_tokens: float
    sigma: float
    longest: int
    nbytes: int
    sources: int
    link_s: float
    tree: bool
    activate_s: float
    bucket_bytes: int = 0
    probe_s: float = 0.0
    merge_s: float = 0.0
    kv_tokens: float = math.inf

    def resident(self, config: Config) -> float:
        """Sequences that the KV cache of a server holds, as a mean over time: Little's law of 100 groups.

        A group's prompt is held once, until its longest answer ends; an answer grows.
        """
        n = config.adapters[0].sampling.n_samples
        groups = [self.lengths(f"{i}", n) for i in range(100)]
        held = sum(self.prompt_tokens * max(group) + sum(length**2 for length in group) / 2 for group in groups)
        return self.kv_tokens * sum(map(sum, groups)) / held

    def seats(self, config: Config) -> int:
        """Sequences that run on a server at a time."""
        return max(1, int(min(config.rollout.max_num_seqs, self.resident(config))))

    def lengths(self, key: str, n: int) -> list[int]:
        """Tokens of ``n`` answers; equal for equal keys."""
        rng, mu = random.Random(key), math.log(self.answer_tokens) - self.sigma**2 / 2
        return [min(self.longest, max(1, round(rng.lognormvariate(mu, self.sigma)))) for _ in range(n)]

    def iteration_s(self, sequences: float) -> float:
        return self.read_s + sequences * self.sampled_token_s

    def batch_s(self, config: Config) -> float:
        """A step's groups on the servers of ``config``, if all of the seats that they need are taken meanwhile."""
        groups = config.adapters[0].sampling.prompts_per_step / config.rollout.servers
        sequences = groups * config.adapters[0].sampling.n_samples
        seats = min(sequences, self.seats(config))
        iterations = sequences * self.answer_tokens / seats
        return groups * self.prompt_tokens * self.prompt_token_s + iterations * self.iteration_s(seats)

    def requests_s(self, tree: Sequence[RelayGroup]) -> float:
        """One request to each server: rank 0's interpreter, or a relay's, handles one at a time (`Fleet.groups`)."""
        first, *below = tree
        relayed = max((len(group.members) for group in below), default=0)
        return (len(first.members) + len(below) + relayed) * REQUEST_S

    def wire_s(self, tree: Sequence[RelayGroup]) -> float:
        """All groups send at once, bucket by bucket: the slowest counts, and a bucket's way to it."""
        ends, level_s = list[float](), dict[ServerEndpoint | None, float]({None: 0.0})
        for group in tree:  # each after that of its relay
            workers, senders = workers_of(group), 1 if group.relay else self.sources
            ends.append(level_s[group.relay] + self.group_s(workers, senders))
            bucket_s = self.group_s(
                workers, senders, min(self.nbytes, self.sources * min(self.bucket_bytes, RELAYED_BYTES))
            )
            level_s |= dict.fromkeys(group.members, level_s[group.relay] + bucket_s)
        return max(ends)

    def group_s(self, workers: int, senders: int, nbytes: int | None = None) -> float:
        """gloo sends along a binomial tree: the root once for each level, its first receiver once less, of all sources.

        NCCL sends in chunks along a ring. ``senders`` share what the roots send; a relay is the root for all sources.
        """
        seconds = (self.nbytes if nbytes is None else nbytes) * self.link_s
        if self.tree:
            levels = math.ceil(math.log2(workers + 1))
            return seconds * max(1.0, levels / senders, levels - 1)
        return seconds + (workers - 1) * HOP_S * (self.link_s > 0)


def arithmetic(config: Config, shape: ModelShape) -> CostModel:
    """Of the first adapter. Prompts and answers take half of the longest answer, which is a guess.

    The trainer computes a group's prompt once (`collate.Tree`) and predicts its answers, in passes that train and that
    score (`learn.annotate`).
    """
    adapter, tp, algorithm = config.adapters[0], config.rollout.tp, config.adapters[0].algorithm
    sizes, longest = PassSizes.of(shape, adapter.spec("")), adapter.sampling.max_new_tokens
    nbytes, seats = slots.version_bytes(config, shape, adapter), slots.seats_of(config)
    n, prompt = adapter.sampling.n_samples, longest // 2
    answer = longest - prompt
    tokens, read, pairs = prompt + n * answer, n * answer, prompt**2 // 2 + n * answer * (prompt + answer // 2)
    critics = [PassSizes.of(shape, replace(adapter.spec(""), value_head=True))] * algorithm.has_critic
    scored = [sizes] * (algorithm.needs_prox(adapter.minibatches) or adapter.dropout > 0) + critics
    if algorithm.kl_coef > 0 and algorithm.teacher is None:
        scored.append(sizes if algorithm.has_reference else PassSizes.of(shape, None))
    passes, again = sum(each.forward(tokens, pairs, read) for each in scored), config.trainer.recompute
    for each in [sizes, *critics]:
        passes += each.training(tokens, pairs, read)
        passes += each.recompute(tokens, 0 if again == "selective" else pairs) if again != "none" else 0
    server = next(m for m in memory.job_memory(config, shape) if m.role == "rollout")
    kv_tokens = memory.kv_tokens(config, shape, server)
    remote = {seat.node for seat in seats.servers} - {seat.node for seat in seats.trainer}
    return CostModel(
        read_s=shape.parameters * DTYPE_BYTES[config.model.dtype] / BYTES_PER_S / tp,
        sampled_token_s=sizes.forward(1, longest) / FLOPS_PER_S / tp
        + memory.kv_token_bytes(config, shape) * longest * 3 / 4 / BYTES_PER_S,  # of the prompt and half an answer
        prompt_token_s=sizes.forward(1, longest // 2) / FLOPS_PER_S / tp,
        trained_token_s=passes / tokens / FLOPS_PER_S,
        prompt_tokens=longest / 2,
        answer_tokens=longest / 2,
        sigma=0.8,
        longest=longest,
        nbytes=nbytes,
        sources=slots.source_ranks(config, shape),
        link_s=8 / LINK_BITS if remote else 0.0,
        tree=slots.broadcast_backend(config) == "gloo",
        activate_s=nbytes / slots.HOST_BYTES_PER_S,
        bucket_bytes=slots.bucket_bytes(config, shape),
        merge_s=slots.merging_s(config, shape, adapter),
        kv_tokens=math.inf if kv_tokens is None else kv_tokens,
    )


def scaled(
    costs: CostModel, measured: RunMetrics, own: CostModel, config: Config, answers: Sequence[str] = ()
) -> CostModel:
    """``costs`` times what a run of ``config`` took against its ``own`` arithmetic, lengths spread as its ``answers``.

    Of several adapters the first counts, with its share of the tokens in the time of a step.
    Raises ConfigError for a run with too few steps.
    """
    every = [step for step in measured.steps if step.step_s and not step.by_client]
    steps = [step for step in every if step.adapter == config.adapters[0].name][FIRST:]

    def typical(tag: str) -> float:
        return median([value for step in steps if (value := step.metrics.get(tag)) is not None] or [0.0])

    def phases_s(*names: str) -> float:
        sums = [sum(publish.phases_ms.get(name) or 0.0 for name in names) for publish in measured.publishes[1:]]
        return median(sums or [0.0]) / 1e3

    sequences, tokens, mean = (typical(f"train/{tag}") for tag in ("n_sequences", "n_tokens", "mean_answer_tokens"))
    if not sequences:
        raise ConfigError("--like", f"the run has at most {FIRST} training steps with samples", "name a longer run")
    prompt_tokens = tokens / sequences - mean
    computed = sequences * (mean + prompt_tokens / config.adapters[0].sampling.n_samples)
    # A batch that was whole before the trainer requested it has taken the servers less than the step.
    since_s = steps[0].time_s - steps[0].step_s
    beside = [step for step in every if since_s < step.time_s <= steps[-1].time_s]
    of_first, of_all = (sum(step.metrics.get("train/n_tokens") or 0.0 for step in some) for some in (steps, beside))
    share = of_first / of_all
    batch_s = share * median(step.step_s - max(0.0, step.metrics.get("time/batch_spare_s") or 0.0) for step in steps)
    served = batch_s / replace(own, answer_tokens=mean, prompt_tokens=prompt_tokens).batch_s(config)
    trained_s = share * median(step.step_s * (1 - (step.trainer_idle or 0.0)) for step in steps)
    return replace(
        costs,
        answer_tokens=mean,
        prompt_tokens=prompt_tokens,
        sigma=_sigma([len(answer) for answer in answers]),
        read_s=costs.read_s * served,
        sampled_token_s=costs.sampled_token_s * served,
        prompt_token_s=costs.prompt_token_s * served,
        trained_token_s=costs.trained_token_s * trained_s * config.trainer.world_size / computed / own.trained_token_s,
        activate_s=phases_s("stage", "commit"),
        probe_s=phases_s("probe"),
        merge_s=costs.merge_s / own.merge_s * phases_s("pack") if own.merge_s else costs.merge_s,
    )


def _sigma(lengths: Sequence[int]) -> float:
    """Of the lognormal law with the spread of ``lengths``."""
    return math.sqrt(math.log1p((pstdev(lengths) / fmean(lengths)) ** 2)) if any(lengths) else 0.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while a task can run, and then jumps to the next timer."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        return self.now_s


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # nothing outside wakes a task
            raise RolloutError("the simulated run waits without end (fix: report it with the configuration)")
        self._loop.now_s += max(timeout, 0.0)
        return []


class VirtualServer:
    """Continuous batching: all running sequences take a token in each iteration; beyond ``seats`` they wait in order.

    The prompt of a group stops the others while it is computed. A silent server ends nothing any more.
    """

    def __init__(self, costs: CostModel, seats: int, slowness: float) -> None:
        self._costs, self._seats, self._slowness = costs, seats, slowness
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, list[int], asyncio.Future[None]]] = deque()  # length, those left of its group
        self._running: list[tuple[float, int, list[int], asyncio.Future[None]]] = []  # progress at its end, order
        self._progress = self._prompts_s = self._at = self.busy_s = 0.0  # progress: tokens since the start
        self._order, self._timer = 0, self._loop.call_later(0.0, self._tick)
        self.silent_since: float | None = None

    async def generate(self, lengths: list[int]) -> None:
        """Return when answers of ``lengths`` have ended."""
        left, done = [len(lengths)], self._loop.create_future()
        self._waiting.extend((length, left, done) for length in lengths)
        self._tick()
        self._prompts_s += self._costs.prompt_tokens * self._costs.prompt_token_s * self._slowness
        try:
            await done
        finally:
            if left[0]:  # it was cut off
                self._waiting = deque(each for each in self._waiting if each[2] is not done)
                self._running = [each for each in self._running if each[3] is not done]
                heapq.heapify(self._running)
                self._tick()

    def fall_silent(self) -> None:
        self._tick()
        self.silent_since = self._loop.time()

    def _tick(self) -> None:
        """Account for the time that has passed, end and start sequences, and return at the next end."""
        passed_s, self._at = self._loop.time() - self._at, self._loop.time()
        self._timer.cancel()
        if self.silent_since is not None:
            return
        if self._running:
            self.busy_s += passed_s
            prompts_s = min(self._prompts_s, passed_s)
            self._prompts_s -= prompts_s
            self._progress += (passed_s - prompts_s) / self._iteration_s()
        while self._running and self._running[0][0] <= self._progress + 1e-6:
            _, _, left, done = heapq.heappop(self._running)
            left[0] -= 1
            if not left[0] and not done.done():
                done.set_result(None)
        while self._waiting and len(self._running) < self._seats:
            length, left, done = self._waiting.popleft()
            self._order += 1
            heapq.heappush(self._running, (self._progress + length, self._order, left, done))
        if self._running:
            left_s = (self._running[0][0] - self._progress) * self._iteration_s()
            self._timer = self._loop.call_later(self._prompts_s + left_s, self._tick)

    def _iteration_s(self) -> float:
        return self._costs.iteration_s(len(self._running)) * self._slowness

"""Read all rows of the tasks before anything starts, so that a bad row costs one line and not a run.

Estimates from several answers to each problem of an evaluation.

- pass@k is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, equation 1): for c correct ones of n answers
  ``1 - C(n - c, k) / C(n, k)``, averaged over the problems.
- majority@n is the share of problems whose most frequent answer is correct (Wang et al. 2022, arXiv:2203.11171); ties
  are split evenly, which is their mean over random orders.
- The 95 % interval of an accuracy with one answer per problem is Wilson's. All others are percentile bootstraps over
  problems, not over answers: answers to one problem are not independent.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import msgspec
import numpy as np

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.sections.task import (
    BuiltInReward,
    CodeReward,
    FunctionReward,
    RewardsConfig,
    TaskConfig,
    WordProblemsTask,
    reward_keys,
)
from areal_lora.errors import ConfigError
from areal_lora.tasks.code_reward import CodeSettings, row_tests
from areal_lora.tasks.datasets import hub_sources, load_samples
from areal_lora.tasks.rewards import given_answer
from areal_lora.tasks.score_item import ScoreItem
from areal_lora.tasks.scorer import Score, ScorerPool
from areal_lora.tasks.word_problems import Split
from areal_lora.types import Outcome


def task_problems(config: Config, *, online: bool) -> Iterator[ConfigError]:
    """Yield the first problem of each adapter's task. Hub data sets are read, and downloaded, only if ``online``.

    Raises EnvironmentError_ if a hub data set or a package is not available.
    """
    for i, adapter in enumerate(config.adapters):
        own: list[tuple[str, TaskConfig, tuple[Split, ...]]] = [("task", adapter.task, ("train", "eval"))]
        sets = [(f"evals.{j}.task", chosen.task) for j, chosen in enumerate(adapter.evals)]
        for key, task, splits in own + [(key, task, ("eval",)) for key, task in sets if task is not None]:
            if isinstance(task, WordProblemsTask) or (hub_sources(task) and not online):
                continue
            problem = _problem(f"adapters.{i}", key, task, splits, adapter.reward)
            if problem is None and key == "task" and adapter.sft.steps:
                problem = _not_given(f"adapters.{i}", adapter)
            if problem is not None:
                yield problem


def _not_given(at: str, adapter: AdapterConfig) -> ConfigError | None:
    """The first training row that has no answer to imitate."""
    try:
        for sample in load_samples(adapter.task, "train"):
            given_answer(sample, adapter.sft.column)
    except ConfigError as error:
        return ConfigError(f"{at}.{error.path}", error.reason, error.fix)
    return None


def _problem(
    at: str, key: str, task: TaskConfig, splits: Sequence[Split], rewards: RewardsConfig
) -> ConfigError | None:
    """The first problem of one task, which is at ``key`` of the adapter at ``at``."""
    try:
        samples = [sample for split in splits for sample in load_samples(task, split)]
    except ConfigError as error:
        path = error.path.replace("task.", f"{at}.{key}.", 1) if error.path.startswith("task.") else error.path
        return ConfigError(path, error.reason, error.fix)
    without = next((sample for sample in samples if not sample.gold.strip()), None)
    for place, reward in reward_keys(at, rewards):
        if without is not None and isinstance(reward, BuiltInReward):
            return ConfigError(
                f"{place}.kind",
                f"{reward.kind} compares with a gold answer, and {without.uid} has none",
                f"name its column in {key}.columns.answer, or use a reward of your own",
            )
        if isinstance(reward, CodeReward):
            settings = msgspec.convert(reward.model_dump(), CodeSettings)
            for sample in samples:
                try:
                    row_tests(sample.columns, settings)
                except ValueError as error:
                    fix = "correct the row, or the names of the columns"
                    return ConfigError(place, f"{sample.uid}: {error}", fix)
    return None


ROWS = 4


def reward_problems(config: Config, *, online: bool) -> Iterator[ConfigError]:
    """Yield each reward function that cannot be loaded, or fails on the gold answers of all of the first ``ROWS`` rows.

    Functions with a network are not called, because they may cost money. Nothing is checked where the run's scorer
    processes are of another machine or interpreter. Hub data sets are read only if ``online``. Raises
    EnvironmentError_ if no scorer process can be started.
    """
    if config.cluster.kind != "local" or config.cluster.controller_python is not None:
        return
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client or (hub_sources(adapter.task) and not online):
            continue
        checked = [
            (place, reward)
            for place, reward in reward_keys(f"adapters.{i}", adapter.reward)
            if isinstance(reward, FunctionReward)
        ]
        items = _items(adapter) if checked else []
        for place, reward in checked:
            if (problem := _reward_problem(place, reward, items)) is not None:
                yield problem


def _items(adapter: AdapterConfig) -> list[ScoreItem]:
    samples = load_samples(adapter.task, "train")[:ROWS]
    return [ScoreItem.of(sample, sample.gold or "1", n_tokens=1, finish_reason="stop") for sample in samples]


def _reward_problem(place: str, reward: FunctionReward, items: Sequence[ScoreItem]) -> ConfigError | None:
    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop that runs
            scores = thread.submit(asyncio.run, _scores(reward, [] if reward.network else items)).result()
    except ConfigError as error:
        return ConfigError(f"{place}.path", error.reason, error.fix)
    if not scores or any(score.outcome is Outcome.OK for score in scores):
        return None
    reason = f"it fails on the gold answers of the first {len(scores)} rows: {scores[0].detail}"
    return ConfigError(f"{place}.path", reason, "correct the function")


async def _scores(reward: FunctionReward, items: Sequence[ScoreItem]) -> list[Score]:
    async with ScorerPool(reward) as pool:
        return await pool.score(items)


Z_95 = 1.959963984540054
RESAMPLES = 2000

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. ``reward`` is None if it was not scored, ``correct`` too without a rule.

    ``vote`` is what the answer states, None if it states nothing. ``n_tokens`` counts sampled tokens. ``truncated``:
    it ended because of its length.
    """

    reward: float | None
    correct: bool | None
    vote: str | None
    n_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Fractions are in [0, 1]. None where there is no rule for what is correct, or no reward.

    ``pass_at`` is by k. ``interval`` is the method of ``accuracy_95``: ``wilson`` or ``bootstrap``.
    """

    accuracy_95: Interval | None = None
    reward_95: Interval | None = None
    interval: str = ""
    pass_at: dict[int, float] = field(default_factory=dict)
    majority: float | None = None
    answer_tokens: float = 0.0
    truncated: float = 0.0


def estimate(problems: Sequence[Sequence[Answer]], *, ruled: bool) -> Estimates:
    """Summarize the answers to each problem; ``ruled``: all that have a reward have a grade.

    An answer without a score is not correct and has no reward.
    """
    answers = [answer for problem in problems for answer in problem]
    if not answers:
        return Estimates()
    n = min(len(problem) for problem in problems)
    correct = [[answer.correct is True for answer in problem] for problem in problems]
    rewards = [[answer.reward for answer in problem if answer.reward is not None] for problem in problems]
    accuracy_95, method = None, ""
    if ruled and n == 1 == max(map(len, problems)):
        accuracy_95, method = wilson(sum(flags[0] for flags in correct), len(problems)), "wilson"
    elif ruled:
        accuracy_95, method = bootstrap([sum(flags) / len(flags) for flags in correct]), "bootstrap"
    several = ruled and n > 1
    return Estimates(
        accuracy_95=accuracy_95,
        reward_95=bootstrap([sum(values) / len(values) for values in rewards if values]),
        interval=method,
        pass_at={k: _mean([pass_at_k(len(f), sum(f), k) for f in correct]) for k in ks(n)} if several else {},
        majority=_mean([majority([(a.vote, a.correct is True) for a in problem]) for problem in problems])
        if several
        else None,
        answer_tokens=_mean([answer.n_tokens for answer in answers]),
        truncated=_mean([answer.truncated for answer in answers]),
    )


def ks(n: int) -> list[int]:
    """The k of which pass@k is reported: powers of two up to ``n``, and ``n``."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of ``k`` answers, drawn without replacement from ``n`` with ``correct`` ones, is correct."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(votes: Sequence[tuple[str | None, bool]]) -> float:
    """Whether the most frequent vote is correct: 1 or 0, or a fraction for ties. An answer without a vote has none.

    If answers with one vote differ in their correctness, their share of correct ones counts.
    """
    cast: dict[str, list[bool]] = defaultdict(list)
    for vote, correct in votes:
        if vote is not None:
            cast[vote].append(correct)
    most = max((len(flags) for flags in cast.values()), default=0)
    return _mean([sum(flags) / len(flags) for flags in cast.values() if len(flags) == most]) if cast else 0.0


def wilson(successes: int, n: int) -> Interval:
    """The 95 % score interval of a proportion (Wilson 1927)."""
    share, z2 = successes / n, Z_95**2
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(values: Sequence[float]) -> Interval | None:
    """The 95 % percentile interval of the mean, from ``RESAMPLES`` resamples; the same at every call. None of none."""
    if not values:
        return None
    draw, numbers = np.random.default_rng(0), np.asarray(values, dtype=np.float64)
    means = [numbers[draw.integers(len(numbers), size=len(numbers))].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

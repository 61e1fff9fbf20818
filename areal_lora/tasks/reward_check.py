"""Score the gold answers of the first rows before anything starts, so that a broken reward costs one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.sections.reward import FunctionReward, reward_keys
from areal_lora.errors import ConfigError
from areal_lora.tasks.datasets import hub_sources, load_samples
from areal_lora.tasks.score_item import ScoreItem
from areal_lora.tasks.scorer import Score, ScorerPool
from areal_lora.types import Outcome

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
            if (problem := _problem(place, reward, items)) is not None:
                yield problem


def _items(adapter: AdapterConfig) -> list[ScoreItem]:
    samples = load_samples(adapter.task, "train")[:ROWS]
    return [ScoreItem.of(sample, sample.gold or "1", n_tokens=1, finish_reason="stop") for sample in samples]


def _problem(place: str, reward: FunctionReward, items: Sequence[ScoreItem]) -> ConfigError | None:
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

"""Read all rows of the tasks before anything starts, so that a bad row costs one line and not a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.sections.reward import BuiltInReward, CodeReward, RewardsConfig, reward_keys
from areal_lora.config.sections.task import TaskConfig, WordProblemsTask
from areal_lora.errors import ConfigError
from areal_lora.tasks.code_reward import CodeSettings, row_tests
from areal_lora.tasks.datasets import hub_sources, load_samples
from areal_lora.tasks.given import given_answer
from areal_lora.tasks.word_problems import Split


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

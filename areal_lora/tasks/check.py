"""Read all rows of the tasks before anything starts, so that a bad row costs one line and not a run.

What joins a run has the checks of a start as well (`joining`).
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import msgspec

from areal_lora.config.facts import gather_facts
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import alone, own_path
from areal_lora.config.rules.adapter_rules import unserved
from areal_lora.config.rules.findings import Severity, resolve_targets
from areal_lora.config.rules.guardrails import check
from areal_lora.config.sections import task as sections
from areal_lora.errors import ConfigError, ConfigErrors
from areal_lora.tasks.code_reward import CodeSettings, row_tests
from areal_lora.tasks.datasets import load_samples, reads_hub
from areal_lora.tasks.judge import fields_of, fill
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.tasks.rewards import extract_answer, states_several
from areal_lora.tasks.scorer import ScorerPool
from areal_lora.tasks.stored_samples import given_answer, indices_by_value, value_of
from areal_lora.tasks.word_problems import Split
from areal_lora.types import Outcome, Sample


def joining(config: Config, adapter: AdapterConfig, *, online: bool, resumed: bool = False) -> AdapterConfig:
    """``adapter`` with resolved targets, once it has passed the rules of a start for the run of ``config``.

    Raises ConfigError or ConfigErrors with keys of the adapter's section, and what `task_problems` raises.
    """
    # Without the service: its rule is about names that a configuration may give.
    single = alone(config.model_copy(update={"service": None}), adapter)
    facts = gather_facts(single, runs_here=False)
    findings = [f for f in check(single, facts) if f.severity is Severity.ERROR and f.path.startswith("adapters")]
    errors = [finding.error() for finding in findings] or list(task_problems(single, online=online, resumed=resumed))
    if not errors and (finding := unserved(config, adapter, facts)) is not None:
        errors = [finding.error()]
    if errors:
        raise ConfigErrors([own_path(error) for error in errors])
    return resolve_targets(single, facts).adapters[0]


def task_problems(config: Config, *, online: bool, resumed: bool = False) -> Iterator[ConfigError]:
    """Yield the first problem of each adapter's task; tasks are read once where they have none.

    Hub data sets are read, and downloaded, only if ``online``.

    Where a run is ``resumed`` its rows stay as they are: gold answers without a single number are no problem then.

    Raises EnvironmentError_ if a hub data set or a package is not available.
    """
    good = set[str]()
    for i, adapter in enumerate(config.adapters):
        own: list[tuple[str, sections.TaskConfig, tuple[Split, ...]]] = [("task", adapter.task, ("train", "eval"))]
        sets = [(f"evals.{j}.task", chosen.task) for j, chosen in enumerate(adapter.evals)]
        for key, task, splits in own + [(key, task, ("eval",)) for key, task in sets if task is not None]:
            if isinstance(task, sections.WordProblemsTask) or (reads_hub(task) and not online):
                continue
            checked = repr((task, splits, adapter.reward, adapter.sft, adapter.sampling.staged))
            if checked in good:
                continue
            problem = _problem(f"adapters.{i}", key, task, splits, adapter, resumed)
            if problem is None and key == "task" and (adapter.sft.steps or adapter.sampling.staged is not None):
                try:
                    samples = load_samples(task, "train")
                    for sample in samples if adapter.sft.steps else ():
                        given_answer(sample, adapter.sft.column)
                    if adapter.sampling.staged is not None:
                        indices_by_value(samples, adapter.sampling.staged)
                except ConfigError as error:
                    problem = ConfigError(f"adapters.{i}.{error.path}", error.reason, error.fix)
            if problem is not None:
                yield problem
            else:
                good.add(checked)


def _problem(
    at: str, key: str, task: sections.TaskConfig, splits: Sequence[Split], adapter: AdapterConfig, resumed: bool
) -> ConfigError | None:
    """The first problem of one task, which is at ``key`` of the adapter at ``at``."""
    try:
        loaded = [load_samples(task, split) for split in splits]
    except ConfigError as error:
        path = error.path.replace("task.", f"{at}.{key}.", 1) if error.path.startswith("task.") else error.path
        return ConfigError(path, error.reason, error.fix)
    column = task.columns.messages if isinstance(task, sections.DatasetTask) and not adapter.sft.steps else None
    for sample in (sample for samples in loaded for sample in samples if column is not None):
        if value_of(sample.columns, str(column))[-1]["role"] == "assistant":  # its later turns would be lost
            reason = f"{sample.uid}: the last message is the assistant's, so there is nothing to answer"
            fix = f"remove it, or train on it: sft.steps and sft.column={column}"
            return ConfigError(f"{at}.{key}.columns.messages", reason, fix)
    without = next((sample for samples in loaded for sample in samples if not sample.gold.strip()), None)
    for place, reward in sections.reward_keys(f"{at}.", adapter.reward):
        if without is not None and isinstance(reward, sections.BuiltInReward) and reward.kind != "none":
            return ConfigError(
                f"{place}.kind",
                f"{reward.kind} compares with a gold answer, and {without.uid} has none",
                f"name its column in {key}.columns.answer, or use a reward of your own",
            )
        if not resumed and isinstance(reward, sections.BuiltInReward) and reward.kind == "numeric_match":
            golds = [sample.gold for samples in loaded for sample in samples]
            if unread := [gold for gold in golds if extract_answer(gold) is None or states_several(gold)]:
                what = f"{len(unread)} of {len(golds)} gold answers state no number, or several"
                reason = f"{what}, the first is {unread[0][-40:]!r}"
                fix = f"choose math_verify or a reward of your own, or leave these rows out by {key}.keep"
                return ConfigError(f"{place}.kind", reason, fix)
        if (read := _reader(reward, resumed)) is None:
            continue
        for sample in (sample for samples in loaded for sample in samples):
            try:
                read(sample)
            except ValueError as error:
                return ConfigError(place, f"{sample.uid}: {error}", "correct the row, or the names of the columns")
    return None


def _reader(reward: sections.RewardConfig, resumed: bool) -> Callable[[Sample], object] | None:
    """What raises ValueError for a row without the columns that ``reward`` names, if it names any."""
    match reward:
        case sections.CodeReward():
            settings = msgspec.convert(reward.model_dump(), CodeSettings)
            return lambda sample: row_tests(sample.columns, settings)
        case sections.JudgeReward(prompt=str(text)) | sections.ModelReward(input=str(text)) if not resumed:
            return lambda sample: fill(text, fields_of("", sample.prompt, sample.answer, [], sample.columns))
    return None


ROWS = 4


def reward_problems(config: Config, *, online: bool) -> Iterator[ConfigError]:
    """Yield each reward function that cannot be loaded, or fails on the gold answers of all of the first ``ROWS`` rows
    of a set.

    Functions with a network are not called, because they may cost money. Nothing is checked where the run's scorer
    processes are of another machine or interpreter. Hub data sets are read only if ``online``. Raises
    EnvironmentError_ if no scorer process can be started.
    """
    if config.cluster.kind != "local" or config.cluster.controller_python is not None:
        return
    for i, adapter in enumerate(config.adapters):
        if adapter.is_client:
            continue
        checked = [
            (place, reward)
            for place, reward in sections.reward_keys(f"adapters.{i}.", adapter.reward)
            if isinstance(reward, sections.FunctionReward)
        ]
        sets = _first_rows(adapter, online) if checked else {}
        for place, reward in checked:
            if (problem := _reward_problem(place, reward, sets, alone=len(adapter.rewards) == 1)) is not None:
                yield problem


def _first_rows(adapter: AdapterConfig, online: bool) -> dict[str, list[ScoreItem]]:
    """Gold answers as completions, by the key of the set."""
    chosen: list[tuple[str, sections.TaskConfig | None, Split]] = [("task.train", adapter.task, "train")]
    if isinstance(adapter.task, sections.DatasetTask) and adapter.task.eval is not None:
        chosen.append(("task.eval", adapter.task, "eval"))
    chosen += [(f"evals.{j}.task", own.task, "eval") for j, own in enumerate(adapter.evals)]
    return {
        key: [
            ScoreItem.of(sample, sample.gold or "1", n_tokens=1, finish_reason="stop")
            for sample in load_samples(task, split, first=ROWS)
        ]
        for key, task, split in chosen
        if task is not None and (online or not reads_hub(task))
    }


def _reward_problem(
    place: str, reward: sections.FunctionReward, sets: Mapping[str, Sequence[ScoreItem]], *, alone: bool
) -> ConfigError | None:
    """The problem of the reward at ``place``; unless it is ``alone``, it need not apply to any row of a set."""

    async def scored() -> list[Score]:
        async with ScorerPool(reward) as pool:
            return await pool.score([] if reward.network else [item for items in sets.values() for item in items])

    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has an event loop that runs
            scores = iter(thread.submit(asyncio.run, scored()).result())
    except ConfigError as error:
        return ConfigError(f"{place}.path", error.reason, error.fix)
    for key, items in sets.items():
        own = list(islice(scores, len(items)))
        if own and not any(score.outcome is Outcome.OK or not (score.applies or alone) for score in own):
            reason = f"it fails on the gold answers of the first {len(own)} rows of {key}: {own[0].detail}"
            return ConfigError(f"{place}.path", reason, "correct the function, or the columns of the set")
    return None

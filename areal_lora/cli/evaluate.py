"""``areal-lora eval`` and ``compare``: a version of a run on its sets, without the run; figures of several runs."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from itertools import chain
from operator import itemgetter
from statistics import fmean, median
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lora.cli.find_run import RUN_HELP, Adapter, AnyVersion, Overrides, Run, open_run, run_names, with_overrides
from areal_lora.cli.serve import ServingEndpoint, served
from areal_lora.config.models import AdapterConfig, Config
from areal_lora.config.recorded import adapter_named, conflict
from areal_lora.data.prompts import load_tokenizer
from areal_lora.errors import ConfigError, RolloutError
from areal_lora.obs.metrics.reader import read_metrics
from areal_lora.obs.metrics.records import EvalRecord, StepRecord, lag_counts, mean_lag
from areal_lora.obs.report.side_by_side import differing_keys, shown
from areal_lora.rollout.agent_api.endpoint import agent_gateway
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.channel.channel_messages import EvalResult
from areal_lora.rollout.completion_client import CompletionClient
from areal_lora.rollout.controller.eval_sets import EvalSet, load_sets, ranks_of
from areal_lora.rollout.controller.evaluation import EvalPlaces
from areal_lora.rollout.custom_child import ContextFields
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.rollout.main import build_evaluator
from areal_lora.rollout.routing import Router
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.scorer import RewardSum
from areal_lora.types import AdapterRef

LAST = 10
Figures = dict[str, float | int | None]


def evaluate(
    run: Run,
    overrides: Overrides = None,
    version: AnyVersion = "newest",
    adapter: Adapter = None,
    names: Annotated[list[str] | None, typer.Option("--set", metavar="NAME", help="this set only; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the records, one a line")] = False,
) -> None:
    """Evaluate a version on the sets of the run's configuration, with a server of its own.

    It prints the figures and writes nothing; the run may be finished or in progress. Texts, workflow and reward are
    those of the run, if no key such as adapters.NAME.evals is overridden.
    """
    folder, config = open_run(run)
    if overrides:
        before, config = config, with_overrides(folder, overrides)
        if (error := conflict(before, config)) is not None:
            raise error
    chosen = _with_sets(adapter_named(config, adapter), names)
    sets = load_sets(config, chosen, load_tokenizer(config.model.folder))
    print(f"starting vLLM with {version} of {folder}", file=sys.stderr, flush=True)
    with served(folder, config, chosen, [version], 0) as server:
        result = asyncio.run(_measured(folder, config, chosen, sets, server))
    for record in result.sets:
        text = msgspec.json.encode(record).decode() if as_json else f"{record.name}: {record.figures()}"
        print(text if as_json else f"{server.models[0]}  {text}")
    if result.failed:
        raise RolloutError("; ".join(f"{name}: {reason}" for name, reason in result.failed.items()))


def _with_sets(adapter: AdapterConfig, names: Sequence[str] | None) -> AdapterConfig:
    """The adapter with the sets of these names, in the configured order; with all without names."""
    known = [chosen.name for chosen in adapter.eval_sets]
    for name in names or ():
        if name not in known:
            raise ConfigError(f"--set {name}", "the run has no such set", f"it has: {', '.join(known)}")
    return adapter.model_copy(update={"evals": [s for s in adapter.eval_sets if not names or s.name in names]})


async def _measured(
    folder: RunFolder, config: Config, adapter: AdapterConfig, sets: Sequence[EvalSet], server: ServingEndpoint
) -> EvalResult:
    [model], router = server.models, Router()
    ref = AdapterRef.parse(model if "@" in model else f"{model}@v0")  # the base
    router.announce(ref, {"server": server.url.removesuffix("/v1")})
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(CompletionClient(router, ""))  # loopback, without a key
        scorer = await stack.enter_async_context(RewardSum(adapter.rewards, adapter.reward_weights, folder.path))
        sessions = Sessions()
        if any(each.workflow.calls_endpoint for each in sets):
            sessions = await stack.enter_async_context(agent_gateway())
        workers = await stack.enter_async_context(
            EnvironmentWorkers(adapter.workflow, ContextFields.of(config, adapter), held_out=ranks_of(sets))
        )
        places = EvalPlaces(config.rollout.max_num_seqs)
        evaluator = build_evaluator(config, adapter, sets, client, scorer, sessions, places, workers=workers)
        return await evaluator.run(ref, "eval")


def compare(
    names: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help=RUN_HELP, autocompletion=run_names)],
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help="figures of this adapter only")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object")] = False,
) -> None:
    """Print the keys in which runs differ, and the figures of all; also while they work."""
    if len(names) < 2:
        raise ConfigError("compare", f"{names[0]} is the only run", "name two or more")
    runs = [open_run(name) for name in names]
    keys = [(key, *values) for key, values in differing_keys([c.model_dump(mode="json") for _, c in runs]).items()]
    figures = [figures_of(*run, adapter) for run in runs]
    rows = [(name, *(found.get(name) for found in figures)) for name in dict.fromkeys(chain(*figures))]
    if as_json:
        json.dump({"configuration": keys, "figures": rows}, sys.stdout)
        print()
        return
    table = Table("", *(str(folder) for folder, _ in runs), box=None, pad_edge=False, header_style="")
    for row in [*(keys or [("(no key differs)",)]), ("",), *rows]:
        table.add_row(*(Text(shown(value), overflow="fold") for value in row))
    Console(highlight=False).print(table)


def figures_of(folder: RunFolder, config: Config, adapter: str | None) -> Figures:
    """Figures of the adapter called ``adapter``; without a name of all, after their names where there are several.

    Raises ConfigError where the run has no such adapter.
    """
    metrics, found, only = read_metrics(folder), Figures(), len(config.adapters) == 1
    for one in [adapter_named(config, adapter)] if adapter or only else config.adapters:
        steps = [step for step in metrics.steps if only or step.adapter == one.name]
        mine = figures(steps, [record for record in metrics.evals if only or record.adapter == one.name])
        found |= mine if adapter or only else {f"{one.name}: {name}": value for name, value in mine.items()}
    return found


def figures(steps: Sequence[StepRecord], evals: Sequence[EvalRecord]) -> Figures:
    """Figures of the curves of one adapter; None: not measured."""
    last = itemgetter(-1)
    accuracies = [e.accuracy for e in evals if e.accuracy is not None and e.order == 0]
    return {
        "steps": len(steps),
        "seconds": _of(last, [step.time_s for step in steps]),
        "median s of a step": _of(median, [step.step_s for step in steps]),
        f"mean reward, first {LAST} steps": _of(fmean, [step.reward_mean for step in steps[:LAST]]),
        f"mean reward, last {LAST} steps": _of(fmean, [step.reward_mean for step in steps[-LAST:]]),
        "accuracy, first": accuracies[0] if accuracies else None,
        "accuracy, last": accuracies[-1] if accuracies else None,
        "accuracy, best": max(accuracies, default=None),
        "entropy, last step": _of(last, [step.metrics.get("train/entropy") for step in steps]),
        "mean lag of tokens": mean_lag(lag_counts(steps)),
        "sampled tokens per s, median": _of(median, [step.metrics.get("train/rollout_tokens_per_s") for step in steps]),
    }


def _of(how: Callable[[Sequence[float]], float], values: Iterable[float | None]) -> float | None:
    """A figure of the values that were measured; None where none was."""
    measured = [value for value in values if value is not None]
    return how(measured) if measured else None

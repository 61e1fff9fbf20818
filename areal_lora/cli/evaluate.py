"""``areal-lora eval RUN``: evaluate a version of a run on its sets, without the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from areal_lora.cli.recorded_runs import ADAPTER_HELP, RUN_HELP, VERSION_HELP, find_run, recorded_config, run_names
from areal_lora.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from areal_lora.cli.serving import ServingEndpoint
    from areal_lora.config.models import AdapterConfig, Config
    from areal_lora.rollout.channel.channel_messages import EvalResult
    from areal_lora.rollout.controller.eval_sets import EvalSet
    from areal_lora.run_folder.paths import RunFolder


def evaluate(
    run: Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=run_names)],
    version: Annotated[str, typer.Option(metavar="N", help=VERSION_HELP)] = "newest",
    adapter: Annotated[str | None, typer.Option(metavar="NAME", help=ADAPTER_HELP)] = None,
    names: Annotated[list[str] | None, typer.Option("--set", metavar="NAME", help="this set only; repeatable")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the records, one a line")] = False,
) -> None:
    """Evaluate a version on the sets of the run's configuration, with a server of its own.

    It prints the figures and writes nothing; the run may be finished or in progress. Texts, workflow and reward are
    those of the run.
    """
    import asyncio

    import msgspec

    from areal_lora.cli.serving import served
    from areal_lora.config.adapter_run import adapter_named
    from areal_lora.data.tokenizer import load_tokenizer
    from areal_lora.rollout.controller.eval_sets import load_sets
    from areal_lora.rollout.eval_record import eval_record

    folder = find_run(run)
    config = recorded_config(folder)
    chosen = _with_sets(adapter_named(config, adapter), names)
    sets = load_sets(config, chosen, load_tokenizer(config.model.folder))
    print(f"starting vLLM with {version} of {folder}", file=sys.stderr, flush=True)
    with served(folder, config, chosen, version, 0) as server:
        result = asyncio.run(_measured(folder, config, chosen, sets, server))
    for order, found in enumerate(result.sets):
        if not found.error:
            record = eval_record(result, order)
            text = msgspec.json.encode(record).decode() if as_json else f"{found.name}: {record.figures()}"
            print(text if as_json else f"{server.model}  {text}")
    if lost := [f"{found.name}: {found.error}" for found in result.sets if found.error]:
        raise RolloutError("; ".join(lost))


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
    from contextlib import AsyncExitStack

    from areal_lora.config.models import AgentWorkflowConfig
    from areal_lora.rollout.agent_api.session import Sessions
    from areal_lora.rollout.agent_gateway import AgentGateway
    from areal_lora.rollout.completion_client import CompletionClient
    from areal_lora.rollout.controller.eval_places import EvalPlaces
    from areal_lora.rollout.main import build_evaluator
    from areal_lora.rollout.routing import Router
    from areal_lora.tasks.reward_sum import RewardSum
    from areal_lora.types import AdapterRef

    ref, router = AdapterRef.parse(server.model), Router()
    router.announce(ref, {"server": server.url.removesuffix("/v1")})
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(CompletionClient(router, ""))  # loopback, without a key
        scorer = await stack.enter_async_context(RewardSum(adapter.rewards, hidden=folder.path))
        sessions = Sessions()
        if any(isinstance(each.workflow, AgentWorkflowConfig) for each in sets):
            sessions = (await stack.enter_async_context(AgentGateway())).sessions
        places = EvalPlaces(config.rollout.max_num_seqs)
        evaluator = build_evaluator(config, adapter, sets, client, scorer, sessions, places=places)
        return await evaluator.run(ref, "eval")

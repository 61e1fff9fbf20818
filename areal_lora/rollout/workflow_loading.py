"""From a configuration's ``workflow`` to the workflow itself."""

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from areal_lora.config.sections import adapter as entry, task as config
from areal_lora.data.prompts import Prompt
from areal_lora.errors import ConfigError
from areal_lora.rollout import custom_child as child, workflow as flow
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.agents import AgentWorkflow
from areal_lora.rollout.completion_client import GenerationFault
from areal_lora.rollout.conversations import ConversationFile, MultiTurnWorkflow, SampleTimeout, repeated
from areal_lora.rollout.environment_workers import EnvironmentWorkers, PlayResult
from areal_lora.rollout.teacher import Teacher, WithTeacher
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef


def build_training(
    adapter: entry.AdapterConfig,
    context: flow.WorkflowContext,
    sessions: Sessions,
    folder: RunFolder | None = None,
    workers: EnvironmentWorkers | None = None,
    teacher: Teacher | None = None,
) -> flow.Workflow:
    """The adapter's workflow for training: given answers for the first versions, then its own. Raises ConfigError.

    Its groups have the baseline that the algorithm compares with, and the log-probabilities of ``teacher``, if it does.
    """
    rollouts = build_workflow(adapter.workflow, context, sessions, folder, workers)
    if adapter.algorithm.has_baseline:
        alone = replace(context, sampling=flow.greedy(context.sampling))
        greedy = build_workflow(adapter.workflow, alone, sessions, folder, workers)
        rollouts = flow.WithBaseline(answers=rollouts, greedy=greedy)
    if teacher is not None:
        rollouts = WithTeacher(answers=rollouts, teacher=teacher, hold_s=adapter.sampling.timeout_s)
    if not adapter.sft.steps:
        return rollouts
    return flow.GivenFirst(
        given=flow.GivenWorkflow(context=context, column=adapter.sft.column), then=rollouts, steps=adapter.sft.steps
    )


def build_workflow(
    chosen: config.WorkflowConfig,
    context: flow.WorkflowContext,
    sessions: Sessions,
    folder: RunFolder | None = None,
    workers: EnvironmentWorkers | None = None,
) -> flow.Workflow:
    """Build what ``chosen`` names. Raises ConfigError.

    ``sessions`` are the agents' endpoint's; the agents' conversations are kept in ``folder``. Code of users runs in
    ``workers``.
    """
    if isinstance(chosen, config.SingleTurnWorkflowConfig):
        return flow.SingleTurnWorkflow(context=context)
    if isinstance(chosen, config.ClientWorkflowConfig):
        raise ConfigError("workflow.kind", "a client drives the adapter: it has no rollouts", "choose another kind")
    assert workers is not None
    cut = chosen.on_timeout == "score"
    if chosen.kind == "multi_turn":
        return MultiTurnWorkflow(context=context, played=workers.run, max_turns=chosen.max_turns, cut=cut)
    if chosen.kind == "custom":
        return CustomWorkflow(context=context, workers=workers)
    return AgentWorkflow(
        context=context,
        sessions=sessions,
        agent=workers.play,
        tool_parser=chosen.tool_parser,
        kept=ConversationFile(folder) if folder else None,
        cut=cut,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomWorkflow:
    """A user's workflow, which runs in a worker with a context of the same fields as ``context``.

    It has `sampling.timeout_s` for a whole group, which is one sample here.
    """

    context: flow.WorkflowContext
    workers: EnvironmentWorkers

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> flow.Episode:
        """Raises AlignmentError for an episode that cannot be trained on: code to correct, not a fault to retry."""
        fields = msgspec.structs.replace(
            self.workers.context,
            format=self.context.formatter.how.model_dump(mode="json"),
            sampling=self.context.sampling.model_dump(mode="json"),
            streams=self.context.streams,
            evaluating=self.context.evaluating,
        )
        timeout_s = self.context.sampling.timeout_s

        async def tried(seed: int) -> PlayResult:
            run = child.packed(child.WorkflowRun(prompt=prompt, ref=ref, seed=seed))
            task = {"context": msgspec.to_builtins(fields), "run": run, "sample": {}}
            try:
                async with asyncio.timeout(timeout_s):
                    return await self.workers.run(task, ContextCalls(context=self.context).answer)
            except TimeoutError:
                raise SampleTimeout(f"the workflow took longer than {timeout_s:g} s") from None

        played = await repeated(tried, seed, prompt.uid)
        episode: flow.Episode = child.unpacked(played.episode, flow.Episode)
        return episode


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCalls:
    """Answers the calls of a workflow in a worker with ``context``. It has conversations of its own."""

    context: flow.WorkflowContext
    clients: dict[tuple[int, ...], flow.RolloutClient] = field(default_factory=dict)

    async def answer(self, body: Any) -> str:
        call = child.unpacked(body, child.Call)
        try:
            return child.packed(child.CallAnswer(result=msgspec.msgpack.encode(await self._result(call))))
        except GenerationFault as fault:
            return child.packed(child.CallAnswer(fault=fault.kind, detail=fault.detail))

    async def _result(self, call: child.Call) -> Any:
        if isinstance(call, child.ScoreCall):
            return await self.context.score(call.items)
        client = self._client(call.conversation)
        ref, limit = client.newest(call.ref), call.timeout_s
        if isinstance(call, child.SampleCall):
            return await client.sample(ref, call.request, timeout_s=limit)
        if isinstance(call, child.ToolCallsCall):
            return await client.tool_calls(ref, call.request, timeout_s=limit)
        ids, temperature = (call.prompt_ids, call.answer_ids), call.temperature
        return await client.score(ref, *ids, temperature=temperature, timeout_s=limit)

    def _client(self, path: tuple[int, ...]) -> flow.RolloutClient:
        if not path:
            return self.context.client
        if path not in self.clients:
            self.clients[path] = self._client(path[:-1]).conversation()
        return self.clients[path]

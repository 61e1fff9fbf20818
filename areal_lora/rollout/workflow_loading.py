"""From a configuration's ``workflow`` to the workflow itself, and what training adds to its answers.

The log-probabilities of a teacher, a model on a server of others, are the reference of an adapter. The controller
requests them when a group has ended, beside the event loop's other work, and they travel to the trainer as a column of
the tokens: no step waits for HTTP. While the teacher does not answer, groups that have ended are held.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from areal_lora.config.sections import adapter as entry, section, task as config
from areal_lora.data.prompts import Prompt, TextTokenizer
from areal_lora.errors import ConfigError, EnvironmentError_
from areal_lora.network.api_client import ApiClient, ApiFault, ApiLimits
from areal_lora.processes.log import get_logger
from areal_lora.rollout import custom_child as child, workflow as flow
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.agents import AgentWorkflow
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import ConversationFile, MultiTurnWorkflow, SampleTimeout, repeated
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.rollout.worker_process import PlayResult
from areal_lora.run_folder.paths import RunFolder
from areal_lora.types import AdapterRef, Trajectory

MAX_TURNS = 8


def build_training(
    adapter: entry.AdapterConfig,
    context: flow.WorkflowContext,
    sessions: Sessions,
    folder: RunFolder | None = None,
    workers: EnvironmentWorkers | None = None,
    teacher: "Teacher | None" = None,
) -> "TrainingWorkflow":
    """The adapter's workflow for training. Raises ConfigError."""
    greedy = replace(context, sampling=flow.greedy(context.sampling))
    answers, baseline = (build_workflow(adapter.workflow, c, sessions, folder, workers) for c in (context, greedy))
    return TrainingWorkflow(
        answers=answers,
        greedy=baseline if adapter.algorithm.has_baseline else None,
        teacher=teacher,
        hold_s=adapter.sampling.timeout_s,
        given=flow.GivenWorkflow(context=context, column=adapter.sft.column),
        given_steps=adapter.sft.steps,
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
        turns = chosen.max_turns or MAX_TURNS
        return MultiTurnWorkflow(context=context, played=workers.run, max_turns=turns, cut=cut)
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
        fields = child.fields_of(self.context, self.workers.context.model)
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
            ends = [*(call.request.stop_token_ids or ()), *self.context.formatter.ends]
            request = msgspec.structs.replace(call.request, stop_token_ids=ends or None)
            return await client.sample(ref, request, timeout_s=limit)
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


LIMITS = ApiLimits(attempt_s=300.0, attempts=5, backoff_s=1.0, concurrency=32, reply_bytes=1 << 28)
"""A server computes one long sequence in seconds and may have others' requests first."""
KEY = "algorithm.reference"

log = get_logger(__name__)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None]


class _Choice(msgspec.Struct):
    text: str = ""
    logprobs: _Logprobs | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class Teacher:
    """Scores tokens with ``model``; ``report`` gets a line when it stops to answer, and when it answers again.

    Raises ConfigError for a key that is not set.
    """

    def __init__(self, model: section.ServedModel, report: Callable[[str], None], limits: ApiLimits = LIMITS) -> None:
        self._model, self._report, self._limits = model, report, limits
        self._client = ApiClient(model.url, model.key_env, limits, KEY)
        self._silent = False

    @property
    def name(self) -> str:
        return f"the teacher {self._model.model} at {self._model.url}"

    async def check(self, tokenizer: TextTokenizer, max_model_len: int) -> None:
        """Compare the vocabulary, with one sequence as long as the longest that will be scored.

        Raises ConfigError for another vocabulary, a shorter context or another API, EnvironmentError_ if there is no
        answer.
        """
        size = len(tokenizer)
        ids = [i * size // max_model_len if size > max_model_len else i % size for i in range(max_model_len)]
        try:
            text, _ = await self._request(ids)
        except ApiFault as fault:
            reason = f"{self.name} gives no log-probabilities of {max_model_len} tokens: {fault}"
            if fault.passing:
                raise EnvironmentError_(f"{KEY}: {reason} (fix: start it, or correct url)") from None
            raise ConfigError(KEY, reason, "serve it with vLLM and a context above rollout.max_model_len") from None
        if text not in (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (False, True)):
            reason = f"{self.name} has another vocabulary than model.path: the same token ids are other texts there"
            raise ConfigError(KEY, reason, "choose a teacher with the tokenizer of the model")

    async def scored(self, trajectory: Trajectory, hold_s: float) -> Trajectory:
        """The trajectory with the teacher's log-probabilities; for ``hold_s`` it is held while there is no answer.

        Raises GenerationFault after that, or for a sequence that the teacher refuses.
        """
        deadline = time.monotonic() + hold_s
        while True:
            try:
                _, logprobs = await self._request(trajectory.columns.ids.tolist())
            except ApiFault as fault:
                if not fault.passing:
                    raise GenerationFault(FaultKind.REJECTED, f"{self.name}: {fault}") from None
                self._note(f"{self.name} does not answer, groups are held: {fault}", silent=True)
                if time.monotonic() > deadline:
                    raise GenerationFault(FaultKind.TEACHER, f"{self.name}: {fault}") from None
                continue
            self._note(f"{self.name} answers again", silent=False)
            return replace(trajectory, columns=msgspec.structs.replace(trajectory.columns, teacher=logprobs.tobytes()))

    async def close(self) -> None:
        await self._client.close()

    def _note(self, text: str, *, silent: bool) -> None:
        if silent != self._silent:
            self._silent = silent
            log.warning("%s", text)
            self._report(text if silent else "serving")

    async def _request(self, ids: list[int]) -> tuple[str, np.ndarray]:
        """The text of ``ids``, and their log-probabilities [T] float32, 0 for the first. Raises ApiFault."""
        body: dict[str, Any] = {"model": self._model.model, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}

        def read(reply: bytes) -> tuple[str, np.ndarray]:
            choice = msgspec.json.decode(reply, type=_Completion).choices[0]
            found = choice.logprobs.token_logprobs if choice.logprobs else []
            if len(found) < len(ids):
                raise ValueError(f"{len(found)} log-probabilities for {len(ids)} tokens")
            logprobs = np.array([0.0, *found[1 : len(ids)]], "<f4")
            if not np.isfinite(logprobs).all():
                raise ValueError("log-probabilities that are not finite")
            return choice.text, logprobs

        return await self._client.post("/completions", msgspec.json.encode(body), read)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingWorkflow:
    """``answers`` to a prompt, with what the algorithm takes beside them.

    ``given`` has its place for groups issued with a version below ``given_steps``. The last given answers may be
    consumed up to the staleness bound later, beside rollouts: each sequence knows which it is.

    ``greedy`` is a workflow of one greedy sample (ReMax). It is sampled with the group, by the same version where that
    is still served. Only its mean reward is kept, as the group's ``baseline``: it is never trained on.

    ``teacher`` scores all tokens; a group is held for ``hold_s`` while it does not answer.
    """

    answers: flow.Workflow
    greedy: flow.Workflow | None = None
    teacher: Teacher | None = None
    hold_s: float = 0.0
    given: flow.Workflow | None = None
    given_steps: int = 0

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> flow.Episode:
        """Raises GenerationFault. Where the greedy answer could not be scored, returns that: a fault of the group."""
        if self.given is not None and ref.version < self.given_steps:
            return await self.given.run(prompt, ref, seed)
        if self.greedy is None:
            episode = await self.answers.run(prompt, ref, seed)
        else:
            both = [each.run(prompt, ref, seed) for each in (self.answers, self.greedy)]
            episode, greedy = await flow.all_samples(both)
            if flow.first_fault(greedy.group) is not None:
                return greedy
            rewards = {trajectory.sample: trajectory.reward for trajectory in greedy.group.trajectories}
            episode = replace(episode, group=replace(episode.group, baseline=statistics.fmean(rewards.values())))
        if self.teacher is None or flow.first_fault(episode.group) is not None:
            return episode
        scored = await flow.all_samples([self.teacher.scored(t, self.hold_s) for t in episode.group.trajectories])
        return replace(episode, group=replace(episode.group, trajectories=tuple(scored)))

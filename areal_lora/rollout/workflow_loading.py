"""From a configuration's ``workflow`` to the workflow itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from areal_lora.config import models as config
from areal_lora.data.packed_groups import check_alignment, check_rewards
from areal_lora.data.prompts import Prompt
from areal_lora.errors import AlignmentError, ConfigError
from areal_lora.processes.loading import load_import_path
from areal_lora.rollout import workflow as flow
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.agents import AgentWorkflow
from areal_lora.rollout.completion_client import FaultKind
from areal_lora.rollout.conversations import ConversationFile, MultiTurnWorkflow
from areal_lora.rollout.environment_workers import EnvironmentWorkers
from areal_lora.rollout.teacher import Teacher, WithTeacher
from areal_lora.rollout.user_code import call
from areal_lora.run_folder.paths import RunFolder
from areal_lora.tasks.reward_calls import describe
from areal_lora.types import AdapterRef, Outcome


def build_training(
    adapter: config.AdapterConfig,
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
    """Import what ``chosen`` names and build it. Raises ConfigError.

    ``sessions`` are the agents' endpoint's; the agents' conversations are kept in ``folder``. Agents and environments
    of others run in ``workers``.
    """
    match chosen:
        case config.SingleTurnWorkflowConfig():
            return flow.SingleTurnWorkflow(context=context)
        case config.MultiTurnWorkflowConfig():
            return MultiTurnWorkflow(
                context=context,
                environment=_callable(chosen.environment),
                arguments=chosen.arguments,
                max_turns=chosen.max_turns,
            )
        case config.CustomWorkflowConfig():
            return CheckedWorkflow(inner=_custom(chosen, context), context=context)
        case config.WorkerWorkflowConfig():
            assert workers is not None
            return AgentWorkflow(
                context=context,
                sessions=sessions,
                agent=workers.play,
                tool_parser=chosen.tool_parser,
                kept=ConversationFile(folder) if folder else None,
            )
        case config.ClientWorkflowConfig():
            raise ConfigError("workflow.kind", "a client drives the adapter: it has no rollouts", "choose another kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWorkflow:
    """A user's workflow: what it raises is a fault of the group, what it returns obeys contract C10."""

    inner: flow.Workflow
    context: flow.WorkflowContext

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> flow.Episode:
        """Raises AlignmentError for an episode that cannot be trained on: code to correct, not a fault to retry."""
        episode = await call(FaultKind.WORKFLOW, ref.name, self.inner.run, prompt, ref, seed)
        if not isinstance(episode, flow.Episode):
            raise AlignmentError(f"{prompt.uid}: the workflow returned {type(episode).__name__}, not an Episode")
        checked: flow.Episode = await call(FaultKind.WORKFLOW, ref.name, self._checked, episode, prompt, ref)
        return checked

    async def _checked(self, episode: flow.Episode, prompt: Prompt, ref: AdapterRef) -> flow.Episode:
        """Return the episode as the ledger will decode it, with float rewards. A wrong type may raise any exception."""
        graded = list(episode.group.trajectories)
        for i, t in enumerate(graded):
            if t.outcome is Outcome.OK:
                score = flow.given_score(t.reward)
                detail = score.detail or t.detail
                graded[i] = replace(t, reward=score.reward, outcome=score.outcome, detail=detail)
        group = replace(episode.group, trajectories=tuple(graded))
        episode = flow.Episode(group=group, texts=tuple(episode.texts), turns=tuple(episode.turns))
        episode = msgspec.msgpack.decode(msgspec.msgpack.encode(episode), type=flow.Episode)
        if episode.group.uid != prompt.uid:
            raise AlignmentError(f"{prompt.uid}: the workflow returned an Episode of {episode.group.uid}")
        if not graded or len(episode.texts) != len(graded):
            raise AlignmentError(f"{prompt.uid}: {len(graded)} trajectories and {len(episode.texts)} texts")
        for trajectory in episode.group.trajectories:
            check_alignment(trajectory)
            if not trajectory.columns.n_sampled or trajectory.adapter.name != ref.name:
                raise AlignmentError(f"trajectory {trajectory.uid}: nothing in it was sampled by {ref.name}")
            if len(trajectory.columns) > self.context.max_model_len:
                raise AlignmentError(
                    f"trajectory {trajectory.uid}: {len(trajectory.columns)} tokens are more than "
                    f"rollout.max_model_len = {self.context.max_model_len}"
                )
        if flow.first_fault(episode.group) is None:
            check_rewards([(0, trajectory) for trajectory in episode.group.trajectories])
        return episode


def _callable(text: str) -> Callable[..., Any]:
    found: Callable[..., Any] = load_import_path(text)
    if not callable(found):
        raise ConfigError(text, f"is a {type(found).__name__}, which cannot be called", "name a class or function")
    return found


def _custom(chosen: config.CustomWorkflowConfig, context: flow.WorkflowContext) -> flow.Workflow:
    factory = _callable(chosen.path)
    try:
        workflow: flow.Workflow = factory(context, **chosen.arguments)
        _ = workflow.run  # a workflow without it is found here, not at the first prompt
    except Exception as error:  # fault boundary: a user's factory may fail in any way
        fix = "correct the factory or workflow.arguments"
        raise ConfigError(chosen.path, f"building the workflow fails: {describe(error)}", fix) from error
    return workflow

"""Training on given answers, as groups like all others.

A server scores the data set's answer under a version. So the group has what a sampled one has: log-probabilities and
versions of every trained token. Ledger, staleness, audit and alignment checks treat it alike, and the loop has no
branch; only the objective of its tokens differs (`algorithms.losses`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import Episode, Workflow, WorkflowContext, single_turn
from areal_lora.tasks.given import given_answer
from areal_lora.types import AdapterRef, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenWorkflow:
    """The data set's own answer to a prompt, once, scored by servers and reward. ``column`` holds its text."""

    context: WorkflowContext
    column: str | None

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        """Raises GenerationFault, also for an answer that does not fit into the model's length."""
        context, text = self.context, given_answer(prompt.sample, self.column)
        answer_ids = context.formatter.answer(text)
        n_tokens = len(prompt.token_ids) + len(answer_ids)
        if n_tokens >= context.max_model_len:
            limit = f"rollout.max_model_len = {context.max_model_len}"
            raise GenerationFault(FaultKind.REJECTED, f"prompt and given answer have {n_tokens} tokens, {limit}")
        scored = await context.client.score(
            context.client.newest(ref),
            prompt.token_ids,
            answer_ids,
            temperature=context.sampling.temperature,
            timeout_s=context.sampling.timeout_s,
        )
        answer = replace(scored, text=text)
        (score,) = await context.score([context.item(prompt.sample, answer)])
        trajectory = replace(single_turn(prompt, 0, ref.name, answer, score), given=True)
        return Episode(group=TrajectoryGroup(uid=prompt.uid, trajectories=(trajectory,)), texts=(text,))


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFirst:
    """``given`` for groups issued with a version below ``steps``, ``then`` for all later ones.

    The last given answers may be consumed up to the staleness bound later, beside rollouts: each sequence knows
    which it is.
    """

    given: Workflow
    then: Workflow
    steps: int

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        workflow = self.given if ref.version < self.steps else self.then
        return await workflow.run(prompt, ref, seed)

"""Agents: user code that calls an OpenAI-compatible endpoint; its completions are trained on.

    agent(task) --/v1/chat/completions, /v1/responses; key of its own--> AgentGateway --Router--> rollout server
                                                                              |
                                      Session: tokens, log-probabilities, versions of every completion

The gateway listens on loopback in the controller. A key belongs to one session (one sample of one group) and
ends with it; the run secret stays on this side. What was sampled is never tokenized again (``prompt_tokens``), so
that a conversation stays one trajectory. Tool calls are parsed by a rollout server, which has vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.agent_api.session import Session, Sessions
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import ConversationFile, conversation_of
from areal_lora.rollout.workflow import Episode, WorkflowContext, all_samples, derived_seed, given_score
from areal_lora.rollout.workflows.user_code import call
from areal_lora.types import AdapterRef, Cause, Outcome, Sample, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Input of an agent: an OpenAI endpoint with a key that is valid for ``timeout_s`` seconds, and the problem."""

    base_url: str  # ends in /v1
    api_key: str
    model: str
    sample: Sample
    timeout_s: float


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Consume the exception of an agent whose session has ended."""
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkflow:
    """``n_samples`` agents at once. Each has a session; all trajectories of a session have its one reward.

    ``tool_parser`` reads the tool calls in answers. Conversations are written to ``kept``.
    """

    context: WorkflowContext
    sessions: Sessions
    agent: Callable[[AgentTask], Any]
    tool_parser: str | None = None
    kept: ConversationFile | None = None

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n = self.context.sampling.n_samples
        ended = await all_samples(self._sample(prompt, ref, i, derived_seed(seed, i)) for i in range(n))
        left = [s.item(prompt.sample) for s, reward in ended if reward is None]
        scored = iter(await self.context.score(left) if left else ())
        scores = [next(scored) if reward is None else given_score(reward) for _, reward in ended]
        for i, ((session, _), score) in enumerate(zip(ended, scores, strict=True)):
            self._keep(session, prompt, i, score.reward if score.outcome is Outcome.OK else None, score.detail)
        trajectories = tuple(
            trajectory
            for i, ((session, _), score) in enumerate(zip(ended, scores, strict=True))
            for trajectory in session.trajectories(prompt, i, score)
        )
        return Episode(
            group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories),
            texts=tuple(session.last_text for session, _ in ended for _ in session.conversations),
        )

    async def _sample(self, prompt: Prompt, ref: AdapterRef, i: int, seed: int) -> tuple[Session, float | None]:
        session = Session(context=self.context, ref=ref, seed=seed, tool_parser=self.tool_parser)
        try:
            reward = await self._played(session, prompt)
            if not session.conversations:
                raise GenerationFault(FaultKind.AGENT, "the agent ended without a completion")
            if not isinstance(reward, int | float | None):
                what = type(reward).__name__
                raise GenerationFault(FaultKind.AGENT, f"the agent returned {what}, not a reward or None", Cause.CODE)
        except GenerationFault as fault:
            self._keep(session, prompt, i, None, str(fault))
            raise
        return session, reward

    async def _played(self, session: Session, prompt: Prompt) -> Any:
        timeout_s = self.context.sampling.timeout_s
        with self.sessions.opened(session) as key:
            task = AgentTask(
                base_url=self.sessions.base_url,
                api_key=key,
                model=session.ref.name,
                sample=prompt.sample,
                timeout_s=timeout_s,
            )
            running = asyncio.create_task(call(FaultKind.AGENT, session.ref.name, self.agent, task))
            running.add_done_callback(_retrieve)
            try:
                done, _ = await asyncio.wait(
                    {running, session.fault}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise GenerationFault(FaultKind.TIMEOUT, f"the agent took longer than {timeout_s:g} s")
                if session.fault.done():
                    session.fault.result()
                return running.result()
            finally:
                running.cancel()
                session.fault.cancel()

    def _keep(self, session: Session, prompt: Prompt, sample: int, reward: float | None, detail: str) -> None:
        if self.kept is not None and session.exchanges:
            self.kept.write(conversation_of(session, prompt.uid, sample, reward, detail))

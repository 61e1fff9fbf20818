"""Agents: user code that calls an OpenAI-compatible endpoint; its completions are trained on.

    agent(task) --/v1/chat/completions, /v1/messages; key of its own--> agent_gateway --Router--> rollout server
                                                                              |
                                      Session: tokens, log-probabilities, versions of every completion

The endpoint is in the controller, or with its sessions in processes beside it (`agent_api.gateways`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.agent_api.ended_sessions import EndedSession, OpenSession
from areal_lora.rollout.agent_api.endpoint import HOST
from areal_lora.rollout.agent_api.session import Sessions
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.conversations import ConversationFile, SampleTimeout, conversation_of, repeated
from areal_lora.rollout.workflow import Episode, WorkerLost, WorkflowContext, all_samples, derived_seed
from areal_lora.tasks.reward_calls import Score
from areal_lora.types import AdapterRef, Outcome, Sample, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Input of an agent: an OpenAI endpoint with a key that is valid for ``timeout_s`` seconds, and the problem."""

    base_url: str  # ends in /v1
    api_key: str
    model: str
    sample: Sample
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """Without a ``reward`` the configured one scores the sample. ``finish_reason`` is the run's limit that ended it.

    ``turn_rewards`` are pairs of the index of a request and the part of ``reward`` that its answer earned.
    """

    reward: float | Score | None = None
    turn_rewards: tuple[tuple[int, float], ...] = ()
    finish_reason: str = ""


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Consume the exception of an agent whose session has ended."""
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkflow:
    """``n_samples`` agents at once. Each has a session; all trajectories of a session have its one reward.

    ``tool_parser`` reads the tool calls in answers. Conversations are written to ``kept``. With ``cut`` an agent whose
    time is over ends with what it has, if that can be trained on; so does one that fails on its full context,
    where a reward is configured.
    """

    context: WorkflowContext
    sessions: Sessions
    agent: Callable[[AgentTask], Coroutine[Any, Any, AgentResult]]
    tool_parser: str | None = None
    kept: ConversationFile | None = None
    cut: bool = False

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n, group = self.context.sampling.n_samples, self.context.conversation()
        ended = await all_samples(
            repeated(
                partial(self._tried, group.conversation(), prompt, ref, i), derived_seed(seed, i), f"{prompt.uid}:{i}"
            )
            for i in range(n)
        )
        scores = await self.context.scores([(session.item(prompt.sample), result.reward) for session, result in ended])
        trajectories = list[Trajectory]()
        for i, ((session, result), score) in enumerate(zip(ended, scores, strict=True)):
            reward = score.reward if score.outcome is Outcome.OK else None
            await self._keep(session, prompt, ref, i, reward, score.detail)
            trajectories += session.trajectories(prompt, i, ref.name, score, result.finish_reason, result.turn_rewards)
        return Episode(
            group=TrajectoryGroup(uid=prompt.uid, trajectories=tuple(trajectories)),
            texts=tuple(session.text for session, _ in ended for _ in session.trained),
            turns=tuple(each.turns for session, _ in ended for _, each in session.trained),
        )

    async def _tried(
        self, context: WorkflowContext, prompt: Prompt, ref: AdapterRef, i: int, seed: int
    ) -> tuple[EndedSession, AgentResult]:
        async with self.sessions.opened(context, ref, seed, self.tool_parser) as opened:
            played = await self._played(opened, prompt, ref)
        session = opened.ended
        if session.fault is not None:
            played = GenerationFault(*session.fault)
        if isinstance(played, GenerationFault) and session.trained:
            own = played.kind in _OWN_FAULTS and not played.unserved and not isinstance(played, WorkerLost)
            if self.cut and isinstance(played, SampleTimeout):
                played = AgentResult(finish_reason=FaultKind.TIMEOUT)
            elif own and self.context.has_reward and session.full:
                played = AgentResult(finish_reason="length")
        if not isinstance(played, GenerationFault) and not session.trained:
            detail = "the agent ended without a completion"
            played = GenerationFault(FaultKind.AGENT, detail + " that no grammar chose" * bool(session.conversations))
        if isinstance(played, GenerationFault):
            await self._keep(session, prompt, ref, i, None, str(played))
            raise played
        return session, played

    async def _played(self, session: OpenSession, prompt: Prompt, ref: AdapterRef) -> AgentResult | GenerationFault:
        """The fault that has ended the agent, or its time; that of a request is in the session."""
        timeout_s = self.context.sampling.timeout_s
        task = AgentTask(
            base_url=f"http://{HOST}:{session.port}/v1",
            api_key=session.key,
            model=ref.name,
            sample=prompt.sample,
            timeout_s=timeout_s,
        )
        running = asyncio.create_task(self.agent(task))
        running.add_done_callback(_retrieve)
        try:
            waited: set[asyncio.Future[Any]] = {running, session.fault}
            done, _ = await asyncio.wait(waited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                return SampleTimeout(f"the agent took longer than {timeout_s:g} s")
            return running.result() if running in done else AgentResult()
        except GenerationFault as fault:
            return fault
        finally:
            running.cancel()

    async def _keep(
        self, session: EndedSession, prompt: Prompt, ref: AdapterRef, sample: int, reward: float | None, detail: str
    ) -> None:
        """In a thread: the loop waits for no network file system."""
        kept, evaluation = self.kept, self.context.evaluating
        if kept is not None and session.conversations:
            await asyncio.to_thread(
                lambda: kept.write(conversation_of(session, ref.name, prompt.uid, sample, evaluation, reward, detail))
            )


_OWN_FAULTS = (FaultKind.AGENT, FaultKind.ENVIRONMENT)

"""Agents: user code that calls an OpenAI-compatible endpoint; its completions are trained on.

    agent(task) --/v1/chat/completions, key of its own--> AgentGateway --Router--> rollout server
                                                              |
                                      Session: tokens, log-probabilities, versions of every completion

The gateway listens on loopback in the controller. A key belongs to one session (one sample of one group) and
ends with it; the run secret stays on this side. Text is tokenized once: where a prompt's text begins with that of
an earlier prompt and its answer, their tokens are used again, so that a conversation stays one trajectory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from areal_lora.data.prompts import Prompt
from areal_lora.rollout.client import FaultKind, GenerationFault
from areal_lora.rollout.routing import server_observer
from areal_lora.rollout.workflow import Episode, WorkflowContext, all_samples, derived_seed, given_score
from areal_lora.rollout.workflows.agent_api import Refused, Request, reply_body
from areal_lora.rollout.workflows.collect import PackedTurns, join
from areal_lora.rollout.workflows.user_code import call
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.types import AdapterRef, Sample, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Input of an agent: an OpenAI endpoint with a key that is valid for ``timeout_s`` seconds, and the problem."""

    base_url: str  # ends in /v1
    api_key: str
    model: str
    sample: Sample
    timeout_s: float


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of an agent: its requests, and whether a completion has failed."""

    context: WorkflowContext
    ref: AdapterRef
    seed: int
    conversations: list[PackedTurns] = field(default_factory=list)
    texts: dict[str, list[int]] = field(default_factory=dict)  # prompt and answer -> their tokens
    last_text: str = ""
    asked: int = 0
    on_server: Callable[[str], None] | None = field(default_factory=server_observer.get)
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    fault: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    async def complete(self, request: Request) -> dict[str, Any]:
        """The answer's body. Raises Refused for what cannot be asked, GenerationFault where there is no answer."""
        sampling = self.context.sampling
        server_observer.set(self.on_server)  # the gateway's task works for the group's task
        request.check(self.ref.name, sampling)
        prompt_ids, prompt_text = self._prompt(request)
        if not 0 < len(prompt_ids) < self.context.max_model_len:
            raise Refused(400, f"{len(prompt_ids)} prompt tokens, between 1 and {self.context.max_model_len - 1} fit")
        self.asked += 1
        try:
            answers = await self.context.answer(
                self.ref,
                prompt_ids,
                n=request.n,
                max_tokens=request.longest,
                stop=request.stops,
                seed=derived_seed(self.seed, self.asked),
                timeout_s=2 * sampling.timeout_s,
            )
        except GenerationFault as fault:
            if fault.kind is FaultKind.REJECTED:
                raise Refused(400, fault.detail) from None
            raise
        for answer in answers:
            join(self.conversations, prompt_ids, answer)
            if prompt_text is not None:
                raw = self.context.tokenizer.decode(answer.token_ids, skip_special_tokens=False)
                self.texts[prompt_text + raw] = prompt_ids + answer.token_ids
        self.last_text = answers[-1].text
        return reply_body(request, self.ref.name, self.asked, prompt_ids, answers)

    def _prompt(self, request: Request) -> tuple[list[int], str | None]:
        if isinstance(request.prompt, list):
            return request.prompt, None
        text = request.prompt if request.prompt is not None else request.render(self.context.tokenizer)
        known = max((t for t in self.texts if text.startswith(t)), key=len, default="")
        tokenizer = self.context.tokenizer
        if known:
            return self.texts[known] + self.context.encode(text[len(known) :]), text
        # A chat template writes special tokens itself.
        return tokenizer.encode(text, add_special_tokens=request.prompt is not None), text

    def fail(self, fault: GenerationFault) -> None:
        """Fail the group, which is retried whole: a result without this answer is no sample of the policy."""
        if not self.fault.done():
            self.fault.set_exception(fault)

    def trajectories(self, prompt: Prompt, sample: int, score: Score) -> list[Trajectory]:
        """All with the sample's one score."""
        return [
            packed.trajectory(f"{prompt.uid}:{sample}.{i}", sample, self.ref.name, score)
            for i, packed in enumerate(self.conversations)
        ]


class Sessions:
    """The keys that are valid now. Keys are kept as digests."""

    def __init__(self) -> None:
        self.base_url = ""
        self._open: dict[bytes, Session] = {}

    @contextlib.contextmanager
    def opened(self, session: Session) -> Iterator[str]:
        """A new key for the session; at the end the key is revoked and its running requests are cancelled."""
        key = secrets.token_urlsafe(32)
        self._open[_digest(key)] = session
        try:
            yield key
        finally:
            del self._open[_digest(key)]
            for request in session.requests:
                request.cancel()

    def of_key(self, key: str) -> Session | None:
        return self._open.get(_digest(key))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()  # a header may hold any bytes


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Consume the exception of an agent whose session has ended."""
    if not task.cancelled():
        task.exception()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWorkflow:
    """``n_samples`` agents at once. Each has a session; all trajectories of a session have its one reward."""

    context: WorkflowContext
    sessions: Sessions
    agent: Callable[[AgentTask], Any]

    async def run(self, prompt: Prompt, ref: AdapterRef, seed: int) -> Episode:
        n = self.context.sampling.n_samples
        ended = await all_samples(self._sample(prompt, ref, derived_seed(seed, i)) for i in range(n))
        left = [ScoreItem(completion=s.last_text, gold=prompt.sample.answer) for s, reward in ended if reward is None]
        scored = iter(await self.context.score(left) if left else ())
        scores = [next(scored) if reward is None else given_score(reward) for _, reward in ended]
        trajectories = tuple(
            trajectory
            for i, ((session, _), score) in enumerate(zip(ended, scores, strict=True))
            for trajectory in session.trajectories(prompt, i, score)
        )
        return Episode(
            group=TrajectoryGroup(uid=prompt.uid, trajectories=trajectories),
            texts=tuple(session.last_text for session, _ in ended for _ in session.conversations),
        )

    async def _sample(self, prompt: Prompt, ref: AdapterRef, seed: int) -> tuple[Session, float | None]:
        timeout_s = self.context.sampling.timeout_s
        session = Session(context=self.context, ref=ref, seed=seed)
        with self.sessions.opened(session) as key:
            task = AgentTask(
                base_url=self.sessions.base_url, api_key=key, model=ref.name, sample=prompt.sample, timeout_s=timeout_s
            )
            running = asyncio.create_task(call(FaultKind.AGENT, self.agent, task))
            running.add_done_callback(_retrieve)
            try:
                done, _ = await asyncio.wait(
                    {running, session.fault}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise GenerationFault(FaultKind.TIMEOUT, f"the agent took longer than {timeout_s:g} s")
                if session.fault.done():
                    session.fault.result()
                reward = running.result()
            finally:
                running.cancel()
                session.fault.cancel()
        if not session.conversations:
            raise GenerationFault(FaultKind.AGENT, "the agent ended without a completion")
        if not isinstance(reward, int | float | None):
            raise GenerationFault(FaultKind.AGENT, f"the agent returned {type(reward).__name__}, not a reward or None")
        return session, reward

"""One run of an agent: its requests, their tokens, and the key that they come with."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_lora.data.prompts import Prompt
from areal_lora.network.completions import ToolCallsBody
from areal_lora.rollout.agent_api.chat import CompletedRequest, SampledReply, SamplingRequest
from areal_lora.rollout.agent_api.prompt_tokens import Prompts
from areal_lora.rollout.agent_api.refusals import AgentRequestError, check_fields, refuse
from areal_lora.rollout.agent_api.turns import Call, Turn
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import WorkflowContext, derived_seed
from areal_lora.rollout.workflows.user_code import PackedTurns, join
from areal_lora.tasks.scorer import Score, ScoreItem
from areal_lora.types import AdapterRef, Generation, Sample, Trajectory

CALL_ID_LETTERS = 9  # as Mistral's templates require


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatExchange:
    """A request and its answers, for the record. ``spans`` are the places of the sampled tokens, one per answer: the
    conversation's index, start and end in it. The first ``known`` turns are those of an earlier exchange.
    """

    answered: CompletedRequest
    known: int
    spans: list[tuple[int, int, int]]


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of an agent. ``tool_parser`` names the parser of its answers; without it no tools can be given."""

    context: WorkflowContext
    ref: AdapterRef
    seed: int
    tool_parser: str | None = None
    conversations: list[PackedTurns] = field(default_factory=list)
    exchanges: list[ChatExchange] = field(default_factory=list)
    prompts: Prompts = field(init=False)
    last: Generation | None = None
    n_requests: int = 0
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    fault: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.context.formatter)

    def check(self, body: dict[str, Any]) -> None:
        """Raises AgentRequestError for a body that requests another policy."""
        check_fields(body, None if self.context.evaluating else self.context.sampling)

    async def answer(self, request: SamplingRequest) -> CompletedRequest:
        """Raises AgentRequestError for what cannot be sampled, GenerationFault where there is no answer."""
        if request.model != self.ref.name:
            raise AgentRequestError(
                404, f"there is no model {request.model!r} for this key, only {self.ref.name!r}", "model"
            )
        if request.tools and self.tool_parser is None:
            raise refuse("tools", "the run's configuration names no workflow.tool_parser for the model's calls")
        prompt_ids = self.prompts.token_ids(request)
        if not 0 < len(prompt_ids) < self.context.max_model_len:
            raise AgentRequestError(
                400, f"{len(prompt_ids)} prompt tokens, between 1 and {self.context.max_model_len - 1} fit"
            )
        self.n_requests += 1
        number = self.n_requests
        seed = derived_seed(self.seed, number if request.seed is None else -1 - request.seed)
        try:
            sampled = await self.context.answer(
                self.ref,
                prompt_ids,
                n=request.n,
                max_tokens=request.max_tokens,
                stop=list(request.stop),
                seed=seed,
                timeout_s=2 * self.context.sampling.timeout_s,
                top_logprobs=request.top_logprobs or 0,
            )
            replies = await self._replies(request, number, sampled)
        except GenerationFault as fault:
            if fault.kind is FaultKind.REJECTED:
                raise AgentRequestError(400, fault.detail) from None
            raise
        answered = CompletedRequest(number=number, request=request, prompt_ids=prompt_ids, replies=replies)
        known, spans = self.prompts.continued(request), []
        for reply in replies:
            conversation = join(self.conversations, prompt_ids, reply.sampled)
            end = len(conversation.token_ids)
            at = next(i for i, each in enumerate(self.conversations) if each is conversation)
            spans.append((at, end - len(reply.sampled.token_ids), end))
            self.prompts.answered(request, prompt_ids, reply)
        self.exchanges.append(ChatExchange(answered=answered, known=known, spans=spans))
        self.last = replies[-1].sampled
        return answered

    async def _replies(
        self, request: SamplingRequest, number: int, sampled: Sequence[Generation]
    ) -> list[SampledReply]:
        if not request.tools or self.tool_parser is None:
            return [SampledReply(sampled=one, turn=Turn(role="assistant", content=one.text)) for one in sampled]
        texts = [self._spoken(one, request.stop) for one in sampled]
        parsed = await self.context.client.tool_calls(
            self.context.client.newest(self.ref),
            ToolCallsBody(parser=self.tool_parser, tools=request.tools, texts=texts),
            timeout_s=2 * self.context.sampling.timeout_s,
        )
        replies = []
        for i, (one, found) in enumerate(zip(sampled, parsed, strict=True)):
            calls = tuple(
                Call(id=call_id(self.seed, number, i, k), name=call.name, arguments=call.arguments)
                for k, call in enumerate(found.calls if request.parallel_calls else found.calls[:1])
            )
            content = found.content if calls else one.text
            replies.append(SampledReply(sampled=one, turn=Turn(role="assistant", content=content, calls=calls)))
        return replies

    def _spoken(self, sampled: Generation, stop: Sequence[str]) -> str:
        """The answer's text with special tokens, which may mark calls, but without the end of sequence or stop text."""
        ids, tokenizer = sampled.token_ids, self.context.tokenizer
        if sampled.finish_reason == "stop" and not tokenizer.decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if sampled.finish_reason != "stop":
            return text
        found = [at for s in (*stop, *self.context.sampling.stop) if (at := text.find(s)) >= 0]
        return text[: min(found)] if found else text

    def spell(self, token: int) -> str:
        return self.context.tokenizer.decode([token], skip_special_tokens=False)

    def turns_of(self) -> dict[str, tuple[Turn, ...]]:
        """By id of the response: the turns up to its first answer and with it, without the instructions."""
        return {
            f"resp_{each.answered.number}": (
                *(turn for turn in each.answered.request.turns if turn.role != "system"),
                each.answered.replies[0].turn,
            )
            for each in self.exchanges
            if each.answered.request.turns is not None
        }

    def fail(self, fault: GenerationFault) -> None:
        """Fail the group, which is retried whole: a result without this answer is no sample of the policy."""
        if not self.fault.done():
            self.fault.set_exception(fault)

    @property
    def last_text(self) -> str:
        return "" if self.last is None else self.last.text

    def item(self, sample: Sample) -> ScoreItem:
        """What the configured reward gets: the last completion."""
        if self.last is None:
            return ScoreItem.of(sample, "")
        n_tokens, how = len(self.last.token_ids), self.last.finish_reason
        return ScoreItem.of(sample, self.last.text, n_tokens=n_tokens, finish_reason=how)

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


def call_id(seed: int, *place: int) -> str:
    """Not random: templates may write it, and a run can be repeated."""
    return hashlib.blake2b(repr((seed, place)).encode()).hexdigest()[:CALL_ID_LETTERS]

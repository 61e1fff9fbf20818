"""One run of an agent: its requests, the tokens of their prompts, and the key that they come with.

What was sampled is never tokenized again. Where messages start with those of an earlier request and its answer, the
prompt starts with the earlier prompt's tokens and the sampled ones. Only what the chat template writes after them is
new::

    earlier tokens, sampled ones | end of the assistant's turn | tool's message | start of the next turn

An answer counts as given back if its content and calls are those that the agent got. What the template would write for
it may differ (spaces in the arguments of a call): the sampled tokens stay.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from areal_lora.data.prompts import Formatter, Prompt
from areal_lora.errors import ConfigError
from areal_lora.network.http_server import ToolCallsBody
from areal_lora.rollout.agent_api.chat import Call, CompletedRequest, SampledReply, SamplingRequest, Turn
from areal_lora.rollout.agent_api.refusals import AgentRequestError, refuse
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import PackedTurns, WorkflowContext, derived_seed, join
from areal_lora.tasks.reward_calls import Score, ScoreItem
from areal_lora.types import AdapterRef, Generation, Sample, Trajectory

TURN_LETTERS, TURNS_BYTES = 4000, 64 << 10
"""Of the text of a turn, and of all turns of a conversation, that are kept with a rollout."""
CALL_ID_LETTERS = 9  # as Mistral's templates require
_ANSWER = "areal answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTurns:
    """The turns up to an answer and with it, and all their tokens; ``spelt`` is the answer's text as it was sampled,
    with the end of sequence and without.
    """

    turns: tuple[Turn, ...]
    tools: list[dict[str, Any]]
    token_ids: list[int]
    spelt: tuple[str, str]

    def starts(self, request: SamplingRequest) -> bool:
        assert request.turns is not None
        given = request.turns[: len(self.turns)]
        return (
            self.tools == request.tools
            and len(given) == len(self.turns)
            and all(mine.same(theirs) for mine, theirs in zip(self.turns, given, strict=True))
        )


@dataclass(slots=True)
class Prompts:
    """The prompts of one session."""

    formatter: Formatter
    _known: list[KnownTurns] = field(default_factory=list)
    _texts: dict[str, list[int]] = field(default_factory=dict)  # of plain prompts and their answers

    def token_ids(self, request: SamplingRequest) -> list[int]:
        """Tokens [P] of the request's prompt. Raises AgentRequestError."""
        if request.turns is not None:
            return self._of_turns(request, request.turns)
        if isinstance(request.prompt, list):
            return request.prompt
        known = max((t for t in self._texts if request.prompt.startswith(t)), key=len, default="")
        rest = self.formatter.tokenizer.encode(request.prompt[len(known) :], add_special_tokens=not known)
        return self._texts.get(known, []) + rest

    def continued(self, request: SamplingRequest) -> int:
        """How many of the request's turns are those of an earlier request and its answer."""
        known = self._longest(request)
        return len(known.turns) if known is not None else 0

    def answered(self, request: SamplingRequest, prompt_ids: list[int], reply: SampledReply) -> None:
        """Keep the tokens of an answer for requests that continue it."""
        sampled, decode = reply.sampled.token_ids, self.formatter.tokenizer.decode
        ids, raw = prompt_ids + sampled, decode(sampled, skip_special_tokens=False)
        if request.turns is not None:
            spelt = raw, decode(sampled[:-1], skip_special_tokens=False)
            self._known.append(
                KnownTurns(turns=(*request.turns, reply.turn), tools=request.tools, token_ids=ids, spelt=spelt)
            )
        elif isinstance(request.prompt, str):
            self._texts[request.prompt + raw] = ids

    def _longest(self, request: SamplingRequest) -> KnownTurns | None:
        fitting = (known for known in self._known if request.turns is not None and known.starts(request))
        return max(fitting, key=lambda known: len(known.turns), default=None)

    def _of_turns(self, request: SamplingRequest, turns: tuple[Turn, ...]) -> list[int]:
        if not self.formatter.tokenizer.chat_template:
            raise AgentRequestError(400, "this model's tokenizer has no chat template; use /v1/completions")
        text = self._text(turns, request.tools, last=True)
        if request.tools and text == self._text(turns, [], last=True):
            raise refuse("tools", "the model's chat template does not write tools, so the model would not know of them")
        known = self._longest(request)
        if known is not None and (after := self._after(known, text)) is not None:
            rest = self.formatter.tokenizer.encode(after, add_special_tokens=False)
            return known.token_ids + self.formatter.without_end(rest, known.token_ids)
        # A template writes special tokens itself.
        return self.formatter.tokenizer.encode(text, add_special_tokens=False)

    def _after(self, known: KnownTurns, text: str) -> str | None:
        """What follows the answer in ``text``; None if the template writes the turns before it otherwise by now.

        It starts with what the template writes to end the answer's turn: after the answer as it was sampled, if the
        template writes that, else after any answer.
        """
        head = self._text(known.turns, known.tools, last=False)
        before = self._text(known.turns[:-1], known.tools, last=True)
        if not text.startswith(head) or not head.startswith(before):
            return None
        for spelt in known.spelt:
            if head.startswith(before + spelt):
                return text[len(before + spelt) :]
        marked = (*known.turns[:-1], Turn(role="assistant", content=_ANSWER))
        _, found, end = self._text(marked, known.tools, last=False).rpartition(_ANSWER)
        return end + text[len(head) :] if found and head.endswith(end) else None

    def _text(self, turns: Sequence[Turn], tools: list[dict[str, Any]], *, last: bool) -> str:
        try:
            return self.formatter.chat([turn.for_template() for turn in turns], tools=tools, last=last)
        except ConfigError as error:
            raise AgentRequestError(400, error.reason, "messages") from None


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """``conversation``, ``begin`` and ``end`` are the place of its sampled tokens."""

    turn: Turn
    finish_reason: str
    conversation: int
    begin: int
    end: int


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A request. ``turns`` lacks the first ``known`` ones, which earlier requests and answers have; ``prompt`` is that
    of a plain completion.
    """

    known: int
    turns: list[Turn]
    tools: list[dict[str, Any]]
    answers: list[AnswerRecord]
    prompt: str | list[int] | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of an agent. ``tool_parser`` names the parser of its answers; without it no tools can be given.

    ``responses`` has by the id of a response the turns up to its first answer and with it, without the instructions;
    ``turns`` by the number of a conversation those up to its last answer.
    """

    context: WorkflowContext
    ref: AdapterRef
    seed: int
    tool_parser: str | None = None
    conversations: list[PackedTurns] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    responses: dict[str, tuple[Turn, ...]] = field(default_factory=dict)
    turns: dict[int, tuple[Turn, ...]] = field(default_factory=dict)
    prompts: Prompts = field(init=False)
    last: Generation | None = None
    n_requests: int = 0
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    fault: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.context.formatter)

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
        known, answers = self.prompts.continued(request), list[AnswerRecord]()
        for reply in replies:
            conversation = join(self.conversations, prompt_ids, reply.sampled)
            end = len(conversation)
            at = next(i for i, each in enumerate(self.conversations) if each is conversation)
            start, how = end - len(reply.sampled.columns), reply.finish_reason
            answers.append(AnswerRecord(turn=reply.turn, finish_reason=how, conversation=at, begin=start, end=end))
            self.prompts.answered(request, prompt_ids, reply)
            if request.turns is not None:
                self.turns[at] = (*request.turns, reply.turn)
        record = RequestRecord(
            known=known,
            turns=list((request.turns or ())[known:]),
            tools=[] if known else request.tools,  # the same as before, else it would not continue
            answers=answers,
            prompt=request.prompt if request.turns is None else None,
        )
        self.records.append(record)
        if request.turns is not None:
            given = (turn for turn in request.turns if turn.role != "system")
            self.responses[f"resp_{number}"] = (*given, replies[0].turn)
        self.last = replies[-1].sampled
        return CompletedRequest(number=number, request=request, prompt_ids=prompt_ids, replies=replies)

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

    def fail(self, fault: GenerationFault) -> None:
        """Fail the group, which is retried whole: a result without this answer is no sample of the policy."""
        if not self.fault.done():
            self.fault.set_exception(fault)

    @property
    def last_text(self) -> str:
        return "" if self.last is None else self.last.text

    def turns_of(self, conversation: int) -> str:
        """The messages of a conversation as JSON, the first `TURNS_BYTES`; empty for prompts that are plain text."""
        turns, kept, left = self.turns.get(conversation, ()), list[bytes](), TURNS_BYTES
        for turn in turns:
            cut = f"{turn.content[:TURN_LETTERS]} [{len(turn.content)} letters]"
            shown = turn if len(turn.content) <= TURN_LETTERS else msgspec.structs.replace(turn, content=cut)
            kept.append(msgspec.json.encode(shown.for_template()))
            if (left := left - len(kept[-1])) < 0:
                kept[-1] = msgspec.json.encode({"role": f"{len(turns) - len(kept) + 1} more turns"})
                break
        return f"[{b','.join(kept).decode()}]" if kept else ""

    def item(self, sample: Sample) -> ScoreItem:
        """What the configured reward gets: the last completion."""
        if self.last is None:
            return ScoreItem.of(sample, "")
        n_tokens, how = len(self.last.columns), self.last.finish_reason
        return ScoreItem.of(sample, self.last.text, n_tokens=n_tokens, finish_reason=how)

    def trajectories(self, prompt: Prompt, sample: int, score: Score) -> list[Trajectory]:
        """All with the sample's one score."""
        return [
            packed.trajectory(f"{prompt.uid}:{sample}.{i}", sample, self.ref.name, score)
            for i, packed in enumerate(self.conversations)
        ]


class Sessions:
    """The keys that are valid now. Keys are kept as digests. ``port`` is that of the gateway, 0 without one."""

    def __init__(self) -> None:
        self.port = 0
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

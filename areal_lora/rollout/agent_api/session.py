"""One run of an agent: its requests, what was sampled for them, and the key that they come with."""

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from areal_lora.network.http_server import ParsedCall, ParsedText, ToolCallsBody
from areal_lora.rollout.agent_api.ended_sessions import EndedConversation, EndedSession, OpenSession
from areal_lora.rollout.agent_api.known_turns import KnownTurns, Prompts, WrittenPrompt
from areal_lora.rollout.agent_api.refusals import AgentRequestError, context_full, refuse, warn_once
from areal_lora.rollout.agent_api.replies import Call, CompletedRequest, ReplyPart, SampledReply, SamplingRequest, Turn
from areal_lora.rollout.completion_client import FaultKind, GenerationFault
from areal_lora.rollout.workflow import PackedTurns, WorkflowContext, continued_by, derived_seed, join
from areal_lora.types import THOUGHT_END, THOUGHT_START, AdapterRef, Generation, TokenColumns

TURN_LETTERS, TURNS_BYTES = 4000, 64 << 10
"""Of the text of a turn, and of all turns of a conversation, that are kept with a rollout."""
CALL_ID_LETTERS = 9  # as Mistral's templates require
_CALL_MARK = re.compile(r"[<{\[`]")
"""How calls start in the formats of vLLM's parsers, where no special token marks them."""


@dataclass(slots=True)
class _HeldText:
    """The text of one answer that the agent has got. What may start a call of ``tools`` is held back until its end.

    The answer ``thinks`` up to the end of its thought, which has no calls; None before its text shows it.
    """

    decode: Callable[..., str]
    tools: bool
    thinks: bool | None
    text: str = ""
    _held: str = ""
    _closed: bool = False

    def next(self, part: Generation) -> str:
        if not self.tools:
            self.text += part.text
            return part.text
        self._held += part.text
        ids = part.token_ids  # special tokens mark calls, too, and are not in the text
        self._closed |= self.decode(ids, skip_special_tokens=True) != self.decode(ids, skip_special_tokens=False)
        if self._closed:
            return ""
        if self.thinks is None:
            head = self._held.lstrip()[: len(THOUGHT_START)]
            if head != THOUGHT_START and THOUGHT_START.startswith(head):
                return ""
            self.thinks = head == THOUGHT_START
        thought = ""
        if self.thinks:
            end = self._held.find(THOUGHT_END)
            self.thinks = end < 0  # its mark may come in parts
            n = end + len(THOUGHT_END) if end >= 0 else max(0, len(self._held) - len(THOUGHT_END))
            thought, self._held = self._held[:n], self._held[n:]
            self.text += thought
            if self.thinks:
                return thought
        found = _CALL_MARK.search(self._held)
        self._closed = found is not None
        ready = self._held[: found.start() if found else None].rstrip()  # parsers drop spaces before a call
        self.text, self._held = self.text + ready, self._held[len(ready) :]
        return thought + ready


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """``conversation``, ``begin`` and ``end`` are the place of its sampled tokens."""

    turn: Turn
    finish_reason: str
    conversation: int
    begin: int
    end: int


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request. ``turns`` lacks the first ``known`` ones, which earlier requests and answers have; ``prompt`` is that
    of a plain completion.
    """

    known: int
    turns: tuple[Turn, ...]
    answers: tuple[AnswerRecord, ...]
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | list[int] | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of an agent. ``tool_parser`` names the parser of its answers; without it no tools can be given.

    ``responses`` has by the id of a response the turns up to its first answer and with it, and whether the first is its
    instructions; ``turns`` by the number of a conversation those up to its last answer. ``n_untrained`` answers had a
    grammar. It is ``full`` from a request that its context has no room for to the next answer.
    """

    context: WorkflowContext
    ref: AdapterRef
    seed: int
    key: str = ""
    tool_parser: str | None = None
    conversations: list[PackedTurns] = field(default_factory=list)
    records: list[RequestRecord] = field(default_factory=list)
    responses: dict[str, tuple[KnownTurns, bool]] = field(default_factory=dict)
    turns: dict[int, KnownTurns] = field(default_factory=dict)
    prompts: Prompts = field(init=False)
    last: Generation | None = None
    n_requests: int = 0
    n_untrained: int = 0
    full: bool = False
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    fault: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.context.formatter)

    def prompt(self, request: SamplingRequest) -> WrittenPrompt:
        """Raises AgentRequestError for what cannot be sampled."""
        if request.model != self.ref.name:
            raise AgentRequestError(
                404, f"there is no model {request.model!r} for this key, only {self.ref.name!r}", "model"
            )
        if request.tools and self.tool_parser is None:
            raise refuse("tools", "the run's configuration names no workflow.tool_parser for the model's calls")
        prompt = self.prompts.of(request)
        if not len(prompt.token_ids):
            raise AgentRequestError(400, "the prompt has no tokens")
        return prompt

    async def answer(
        self, request: SamplingRequest, heard: Callable[[CompletedRequest, ReplyPart], None] | None = None
    ) -> CompletedRequest:
        """With ``heard`` the server streams: the same tokens, in parts. What is recorded does not depend on it.

        Raises AgentRequestError for what cannot be sampled, GenerationFault where there is no answer.
        """
        prompt = self.prompt(request)
        if (n := len(prompt.token_ids)) >= (limit := self.context.max_model_len):
            self.full = True
            raise context_full(n, limit)
        request, known = request.after(prompt.n_known), continued_by(self.conversations, prompt.token_ids)
        self.n_requests += 1
        number = self.n_requests
        seed = derived_seed(self.seed, number if request.seed is None else -1 - request.seed)
        started = CompletedRequest(number=number, request=request, prompt_ids=prompt.token_ids, replies=[])
        opened = THOUGHT_START if request.tools and self._opens_thought(prompt) else ""
        decode, thinks = self.context.tokenizer.decode, bool(opened) or None
        shown = [_HeldText(decode, bool(request.tools), thinks) for _ in range(request.n)]

        def arrived(index: int, part: Generation) -> None:
            assert heard is not None
            heard(started, ReplyPart(index=index, text=shown[index].next(part), sampled=part))

        try:
            sampled = await self.context.answer(
                self.ref,
                prompt.token_ids,
                n=request.n,
                max_tokens=request.max_tokens,
                stop=list(request.stop),
                seed=seed,
                timeout_s=2 * self.context.sampling.timeout_s,
                top_logprobs=request.top_logprobs or 0,
                schema=request.grammar,
                arrived=arrived if heard is not None and self.context.streams else None,
                routes_from=known.n_routed if known else 0,
            )
            replies = await self._replies(request, number, sampled, [each.text for each in shown], opened)
        except GenerationFault as fault:
            if fault.kind is FaultKind.REJECTED:
                raise AgentRequestError(400, fault.detail) from None
            raise
        for index, (reply, given) in enumerate(zip(replies, shown, strict=True) if heard else ()):
            if heard is not None and (rest := reply.turn.content[len(given.text) :]):
                heard(started, ReplyPart(index=index, text=rest))
        self._record(request, prompt, number, replies)
        return replace(started, replies=replies)

    def _record(
        self, request: SamplingRequest, prompt: WrittenPrompt, number: int, replies: Sequence[SampledReply]
    ) -> None:
        answers = list[AnswerRecord]()
        longest = min(self.context.sampling.max_new_tokens, self.context.max_model_len - len(prompt.token_ids))
        for reply in replies:
            recorded = reply.sampled
            if recorded.finish_reason == "length" and (request.max_tokens or longest) < longest:
                recorded = replace(recorded, finish_reason="max_tokens")  # the agent's own, no limit of the run
            if request.grammar is not None and not self.context.evaluating:
                recorded = replace(recorded, columns=TokenColumns.unsampled(recorded.token_ids))
                self.n_untrained += 1
            conversation = join(self.conversations, prompt.token_ids, recorded)
            end = len(conversation)
            at = next(i for i, each in enumerate(self.conversations) if each is conversation)
            start, how = end - len(reply.sampled.columns), reply.finish_reason
            answers.append(AnswerRecord(turn=reply.turn, finish_reason=how, conversation=at, begin=start, end=end))
            if (turns := self.prompts.answered(request, prompt, reply, conversation)) is not None:
                self.turns[at] = turns
                self.responses.setdefault(f"resp_{number}", (turns, request.instructed))
        record = RequestRecord(
            known=prompt.n_known,
            turns=request.turns or (),
            tools=() if prompt.known else tuple(request.tools),  # the same as before, else it would not continue
            answers=tuple(answers),
            prompt=request.prompt if request.turns is None else None,
        )
        self.records.append(record)
        self.last, self.full = replies[-1].sampled, False

    async def _replies(
        self, request: SamplingRequest, number: int, sampled: Sequence[Generation], shown: Sequence[str], opened: str
    ) -> list[SampledReply]:
        texts = [self._spoken(one, request.stop) for one in sampled]
        parsed: Sequence[ParsedText | None] = [None] * len(sampled)
        if request.forced:
            parsed = [_forced(one.text) for one in sampled]
        elif request.tools and self.tool_parser is not None:
            parsed = await self.context.client.tool_calls(
                self.context.client.newest(self.ref),
                ToolCallsBody(parser=self.tool_parser, tools=request.tools, texts=[opened + text for text, _ in texts]),
                timeout_s=2 * self.context.sampling.timeout_s,
            )
        replies = []
        for i, (one, (_, stop), given, found) in enumerate(zip(sampled, texts, shown, parsed, strict=True)):
            parsed_calls = found.calls if found is not None else []
            calls = tuple(
                Call(id=call_id(self.seed, number, i, k), name=call.name, arguments=call.arguments)
                for k, call in enumerate(parsed_calls if request.parallel_calls else parsed_calls[:1])
            )
            content = found.content.removeprefix(opened) if found is not None and calls else one.text
            turn = Turn(role="assistant", content=content if content.startswith(given) else given, calls=calls)
            replies.append(SampledReply(sampled=one, turn=turn, stopped_by=stop if stop in request.stop else None))
        return replies

    def _opens_thought(self, prompt: WrittenPrompt) -> bool:
        """Whether the prompt ends with the start of a thought, as templates of thinking models write it."""
        end = self.context.tokenizer.decode(
            list(prompt.token_ids[-2 * len(THOUGHT_START) :]), skip_special_tokens=False
        )
        return end.rstrip().endswith(THOUGHT_START)

    def _spoken(self, sampled: Generation, stop: Sequence[str]) -> tuple[str, str | None]:
        """The answer's text with special tokens, which may mark calls, but without the end of sequence or stop text;
        and the stop text.
        """
        ids, tokenizer = sampled.token_ids, self.context.tokenizer
        if sampled.finish_reason == "stop" and not tokenizer.decode(ids[-1:], skip_special_tokens=True):
            ids = ids[:-1]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if sampled.finish_reason != "stop":
            return text, None
        found = [(at, s) for s in (*stop, *self.context.sampling.stop) if (at := text.find(s)) >= 0]
        return (text[: min(found)[0]], min(found)[1]) if found else (text, None)

    def earlier(self, response_id: str) -> list[Turn] | None:
        """The turns up to and with a response, without its instructions."""
        if (found := self.responses.get(response_id)) is None:
            return None
        known, instructed = found
        return known.turns()[instructed:]

    def spell(self, token: int) -> str:
        return self.context.tokenizer.decode([token], skip_special_tokens=False)

    def fail(self, fault: GenerationFault) -> None:
        """Fail the group, which is retried whole: a result without this answer is no sample of the policy."""
        if not self.fault.done():
            self.fault.set_exception(fault)
            self.fault.exception()  # an agent that is cancelled meanwhile does not look at it

    def _turns_of(self, conversation: int) -> str:
        """The messages of a conversation as JSON, the first `TURNS_BYTES`; empty for prompts that are plain text."""
        known, kept, left = self.turns.get(conversation), list[bytes](), TURNS_BYTES
        turns = known.turns() if known is not None else []
        for turn in turns:
            cut = f"{turn.content[:TURN_LETTERS]} [{len(turn.content)} letters]"
            shown = turn if len(turn.content) <= TURN_LETTERS else msgspec.structs.replace(turn, content=cut)
            kept.append(msgspec.json.encode(shown.for_template()))
            if (left := left - len(kept[-1])) < 0:
                kept[-1] = msgspec.json.encode({"role": f"{len(turns) - len(kept) + 1} more turns"})
                break
        return f"[{b','.join(kept).decode()}]" if kept else ""

    def _messages(self) -> list[dict[str, Any]]:
        """The conversation of the last completion, as the agent has sent it."""
        if not self.records:
            return []
        prompt, answer = self.records[-1].prompt, self.records[-1].answers[-1]
        if isinstance(prompt, list):
            prompt = self.context.tokenizer.decode(prompt, skip_special_tokens=False)
        plain = None if prompt is None else [Turn(role="user", content=prompt), answer.turn]
        turns = plain or self.turns[answer.conversation].turns()
        # Arguments of calls stay text: it may spell numbers that msgpack does not have.
        return [turn.message() for turn in turns]

    def ended(self) -> EndedSession:
        fault = self.fault.exception() if self.fault.done() and not self.fault.cancelled() else None
        return EndedSession(
            conversations=[
                EndedConversation(columns=c.columns, finish_reason=c.finish_reason, turns=self._turns_of(i))
                for i, c in enumerate(self.conversations)
            ],
            requests=msgspec.json.encode(self.records),
            messages=self._messages(),
            ends=[(r.answers[-1].conversation, r.answers[-1].end - 1) for r in self.records],
            text=self.last.text if self.last else "",
            n_tokens=len(self.last.columns) if self.last else 0,
            finish_reason=self.last.finish_reason if self.last else "",
            full=self.full,
            n_untrained=self.n_untrained,
            fault=(fault.kind, fault.detail, fault.cause) if isinstance(fault, GenerationFault) else None,
        )


class Sessions:
    """The keys that are valid now. Keys are kept as digests. ``port`` is that of the endpoint, 0 without one.

    Answers that are not trained on are counted by adapter, with a line of the log each time that their number doubles.
    """

    def __init__(self) -> None:
        self.port = 0
        self._open: dict[bytes, Session] = {}
        self._untrained: dict[str, int] = {}

    @contextlib.asynccontextmanager
    async def opened(
        self, context: WorkflowContext, ref: AdapterRef, seed: int, tool_parser: str | None = None
    ) -> AsyncIterator[OpenSession]:
        """A new session; at the end its key is revoked and its running requests are cancelled. Raises WorkerLost."""
        session = Session(context=context, ref=ref, seed=seed, tool_parser=tool_parser)
        opened = OpenSession(port=self.port, key=self.open(session), fault=session.fault)
        try:
            yield opened
        finally:
            self.close(session)
        opened.ended = session.ended()
        self.count(ref.name, session.n_untrained)

    def open(self, session: Session) -> str:
        """A new key for the session."""
        session.key = secrets.token_urlsafe(32)
        self._open[_digest(session.key)] = session
        return session.key

    def close(self, session: Session) -> None:
        del self._open[_digest(session.key)]
        for request in session.requests:
            request.cancel()

    def count(self, adapter: str, n_untrained: int) -> None:
        before = self._untrained.get(adapter, 0)
        self._untrained[adapter] = n = before + n_untrained
        if n.bit_length() > before.bit_length():
            reason = "a grammar (forced tool_choice, JSON schema) chose among their tokens"
            warn_once(f"{adapter}: {n} answers by now are context, not trained on, since {reason}")

    def of_key(self, key: str) -> Session | None:
        return self._open.get(_digest(key))


def _forced(text: str) -> ParsedText:
    """The calls of an answer whose text is a list of them; of one that was cut off there are none."""
    try:
        found = msgspec.json.decode(text, type=list[_ForcedCall])
    except msgspec.DecodeError:
        return ParsedText(content=text)
    return ParsedText(
        content="", calls=[ParsedCall(name=call.name, arguments=json.dumps(call.parameters)) for call in found]
    )


class _ForcedCall(msgspec.Struct, frozen=True):
    name: str
    parameters: dict[str, Any]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()  # a header may hold any bytes


def call_id(seed: int, *place: int) -> str:
    """Not random: templates may write it, and a run can be repeated."""
    return hashlib.blake2b(repr((seed, place)).encode()).hexdigest()[:CALL_ID_LETTERS]

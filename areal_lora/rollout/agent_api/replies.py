"""An agent's request and its replies, whichever API they came by: turns, what to sample, what was sampled, streams."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import msgspec

from areal_lora.rollout.agent_api.refusals import refuse, warn_once
from areal_lora.types import THOUGHT_END, Generation

Spell: TypeAlias = Callable[[int], str]  # the text of one token
MAX_N = 128
MAX_TOP_LOGPROBS = 20  # OpenAI's limit, and our servers'


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A tool call of the model. ``arguments`` is JSON, if the model wrote JSON."""

    id: str
    name: str
    arguments: str

    def values(self) -> Any:
        """The arguments as chat templates take them: decoded; the text itself where it is no JSON, or spells half a
        surrogate pair, which has no tokens."""
        try:
            values = json.loads(self.arguments)
            json.dumps(values, ensure_ascii=False).encode()
            return values
        except ValueError:
            return self.arguments

    def compared(self) -> Any:
        try:
            return json.loads(self.arguments, parse_float=_number)
        except ValueError:
            return self.arguments


def _number(spelt: str) -> float:
    value = float(spelt)
    return int(value) if value.is_integer() else value


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One message. ``call_id`` is that of the call that a tool's message answers."""

    role: str
    content: str = ""
    name: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""

    def for_template(self) -> dict[str, Any]:
        return self.message(Call.values)

    def message(self, arguments: Callable[[Call], Any] = lambda call: call.arguments) -> dict[str, Any]:
        """In the format of chat completions."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:
            message["name"] = self.name
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": arguments(c)}}
                for c in self.calls
            ]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message

    def digest(self, before: bytes) -> bytes:
        """Of a conversation that ends with this turn, from that of the turns before it.

        Ids of calls do not count, nor how their arguments are spelt: JavaScript writes 1.0 as 1. Nor does an
        assistant's thought, which clients such as litellm remove from the content, with the spaces after it.
        """
        content = self.content.rpartition(THOUGHT_END)[2].strip() if self.role == "assistant" else self.content
        if not self.calls:  # JSON takes twice as long, for each earlier turn of a request
            fields = self.role, self.name, self.call_id, content
            return text_digest(f"{[*map(len, fields)]}{''.join(fields)}", before)
        compared = self.role, content, self.name, [(c.name, c.compared()) for c in self.calls], self.call_id
        return digest(before, compared)


def digest(before: bytes, value: Any) -> bytes:
    return text_digest(json.dumps(value, sort_keys=True), before)


def text_digest(text: str, before: bytes = b"") -> bytes:
    return hashlib.blake2b(before + text.encode(errors="surrogatepass"), digest_size=16).digest()


def _schema(kind: Any) -> dict[str, Any] | None:
    match kind:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}} | {
            "type": "json_schema",
            "schema": dict(schema),
        }:
            return schema
    raise refuse("response_format", "text, json_object, or json_schema with a schema")


def _forced(choice: Any, tools: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    match choice:
        case None | "auto" | "none":
            return ()
        case "required" | "any":
            if not tools:
                raise refuse("tool_choice", "there are no tools to call")
            return tuple(tool["function"]["name"] for tool in tools)
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return (name,)
    raise refuse("tool_choice", "auto, none, required, or one tool's name")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRequest:
    """``turns`` of a chat, or else a ``prompt``. ``tools`` are those that the prompt names, in the chat format.

    ``tool_choice`` and ``response_format`` are those of any of the APIs. The first turn is ``instructed`` if it is a
    response's instructions, which those that continue the response do not have.
    """

    model: str
    turns: tuple[Turn, ...] | None = None
    prompt: str | list[int] = ""
    tools: list[dict[str, Any]] = field(default_factory=list)
    parallel_calls: bool = True
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int | None = None  # None: no log-probabilities
    tool_choice: Any = None
    response_format: Any = None
    instructed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_N:
            raise refuse("n", f"n is 1 to {MAX_N}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise refuse("max_tokens", "at least 1")
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise refuse("top_logprobs", f"0 to {MAX_TOP_LOGPROBS}")
        if _schema(self.response_format) is not None and self.tools:
            warn_once("response_format beside tools has no grammar, which would leave no room for calls")
        if unknown := set(self.forced) - {tool["function"]["name"] for tool in self.tools}:
            raise refuse("tool_choice", f"tools has no {', '.join(sorted(unknown))}")

    def after(self, known: int) -> Self:
        """Without the first ``known`` turns, which the session keeps: requests wait long, and their turns are many."""
        return self if self.turns is None else replace(self, turns=self.turns[known:])

    @property
    def forced(self) -> tuple[str, ...]:
        """The tools that an answer may call, where it must call one."""
        return _forced(self.tool_choice, self.tools)

    @property
    def grammar(self) -> dict[str, Any] | None:
        """The JSON schema of the answer's text, if it has to follow one; a list of calls is as vLLM's servers have it.

        Tokens that a grammar has chosen among are no sample of the policy: they are not trained on. Beside tools that
        need not be called an answer has none, and its form is the agent's to judge.
        """
        if not self.forced:
            return None if self.tools else _schema(self.response_format)
        kinds, definitions = list[dict[str, Any]](), dict[str, Any]()
        for function in (tool["function"] for tool in self.tools if tool["function"]["name"] in self.forced):
            parameters = dict(function.get("parameters") or {"type": "object"})
            definitions |= parameters.pop("$defs", {})
            properties = {"name": {"type": "string", "enum": [function["name"]]}, "parameters": parameters}
            kinds.append({"type": "object", "properties": properties, "required": [*properties]})
        one = {} if self.parallel_calls and len(self.forced) > 1 else {"maxItems": 1}
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}} | one
        return schema | ({"$defs": definitions} if definitions else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """One answer: what was sampled, and the message that the agent gets. ``stopped_by`` is the request's stop text
    that ended it.
    """

    sampled: Generation
    turn: Turn
    stopped_by: str | None = None

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.turn.calls else self.sampled.finish_reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedRequest:
    """``number`` counts the session's requests."""

    number: int
    request: SamplingRequest
    prompt_ids: Sequence[int]
    replies: list[SampledReply]

    @property
    def n_out(self) -> int:
        return sum(len(reply.sampled.columns) for reply in self.replies)

    def usage(self) -> dict[str, int]:
        n = len(self.prompt_ids)
        return {"prompt_tokens": n, "completion_tokens": self.n_out, "total_tokens": n + self.n_out}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """The next part of reply ``index``: text that the agent gets, and the tokens that came by now, if any."""

    index: int
    text: str
    sampled: Generation | None = None


Heard: TypeAlias = Callable[[CompletedRequest, ReplyPart], None]
"""Gets the request, without replies yet, and the next part of one."""


class ReplyStream:
    """Replies that are being sampled by the task of ``answer``: part by part, then whole."""

    started: CompletedRequest

    def __init__(self, answer: Callable[[Heard], Coroutine[Any, Any, CompletedRequest]]) -> None:
        self._queue = asyncio.Queue[ReplyPart | None]()
        self._first: ReplyPart | None = None
        self.whole = asyncio.create_task(answer(self._take))
        self.whole.add_done_callback(lambda _: self._queue.put_nowait(None))

    def _take(self, started: CompletedRequest, part: ReplyPart) -> None:
        self.started = started
        self._queue.put_nowait(part)

    async def opened(self) -> None:
        """Wait for the first part; raises what ``answer`` raises before it."""
        try:
            self._first = await self._queue.get()
        finally:
            if self._first is None:  # cancelled, or at an end
                self.whole.cancel()
        if self._first is None:
            await self.whole

    async def parts(self) -> AsyncIterator[ReplyPart]:
        part = self._first
        while part is not None:
            yield part
            part = await self._queue.get()


def event_bytes(event: dict[str, Any], *, named: bool = False) -> bytes:
    """One server-sent event; a ``named`` one starts with its type."""
    name = b"event: " + event["type"].encode() + b"\n" if named else b""
    return name + b"data: " + msgspec.json.encode(event) + b"\n\n"

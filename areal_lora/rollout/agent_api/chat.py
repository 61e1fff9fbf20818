"""Chat and text completions of OpenAI's API.

Messages as turns for the chat template; from bodies of ``POST /v1/chat/completions`` and ``/v1/completions`` to
requests, from answers to bodies and events.
"""

import time
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import msgspec

from areal_lora.rollout.agent_api.refusals import AgentRequestError, refuse, warn_once
from areal_lora.rollout.agent_api.replies import Call, CompletedRequest, ReplyStream, SamplingRequest, Spell, Turn
from areal_lora.types import Generation, content_text

T = TypeVar("T", bound=msgspec.Struct)
_OF_PROVIDERS = ("web_search", "image_generation", "code_interpreter", "file_search", "local_shell")
ROLES = {"developer": "system", "function": "tool"}


class _Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str = "{}"


class _ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: _Function
    id: str = ""
    type: str = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A message of ``POST /v1/chat/completions``; fields that no model reads are ignored."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None

    def turn(self, at: str) -> Turn:
        """Raises AgentRequestError for content that is not text."""
        calls = tuple(
            Call(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in self.tool_calls or ()
        )
        return Turn(
            role=ROLES.get(self.role, self.role),
            content=plain(self.content, f"{at}.content"),
            name=self.name or "",
            calls=calls,
            call_id=self.tool_call_id or "",
        )


def plain(content: Any, at: str) -> str:
    """`content_text`; raises AgentRequestError."""
    try:
        return content_text(content)
    except ValueError as error:
        raise refuse(at, str(error)) from None


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Function tools in the chat format, which templates and parsers take; also from the format of responses.

    Functions of a namespace are as any other. `strict` is dropped: only `tool_choice` forces calls. Tools that
    only a provider can run are omitted. Raises AgentRequestError for tools of other types.
    """
    converted = []
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace":
            converted += chat_tools(tool.get("tools"))
            continue
        if isinstance(kind, str) and kind.startswith(_OF_PROVIDERS):
            warn_once(f"tools of type {kind} are omitted: only a provider can run them")
            continue
        if kind != "function":
            raise refuse(at, f"a tool of type {kind}; only functions can be called here")
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise AgentRequestError(400, f"{at}: a function needs a name", at)
        kept = {k: function[k] for k in ("name", "description", "parameters") if function.get(k) is not None}
        converted.append({"type": "function", "function": kept})
    return converted


def converted(body: dict[str, Any], kind: type[T]) -> T:
    """The fields that ``kind`` has. Raises AgentRequestError for values of other types."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise AgentRequestError(400, str(error)) from None


def stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: Any = None


class ChatRequest(_Body, frozen=True, kw_only=True):
    messages: list[Message] | None = None
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TextRequest(_Body, frozen=True, kw_only=True):
    prompt: str | list[str | int] | None = None
    logprobs: int | None = None


def parse_chat(body: dict[str, Any]) -> SamplingRequest:
    """Raises AgentRequestError."""
    request = converted(body, ChatRequest)
    if not request.messages:
        raise AgentRequestError(400, "give messages", "messages")
    if request.top_logprobs and not request.logprobs:
        raise refuse("top_logprobs", "needs logprobs: true")
    limit = request.max_completion_tokens
    return SamplingRequest(
        model=request.model,
        turns=tuple(message.turn(f"messages[{i}]") for i, message in enumerate(request.messages)),
        tools=chat_tools(request.tools) if request.tool_choice != "none" else [],
        tool_choice=request.tool_choice,
        response_format=request.response_format,
        parallel_calls=request.parallel_tool_calls is not False,
        n=1 if request.n is None else request.n,
        max_tokens=request.max_tokens if limit is None else limit,
        stop=stops(request.stop),
        seed=request.seed,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def parse_text(body: dict[str, Any]) -> SamplingRequest:
    """Raises AgentRequestError."""
    request = converted(body, TextRequest)
    return SamplingRequest(
        model=request.model,
        prompt=_one_prompt(request.prompt),
        response_format=request.response_format,
        n=1 if request.n is None else request.n,
        max_tokens=request.max_tokens,
        stop=stops(request.stop),
        seed=request.seed,
        top_logprobs=request.logprobs,
    )


def _one_prompt(prompt: str | list[str | int] | None) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    texts = [p for p in prompt or () if isinstance(p, str)]
    ids = [p for p in prompt or () if isinstance(p, int)]
    if texts and (ids or len(texts) > 1):
        raise refuse("prompt", "one prompt in a request: a text, or its token ids")
    if not texts and not ids:
        raise AgentRequestError(400, "give prompt", "prompt")
    return texts[0] if texts else ids


def reply_body(answered: CompletedRequest, model: str, body: dict[str, Any], spell: Spell) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    choices = [_choice(i, answered, spell) for i in range(len(answered.replies))]
    return _head(answered, model, "") | {"choices": choices, "usage": answered.usage()}


async def reply_events(
    stream: ReplyStream, model: str, body: dict[str, Any], spell: Spell
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a streamed answer: text as it comes, calls at the end."""
    with_usage = (body.get("stream_options") or {}).get("include_usage") is True
    head = _head(stream.started, model, ".chunk") | ({"usage": None} if with_usage else {})
    request, roles = stream.started.request, set[int]()

    def chunk(index: int, **part: Any) -> dict[str, Any]:
        return head | {"choices": [{"index": index, "logprobs": None, "finish_reason": None} | part]}

    async for part in stream.parts():
        logprobs = _logprobs(part.sampled, request, spell) if part.sampled else None
        if request.turns is not None and part.index not in roles:
            roles.add(part.index)
            yield chunk(part.index, delta={"role": "assistant", "content": ""})
        if part.text or logprobs is not None:
            text = {"text": part.text} if request.turns is None else {"delta": {"content": part.text}}
            yield chunk(part.index, **text, logprobs=logprobs)
    answered = await stream.whole
    for i, reply in enumerate(answered.replies):
        for k, call in enumerate(_calls(reply.turn)):
            yield chunk(i, delta={"tool_calls": [{"index": k} | call]})
        rest: dict[str, Any] = {"text": ""} if request.turns is None else {"delta": {}}
        yield chunk(i, **rest, finish_reason=reply.finish_reason)
    if with_usage:
        yield head | {"choices": [], "usage": answered.usage()}


def _head(answered: CompletedRequest, model: str, suffix: str) -> dict[str, Any]:
    chat = answered.request.turns is not None
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{answered.number}",
        "object": f"chat.completion{suffix}" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
    }


def _choice(index: int, answered: CompletedRequest, spell: Spell) -> dict[str, Any]:
    request, reply = answered.request, answered.replies[index]
    content = reply.turn.content
    choice = {
        "index": index,
        "logprobs": _logprobs(reply.sampled, request, spell),
        "finish_reason": reply.finish_reason,
    }
    if request.turns is None:
        return choice | {"text": content}
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if calls := _calls(reply.turn):
        message |= {"tool_calls": calls, "content": content or None}
    return choice | {"message": message}


def _calls(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in turn.calls
    ]


def token_logprobs(sampled: Generation, top: int, spell: Spell) -> list[dict[str, Any]]:
    """OpenAI's entries of the sampled tokens; of the ``top`` likeliest tokens too, where the server returns them."""
    tables = sampled.top_logprobs or [{}] * len(sampled.columns)
    rows = []
    for token, value, table in zip(sampled.token_ids, sampled.logprobs, tables, strict=True):
        best = sorted(table.items(), key=lambda entry: -entry[1])[:top]
        rows.append(_entry(token, value, spell) | {"top_logprobs": [_entry(t, v, spell) for t, v in best]})
    return rows


def _entry(token: int, value: float, spell: Spell) -> dict[str, Any]:
    text = spell(token)
    return {"token": text, "bytes": list(text.encode("utf-8", "replace")), "logprob": value}


def _logprobs(sampled: Generation, request: SamplingRequest, spell: Spell) -> dict[str, Any] | None:
    if request.top_logprobs is None:
        return None
    rows = token_logprobs(sampled, request.top_logprobs, spell)
    if request.turns is not None:
        return {"content": rows, "refusal": None}
    return {
        "tokens": [row["token"] for row in rows],
        "token_logprobs": [row["logprob"] for row in rows],
        "top_logprobs": [{best["token"]: best["logprob"] for best in row["top_logprobs"]} for row in rows],
        "text_offset": [0, *accumulate(len(row["token"]) for row in rows)][:-1],
    }

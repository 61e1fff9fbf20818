"""``POST /v1/messages`` of Anthropic's API, for coding harnesses: from blocks to turns, from replies to blocks.

A user's tool results are turns of their own before the user's text. Blocks of thinking are dropped: this endpoint makes
none. Fields that are no sampling settings (``thinking``, ``cache_control``, ``metadata``) are ignored.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from areal_lora.rollout.agent_api.chat import chat_tools, converted, plain
from areal_lora.rollout.agent_api.refusals import refuse
from areal_lora.rollout.agent_api.replies import Call, CompletedRequest, ReplyStream, SamplingRequest, Spell, Turn

_THOUGHTS = ("thinking", "redacted_thinking")
_ATTRIBUTION = "x-anthropic-billing-header"  # starts Claude Code's first block, which no two requests share
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Tool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None


class _ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _BlockMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]]


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    messages: list[_BlockMessage]
    max_tokens: int | None = None  # as in count_tokens
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: _ToolChoice = _ToolChoice()
    stop_sequences: list[str] | None = None
    output_config: dict[str, Any] | None = None


def parse_messages(body: dict[str, Any]) -> SamplingRequest:
    """Raises AgentRequestError."""
    request = converted(body, MessagesRequest)
    if not request.messages:
        raise refuse("messages", "at least one")
    turns = _system(request.system or [], "system")
    for i, message in enumerate(request.messages):
        at = f"messages[{i}].content"
        turns += _system(message.content, at) if message.role == "system" else _turns(message, at)
    tools = []
    for i, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            raise refuse(f"tools[{i}]", f"a tool of type {tool.type}; only functions can be called here")
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
    choice = request.tool_choice
    return SamplingRequest(
        model=request.model,
        turns=tuple(turns),
        tools=[] if choice.type == "none" else chat_tools(tools),
        tool_choice={"name": choice.name} if choice.name else choice.type,
        response_format=(request.output_config or {}).get("format"),
        parallel_calls=not choice.disable_parallel_tool_use,
        max_tokens=request.max_tokens,
        stop=tuple(request.stop_sequences or ()),
    )


def _system(content: str | list[dict[str, Any]], at: str) -> list[Turn]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = plain([block for block in blocks if not str(block.get("text")).startswith(_ATTRIBUTION)], at)
    return [Turn(role="system", content=text)] if text else []


def _turns(message: _BlockMessage, at: str) -> Iterator[Turn]:
    if isinstance(message.content, str):
        yield Turn(role=message.role, content=message.content)
        return
    texts, calls = list[dict[str, Any]](), list[Call]()
    results = False
    for i, block in enumerate(message.content):
        kind = block.get("type")
        if kind == "tool_use":
            spelt = json.dumps(block.get("input"), ensure_ascii=False)
            calls.append(Call(id=str(block.get("id", "")), name=str(block.get("name", "")), arguments=spelt))
        elif kind == "tool_result":
            results = True
            content = plain(block.get("content"), f"{at}[{i}].content")
            yield Turn(role="tool", content=content, call_id=str(block.get("tool_use_id", "")))
        elif kind == "text":
            texts.append(block)
        elif kind not in _THOUGHTS:
            raise refuse(f"{at}[{i}]", f"a block of type {kind}; there are texts and tool calls here")
    if texts or calls or not results:
        yield Turn(role=message.role, content=plain(texts, at), calls=tuple(calls))


def message_body(answered: CompletedRequest, model: str, body: dict[str, Any], spell: Spell) -> dict[str, Any]:
    """The message object; of a request without replies that of its stream's start."""
    return {
        "id": f"msg_{answered.number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(answered),
        **_stop(answered),
        "usage": {"input_tokens": len(answered.prompt_ids), "output_tokens": answered.n_out},
    }


def _stop(answered: CompletedRequest) -> dict[str, Any]:
    if not answered.replies:
        return {"stop_reason": None, "stop_sequence": None}
    (reply,) = answered.replies
    if reply.stopped_by is not None and not reply.turn.calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stopped_by}
    return {"stop_reason": _REASONS[reply.finish_reason], "stop_sequence": None}


def _blocks(answered: CompletedRequest) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    for turn in (reply.turn for reply in answered.replies):
        blocks += [{"type": "text", "text": turn.content}] if turn.content else []
        for call in turn.calls:
            given = call.values()  # an object, also where the model wrote none
            given = given if isinstance(given, dict) else {"arguments": given}
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


async def message_events(
    stream: ReplyStream, model: str, body: dict[str, Any], spell: Spell
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed message: text as it comes, calls at the end."""
    yield {"type": "message_start", "message": message_body(stream.started, model, body, spell)}
    texts = False
    async for part in stream.parts():
        if part.text:
            if not texts:
                yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            texts = True
            delta = {"type": "text_delta", "text": part.text}
            yield {"type": "content_block_delta", "index": 0, "delta": delta}
    answered = await stream.whole
    for index, block in enumerate(_blocks(answered)):
        if block["type"] == "tool_use":
            yield {"type": "content_block_start", "index": index, "content_block": block | {"input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    usage = {"input_tokens": len(answered.prompt_ids), "output_tokens": answered.n_out}
    yield {"type": "message_delta", "delta": _stop(answered), "usage": usage}
    yield {"type": "message_stop"}

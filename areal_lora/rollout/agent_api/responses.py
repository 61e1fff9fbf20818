"""``POST /v1/responses``, for the OpenAI Agents SDK: from items to turns, from an answer to items and events."""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from areal_lora.rollout.agent_api import chat
from areal_lora.rollout.agent_api.refusals import refuse
from areal_lora.rollout.agent_api.replies import Call, CompletedRequest, ReplyStream, SamplingRequest, Spell, Turn

LOGPROBS = "message.output_text.logprobs"  # in `include`


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    prompt: Any = None
    text: dict[str, Any] | None = None


def parse_response(body: dict[str, Any], earlier: Callable[[str], list[Turn] | None]) -> SamplingRequest:
    """``earlier`` returns the turns up to and with a response of the session, without its instructions.

    Raises AgentRequestError.
    """
    request = chat.converted(body, ResponsesRequest)
    before: tuple[Turn, ...] = ()
    if request.prompt:
        raise refuse("prompt", "there are no stored prompts here; give instructions and input")
    if request.previous_response_id is not None:
        if (found := earlier(request.previous_response_id)) is None:
            raise refuse("previous_response_id", f"this key has no response {request.previous_response_id!r}")
        before = tuple(found)
    system = (Turn(role="system", content=request.instructions),) if request.instructions else ()
    wanted = LOGPROBS in (request.include or ())
    return SamplingRequest(
        model=request.model,
        turns=system + merged([*before, *_turns(request.input)]),
        instructed=bool(system),
        tools=[] if request.tool_choice == "none" else chat.chat_tools(request.tools),
        tool_choice=request.tool_choice,
        response_format=(request.text or {}).get("format"),
        parallel_calls=request.parallel_tool_calls is not False,
        max_tokens=request.max_output_tokens,
        top_logprobs=(request.top_logprobs or 0) if wanted else None,
    )


def _turns(items: str | list[dict[str, Any]]) -> Iterator[Turn]:
    if isinstance(items, str):
        yield Turn(role="user", content=items)
        return
    for i, item in enumerate(items):
        at = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                role = str(item.get("role", "user"))
                yield Turn(role=chat.ROLES.get(role, role), content=chat.plain(item.get("content"), f"{at}.content"))
            case "function_call":
                call = Call(
                    id=str(item.get("call_id", "")),
                    name=str(item.get("name", "")),
                    arguments=str(item.get("arguments", "{}")),
                )
                yield Turn(role="assistant", calls=(call,))
            case "function_call_output":
                content = chat.plain(item.get("output"), f"{at}.output")
                yield Turn(role="tool", content=content, call_id=str(item.get("call_id", "")))
            case "reasoning":
                pass  # this endpoint makes none
            case kind:
                raise refuse(at, f"an item of type {kind}; there are messages and function calls here")


def merged(turns: list[Turn]) -> tuple[Turn, ...]:
    """An assistant's message and the calls that follow it are one turn, as in a chat."""
    whole: list[Turn] = []
    for turn in turns:
        last = whole[-1] if whole else None
        if turn.calls and last is not None and last.role == "assistant":
            whole[-1] = msgspec.structs.replace(last, calls=last.calls + turn.calls)
        else:
            whole.append(turn)
    return tuple(whole)


def response_body(answered: CompletedRequest, model: str, body: dict[str, Any], spell: Spell) -> dict[str, Any]:
    """The response object. An answer that is cut off by its length is `incomplete`, as with OpenAI."""
    cut = any(reply.sampled.finish_reason == "length" for reply in answered.replies)
    status = "incomplete" if cut else "completed" if answered.replies else "in_progress"
    n = len(answered.prompt_ids)
    usage = {
        "input_tokens": n,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": answered.n_out,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n + answered.n_out,
    }
    return {
        "id": f"resp_{answered.number}",
        "object": "response",
        "created_at": time.time(),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": _items(answered, status, body, spell) if answered.replies else [],
        "parallel_tool_calls": answered.request.parallel_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": usage if answered.replies else None,
    }


def _items(answered: CompletedRequest, status: str, body: dict[str, Any], spell: Spell) -> list[dict[str, Any]]:
    reply, number = answered.replies[0], answered.number
    items: list[dict[str, Any]] = []
    if reply.turn.content or not reply.turn.calls:
        wanted = answered.request.top_logprobs
        logprobs = [] if wanted is None else chat.token_logprobs(reply.sampled, wanted, spell)
        part = {"type": "output_text", "text": reply.turn.content, "annotations": [], "logprobs": logprobs}
        items.append(
            {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        )
    for call in reply.turn.calls:
        named = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        for tool in body["tools"]:
            if tool["type"] == "namespace" and any(each.get("name") == call.name for each in tool["tools"]):
                named["namespace"] = tool["name"]
        items.append({"id": f"fc_{call.id}", "type": "function_call", **named, "status": "completed"})
    return items


async def response_events(
    stream: ReplyStream, model: str, body: dict[str, Any], spell: Spell
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed response: text as it comes, calls at the end."""
    numbers, wanted = itertools.count(), stream.started.request.top_logprobs

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", **fields, "sequence_number": next(numbers)}

    started = response_body(stream.started, model, body, spell)
    yield event("created", response=started)
    yield event("in_progress", response=started)
    empty: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    message = {"id": f"msg_{stream.started.number}", "type": "message", "role": "assistant", "content": []}
    place = {"output_index": 0, "item_id": message["id"], "content_index": 0}
    texts = list[str]()
    async for part in stream.parts():
        if not part.text:
            continue
        if not texts:
            yield event("output_item.added", output_index=0, item=message | {"status": "in_progress"})
            yield event("content_part.added", part=empty, **place)
        texts.append(part.text)
        rows = [] if wanted is None or part.sampled is None else chat.token_logprobs(part.sampled, wanted, spell)
        yield event("output_text.delta", delta=part.text, logprobs=rows, **place)
    whole = response_body(await stream.whole, model, body, spell)
    for index, item in enumerate(whole["output"]):
        if item["type"] == "message":
            (content,) = item["content"]
            if not texts:
                yield event("output_item.added", output_index=index, item=message | {"status": "in_progress"})
                yield event("content_part.added", part=empty, **place)
            yield event("output_text.done", text=content["text"], logprobs=content["logprobs"], **place)
            yield event("content_part.done", part=content, **place)
        else:
            at, arguments = {"output_index": index, "item_id": item["id"]}, item["arguments"]
            added = item | {"arguments": "", "status": "in_progress"}
            yield event("output_item.added", output_index=index, item=added)
            yield event("function_call_arguments.delta", delta=arguments, **at)
            yield event("function_call_arguments.done", name=item["name"], arguments=arguments, **at)
        yield event("output_item.done", output_index=index, item=item)
    yield event(whole["status"], response=whole)

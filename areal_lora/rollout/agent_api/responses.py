"""``POST /v1/responses``, for the OpenAI Agents SDK: from items to turns, from an answer to items and events."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from areal_lora.rollout.agent_api import chat
from areal_lora.rollout.agent_api.refusals import refuse

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


def parse_response(body: dict[str, Any], earlier: Mapping[str, tuple[chat.Turn, ...]]) -> chat.SamplingRequest:
    """``earlier`` has the turns up to and with each response of the session. Raises AgentRequestError."""
    request = chat.converted(body, ResponsesRequest)
    before: tuple[chat.Turn, ...] = ()
    if request.prompt:
        raise refuse("prompt", "there are no stored prompts here; give instructions and input")
    if request.previous_response_id is not None:
        if request.previous_response_id not in earlier:
            raise refuse("previous_response_id", f"this key has no response {request.previous_response_id!r}")
        before = earlier[request.previous_response_id]
    system = (chat.Turn(role="system", content=request.instructions),) if request.instructions else ()
    wanted = LOGPROBS in (request.include or ())
    return chat.SamplingRequest(
        model=request.model,
        turns=system + merged([*before, *_turns(request.input)]),
        tools=[] if request.tool_choice == "none" else chat.chat_tools(request.tools),
        parallel_calls=request.parallel_tool_calls is not False,
        max_tokens=request.max_output_tokens,
        top_logprobs=(request.top_logprobs or 0) if wanted else None,
    )


def _turns(items: str | list[dict[str, Any]]) -> Iterator[chat.Turn]:
    if isinstance(items, str):
        yield chat.Turn(role="user", content=items)
        return
    for i, item in enumerate(items):
        at = f"input[{i}]"
        match item.get("type", "message"):
            case "message":
                role = str(item.get("role", "user"))
                yield chat.Turn(
                    role=chat.ROLES.get(role, role), content=chat.plain(item.get("content"), f"{at}.content")
                )
            case "function_call":
                call = chat.Call(
                    id=str(item.get("call_id", "")),
                    name=str(item.get("name", "")),
                    arguments=str(item.get("arguments", "{}")),
                )
                yield chat.Turn(role="assistant", calls=(call,))
            case "function_call_output":
                content = chat.plain(item.get("output"), f"{at}.output")
                yield chat.Turn(role="tool", content=content, call_id=str(item.get("call_id", "")))
            case "reasoning":
                pass  # this endpoint makes none
            case kind:
                raise refuse(at, f"an item of type {kind}; there are messages and function calls here")


def merged(turns: list[chat.Turn]) -> tuple[chat.Turn, ...]:
    """An assistant's message and the calls that follow it are one turn, as in a chat."""
    whole: list[chat.Turn] = []
    for turn in turns:
        last = whole[-1] if whole else None
        if turn.calls and last is not None and last.role == "assistant":
            whole[-1] = msgspec.structs.replace(last, calls=last.calls + turn.calls)
        else:
            whole.append(turn)
    return tuple(whole)


def response_body(
    answered: chat.CompletedRequest, model: str, body: Mapping[str, Any], spell: Callable[[int], str]
) -> dict[str, Any]:
    """The response object. An answer that is cut off by its length is `incomplete`, as with OpenAI."""
    reply = answered.replies[0]
    cut = reply.sampled.finish_reason == "length"
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
        "status": "incomplete" if cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "model": model,
        "output": _items(answered, "incomplete" if cut else "completed", spell),
        "parallel_tool_calls": answered.request.parallel_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
        "usage": usage,
    }


def _items(answered: chat.CompletedRequest, status: str, spell: Callable[[int], str]) -> list[dict[str, Any]]:
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
        items.append(
            {
                "id": f"fc_{call.id}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    return items


def response_events(whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed response, which has been sampled to its end."""
    started = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            part = item["content"][0]
            empty: dict[str, Any] = {"content": []}
            at["content_index"] = 0
            text, logprobs = part["text"], part["logprobs"]
            body = [
                {"type": "response.content_part.added", "part": part | {"text": "", "logprobs": []}},
                {"type": "response.output_text.delta", "delta": text, "logprobs": logprobs},
                {"type": "response.output_text.done", "text": text, "logprobs": logprobs},
                {"type": "response.content_part.done", "part": part},
            ]
        else:
            name, arguments, empty = item["name"], item["arguments"], {"arguments": ""}
            body = [
                {"type": "response.function_call_arguments.delta", "delta": arguments},
                {"type": "response.function_call_arguments.done", "name": name, "arguments": arguments},
            ]
        added = item | empty | {"status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": added})
        events += [event | at for event in body]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return [event | {"sequence_number": i} for i, event in enumerate(events)]

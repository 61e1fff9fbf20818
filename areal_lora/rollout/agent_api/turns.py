"""Messages of a conversation, as the chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_lora.rollout.agent_api.refusals import AgentRequestError, refuse

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_ROLES = {"developer": "system", "function": "tool"}


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of the model. ``arguments`` is JSON, if the model wrote JSON."""

    id: str
    name: str
    arguments: str

    def values(self) -> Any:
        """The arguments as chat templates take them: decoded; the text itself where it is no JSON."""
        try:
            return json.loads(self.arguments)
        except ValueError:
            return self.arguments


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message. ``call_id`` is that of the call that a tool's message answers."""

    role: str
    content: str = ""
    name: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str = ""

    def for_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name:
            message["name"] = self.name
        if self.calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.values()}}
                for c in self.calls
            ]
        if self.call_id:
            message["tool_call_id"] = self.call_id
        return message

    def same(self, other: Turn) -> bool:
        """Whether both are equal: ids of calls, and spaces in their arguments, do not count."""
        return self._compared() == other._compared()

    def _compared(self) -> tuple[Any, ...]:
        return self.role, self.content, self.name, [(c.name, c.values()) for c in self.calls], self.call_id


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
            role=role_of(self.role),
            content=plain(self.content, f"{at}.content"),
            name=self.name or "",
            calls=calls,
            call_id=self.tool_call_id or "",
        )


def role_of(role: str) -> str:
    return _ROLES.get(role, role)


def plain(content: Any, at: str) -> str:
    """Text of a message's content: of a text, of text parts, of nothing. Raises AgentRequestError."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refuse(at, f"a text or a list of parts, not {type(content).__name__}")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise refuse(f"{at}[{i}]", f"a part of type {kind}; this model takes text parts only")
        texts.append(text)
    return "".join(texts)


def chat_tools(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Function tools in the chat format, which templates and parsers take; also from the format of responses.

    `strict` is dropped: nothing forces the model to a schema. Raises AgentRequestError for tools of other types.
    """
    converted = []
    for i, tool in enumerate(tools or ()):
        at = f"tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise refuse(at, f"a tool of type {kind}; only functions can be called here")
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise AgentRequestError(400, f"{at}: a function needs a name", at)
        kept = {k: function[k] for k in ("name", "description", "parameters") if function.get(k) is not None}
        converted.append({"type": "function", "function": kept})
    return converted

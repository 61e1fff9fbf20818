"""Bodies of ``POST /v1/tool_calls``, for the rollout servers and their client."""

from __future__ import annotations

from typing import Any

import msgspec


class ToolCallsBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Texts of answers to requests with these ``tools``, in OpenAI's chat format."""

    parser: str
    tools: list[dict[str, Any]]
    texts: list[str]


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """``arguments`` is JSON."""

    name: str
    arguments: str


class ParsedText(msgspec.Struct, frozen=True, kw_only=True):
    """The tool calls in a text, and its content beside them."""

    content: str
    calls: list[ParsedCall] = []


class ToolCallsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    answers: list[ParsedText]

"""Tool calls beside vLLM's own server: its ``--middleware``, for evaluations of agents (``areal-lora eval``)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import AutoTokenizer

from areal_lora.config.models import Config
from areal_lora.engine.vllm_ext.tool_calls import PATH, ToolCallParsers, configured_parsers, tool_calls_handler

_prepared: list[ToolCallParsers] = []


def prepare(config: Config) -> None:
    """Build the parsers of the run; vLLM gives its middleware no arguments. Raises ConfigError."""
    _prepared.append(ToolCallParsers(AutoTokenizer.from_pretrained(config.model.folder), configured_parsers(config)))


class ToolCallsMiddleware:
    """Answers ``PATH``; everything else is for vLLM."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._handle = app, tool_calls_handler(_prepared[0])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH:
            answer = await self._handle(Request(scope, receive))
            await answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

"""Define request and answer bodies of the data plane: a subset of OpenAI's API, and extensions.

Extensions: ``return_token_ids`` and, in every choice, ``token_ids`` and ``versions`` (the adapter
version of each token, -1 for the base). ``logprobs.token_logprobs[t]`` belongs to ``token_ids[t]``; with
``return_token_ids`` and ``logprobs`` above 0, ``logprobs.top_ids[t]`` are log-probabilities by token id. ``echo`` puts
the prompt in front of all of them; its first token has the score 0 and no others. With ``max_tokens`` 0 there is the
prompt alone, which may be as long as the context.
``stop_token_ids`` end an answer like its end token, which is the last of its tokens.
``pin_version``: the whole answer comes from the version that ``model`` names, under any in-flight policy,
and the version stays for ``adapters.PINNED_S`` after it, for the next request of an evaluation.
``background``: the engine orders the request as if it had arrived ``generate.BACKGROUND_S`` later.
Unknown fields are refused: ignoring a setting silently would change the policy.

Find the tool calls in answers, with vLLM's own parsers: ``POST /v1/tool_calls``.

The controller, which has no vLLM, sends the texts of answers here. Parsing changes no token: what is trained on are the
sampled ones. Only parsers of the configuration can be requested. Beside vLLM's own server, in evaluations of agents
(``areal-lora eval``), `ToolCallsMiddleware` answers.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParser, ToolParserManager

from areal_lora.config.models import AgentWorkflowConfig, Config
from areal_lora.errors import ConfigError
from areal_lora.network.completions import ParsedCall, ParsedText, ToolCallsAnswer, ToolCallsBody
from areal_lora.network.http_server import Prompt
from areal_lora.tasks.loading import load_import_path

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Bounded: the engine gets messages that hold integers of 64 bits."""


class _Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    n: Int = 1
    max_tokens: Int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int = 0
    min_p: float = 0.0
    min_tokens: Int = 0
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] = []
    stream: bool = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    user: str | None = None
    pin_version: bool = False
    background: bool = False


class CompletionBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/completions``. ``prompt`` is a text, texts, token ids, or lists of token ids."""

    prompt: Prompt
    logprobs: Int | None = None
    echo: bool = False

    @property
    def wants_logprobs(self) -> int | None:
        return self.logprobs


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str


class ChatBody(_Body, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/chat/completions``; needs a tokenizer with a chat template."""

    messages: list[ChatMessage]
    logprobs: bool = False
    top_logprobs: Int = 0
    max_completion_tokens: Int | None = None

    @property
    def wants_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One answer, or one part of it in a stream."""

    index: int
    finish_reason: str | None
    text: str | None = None
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] | None = None
    versions: list[int] | None = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerBody(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An answer body. ``model`` is the version of the newest token."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


def error_body(status: int, message: str) -> bytes:
    kind = {400: "invalid_request_error", 404: "not_found_error"}.get(status, "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": status}})


PATH = "/v1/tool_calls"


class ToolCallParsers:
    """The parsers by name. Raises ConfigError for a name that is neither vLLM's nor that of a ToolParser class."""

    def __init__(self, tokenizer: Any, names: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._classes = {name: _parser_class(name) for name in names}

    def parse(self, body: ToolCallsBody) -> list[ParsedText]:
        """The text and the calls of each answer, in order. A text in which the parser fails has no calls.

        Raises ValueError for an unknown parser, or tools that vLLM refuses.
        """
        if body.parser not in self._classes:
            known = ", ".join(self._classes) or "none"
            raise ValueError(f"workflow.tool_parser does not name {body.parser!r}; known here: {known}")
        request = ChatCompletionRequest(messages=[], tools=body.tools, tool_choice="auto")
        return [self._parsed(self._classes[body.parser], text, request) for text in body.texts]

    def _parsed(self, parser: type[ToolParser], text: str, request: ChatCompletionRequest) -> ParsedText:
        # A parser keeps what it has seen of one answer.
        found = parser(self._tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            return ParsedText(content=text)
        calls = [ParsedCall(name=call.function.name, arguments=call.function.arguments) for call in found.tool_calls]
        return ParsedText(content=found.content or "", calls=calls)


def configured_parsers(config: Config) -> list[str]:
    """Names of the parsers that the agents of a run need."""
    workflows = [a.workflow for a in config.adapters if isinstance(a.workflow, AgentWorkflowConfig)]
    return sorted({w.tool_parser for w in workflows if w.tool_parser is not None})


def tool_calls_handler(parsers: ToolCallParsers) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    """The handler of ``PATH``."""

    async def handle(request: Request) -> Response:
        try:
            parsed = parsers.parse(msgspec.json.decode(await request.body(), type=ToolCallsBody))
        except ValueError as error:  # also msgspec's and pydantic's
            return Response(error_body(400, str(error)), status_code=400, media_type="application/json")
        return Response(msgspec.json.encode(ToolCallsAnswer(answers=parsed)), media_type="application/json")

    return handle


def _parser_class(name: str) -> type[ToolParser]:
    key = "adapters.workflow.tool_parser"
    if ":" in name:
        found: type[ToolParser] = load_import_path(name)
        if not isinstance(found, type) or not issubclass(found, ToolParser):
            raise ConfigError(key, f"{name} is no subclass of vllm.tool_parsers.ToolParser", "name such a class")
        return found
    try:
        found = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(ToolParserManager.list_registered())
        raise ConfigError(key, f"vLLM has no tool parser {name!r}", f"use one of {known}, or file.py:Class") from None
    return found


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

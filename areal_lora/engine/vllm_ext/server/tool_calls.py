"""Find the tool calls in answers, with vLLM's own parsers: ``POST /v1/tool_calls``.

The controller, which has no vLLM, sends the texts of answers here. Parsing changes no token: what is trained on are the
sampled ones. Only parsers of the configuration can be requested. Beside vLLM's own server, in evaluations of agents
(``areal-lora eval``), `ToolCallsMiddleware` answers.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParser, ToolParserManager

from areal_lora.config.models import Config, WorkerWorkflowConfig
from areal_lora.data.prompts import load_tokenizer
from areal_lora.engine.vllm_ext.server.openai_api import error_body
from areal_lora.errors import ConfigError
from areal_lora.network.http_server import ParsedCall, ParsedText, ToolCallsAnswer, ToolCallsBody
from areal_lora.processes.loading import load_import_path
from areal_lora.processes.log import get_logger
from areal_lora.types import THOUGHT_END, THOUGHT_START

PATH = "/v1/tool_calls"
KEY = "adapters.workflow.tool_parser"
FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What parsers raise about text that is no call."""
log = get_logger(__name__)


class ToolCallParsers:
    """The parsers by name.

    Raises ConfigError for a name that is neither vLLM's nor that of a ToolParser class, and with a ``tokenizer`` for a
    parser that cannot read whole answers, or lacks its tokens there.
    """

    def __init__(self, tokenizer: Any, names: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._classes = {name: _parser_class(name) for name in names}
        for name, parser in self._classes.items() if tokenizer is not None else ():
            try:
                parser(tokenizer, []).extract_tool_calls("", ChatCompletionRequest(messages=[]))
            except RuntimeError as error:
                reason = f"{name} reads no answer of this model: {type(error).__name__}: {error}"
                raise ConfigError(KEY, reason, "use the parser of the model's family") from error
        self._reported = set[tuple[type[ToolParser], type[Exception]]]()

    def parse(self, body: ToolCallsBody) -> list[ParsedText]:
        """The text and the calls of each answer, in order. A text in which the parser fails has no calls.

        vLLM's parsers expect text without thoughts: a call in a thought that starts the text is none.

        Raises ValueError for an unknown parser, or tools that vLLM refuses.
        """
        if body.parser not in self._classes:
            known = ", ".join(self._classes) or "none"
            raise ValueError(f"workflow.tool_parser does not name {body.parser!r}; known here: {known}")
        request = ChatCompletionRequest(messages=[], tools=body.tools, tool_choice="auto")
        return [self._parsed(self._classes[body.parser], text, request) for text in body.texts]

    def _parsed(self, parser: type[ToolParser], text: str, request: ChatCompletionRequest) -> ParsedText:
        thought, end, rest = "", "", text
        if text.lstrip().startswith(THOUGHT_START):  # else the mark of its end may be an argument's
            thought, end, rest = text.partition(THOUGHT_END)
        try:  # a parser keeps what it has seen of one answer
            found = parser(self._tokenizer, request.tools).extract_tool_calls(rest, request)
        except FAULTS as error:
            if (kind := (parser, type(error))) not in self._reported:
                self._reported.add(kind)
                log.warning("the tool parser %s fails: its text stays text", parser.__name__, exc_info=True)
            return ParsedText(content=text)
        if not found.tools_called:
            return ParsedText(content=text)
        read = (call.function for call in found.tool_calls)
        calls = [ParsedCall(name=_whole(function.name), arguments=_whole(function.arguments)) for function in read]
        return ParsedText(content=thought + end + (found.content or ""), calls=calls)


def _whole(text: str) -> str:
    """With a question mark for half a surrogate pair, which a parser may decode: it cannot be sent."""
    return text.encode(errors="replace").decode()


def configured_parsers(config: Config) -> list[str]:
    """Names of the parsers that the agents of a run need."""
    workflows = [a.workflow for a in config.adapters if isinstance(a.workflow, WorkerWorkflowConfig)]
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
    if ":" in name:
        found: type[ToolParser] = load_import_path(name)
        if not isinstance(found, type) or not issubclass(found, ToolParser):
            raise ConfigError(KEY, f"{name} is no subclass of vllm.tool_parsers.ToolParser", "name such a class")
        return found
    try:
        found = ToolParserManager.get_tool_parser(name)
    except KeyError:
        known = ", ".join(ToolParserManager.list_registered())
        raise ConfigError(KEY, f"vLLM has no tool parser {name!r}", f"use one of {known}, or file.py:Class") from None
    return found


_prepared: list[ToolCallParsers] = []


def prepare(config: Config) -> None:
    """Build the parsers of the run; vLLM gives its middleware no arguments. Raises ConfigError."""
    _prepared.append(ToolCallParsers(load_tokenizer(config.model.folder), configured_parsers(config)))


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

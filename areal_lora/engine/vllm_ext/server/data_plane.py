"""Serve the data plane of a rollout server: the OpenAI subset that agents and the controller use.

``POST /v1/completions``, ``POST /v1/chat/completions``, ``POST /v1/tool_calls``, ``GET /v1/models``,
``GET /health``, ``GET /metrics``. ``model`` is an adapter version ``name@vN``, an adapter ``name`` (its newest
version; the answer names it) or ``base``; any other name is a 404. A request keeps its
version resident until it ends; a client that disconnects ends its request.
"""

import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp
from transformers import PreTrainedTokenizerBase
from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from areal_lora.data.prompts import Formatter
from areal_lora.engine.vllm_ext.compat.first_runner import KEPT, SCORE_TEMPERATURE
from areal_lora.engine.vllm_ext.server import openai_api
from areal_lora.engine.vllm_ext.server.adapters import BASE, ServedAdapters
from areal_lora.engine.vllm_ext.server.generate import BACKGROUND_S, BadRequest, Generator
from areal_lora.engine.vllm_ext.server.sampling import SampledPart, Sampler
from areal_lora.engine.vllm_ext.server.tool_calls import PATH, ToolCallParsers, tool_calls_handler
from areal_lora.errors import ConfigError, PublishError, UnknownVersionError
from areal_lora.families.shape import ModelShape
from areal_lora.network.http_server import DEFAULT_MAX_TOKENS, prompts_of, too_large, unless_disconnected
from areal_lora.types import MOST_KEPT, TokenColumns

Body = openai_api.CompletionBody | openai_api.ChatBody
JSON = "application/json"
MOST_LIKELIEST = 20
"""Log-probabilities of likeliest tokens that come with each token: OpenAI's limit."""

_encode = msgspec.json.Encoder().encode


class DataPlane:
    """The routes of the data plane."""

    def __init__(
        self,
        adapters: ServedAdapters,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        sampler: Sampler,
        parsers: ToolCallParsers,
        shape: ModelShape | None = None,
    ) -> None:
        """``shape`` is that of the model if answers have the routes of its tokens."""
        self._adapters, self._generator, self._tokenizer, self._sampler = adapters, generator, tokenizer, sampler
        self._parsers, self._shape, self._formatter = parsers, shape, Formatter(tokenizer=tokenizer)
        self._ids = itertools.count()

    def app(self) -> ASGIApp:
        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route(PATH, tool_calls_handler(self._parsers), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/health", self.health),
                Route("/metrics", self.metrics),
            ],
            exception_handlers=dict.fromkeys(STATUS, _refused),
        )

    async def completions(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body(), type=openai_api.CompletionBody)
        prompts = prompts_of(body.prompt)
        _check_size(body, len(prompts))  # before anything of that size is made
        ids = [p if isinstance(p, list) else self._tokenizer.encode(p) for p in prompts]
        return await self._serve(request, body, ids, body.max_tokens)

    async def chat(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body(), type=openai_api.ChatBody)
        _check_size(body, 1)
        if not self._tokenizer.chat_template:
            raise BadRequest("this model's tokenizer has no chat template; use /v1/completions")
        try:
            text = self._formatter.chat(msgspec.to_builtins(body.messages), last=True)
        except ConfigError as error:
            raise BadRequest(f"messages: {error.reason}") from error
        if not body.ignore_eos:  # an end of turn may be another token than the model's own end of sequence
            body.stop_token_ids += self._formatter.ends
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        room = self._generator.max_model_len - len(ids)
        return await self._serve(request, body, [ids], body.max_completion_tokens or body.max_tokens or max(1, room))

    async def _serve(self, request: Request, body: Body, prompts: list[list[int]], max_tokens: int | None) -> Response:
        n_new = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        keeps = isinstance(body, openai_api.CompletionBody) and body.return_kept
        if isinstance(body, openai_api.CompletionBody):
            if body.return_columns and (body.logprobs is None or body.echo):
                raise BadRequest("return_columns needs logprobs, without echo")
            if keeps and not (body.return_columns and body.temperature > 0 and 1 <= body.top_k <= MOST_KEPT):
                reason = f"return_kept needs return_columns, a temperature above 0 and top_k from 1 to {MOST_KEPT}"
                raise BadRequest(reason)
        only_echo = n_new == 0 and isinstance(body, openai_api.CompletionBody) and body.echo
        params = _sampling(body, 1 if only_echo else n_new)  # vLLM samples at least one
        if keeps:
            params.logprobs = max(params.logprobs or 0, min(body.top_k, self._generator.vocab_size))
            params.extra_args = {KEPT: True}
        if not prompts:
            raise BadRequest("the prompt is empty")
        for ids in prompts:
            self._generator.check_prompt(ids, n_new)
        _check_size(body, len(prompts), sum(map(len, prompts)) + len(prompts) * n_new)
        if not 0 <= (body.wants_logprobs or 0) <= MOST_LIKELIEST:
            raise BadRequest(f"{body.wants_logprobs} log-probabilities of a token; 0 to {MOST_LIKELIEST}")
        if body.stream:
            return await unless_disconnected(request, self._stream(body, prompts, params))
        return await unless_disconnected(request, self._complete(body, prompts, params, only_echo))

    async def _complete(
        self, body: Body, prompts: list[list[int]], params: SamplingParams, only_echo: bool
    ) -> Response:
        answers = await self._sampler.complete(prompts, params, body.model, body.pin_version, _delay_s(body))
        for part in answers if only_echo else ():
            part.keep(0)
            part.text, part.finish_reason = "", "length"
        choices = [
            self._choice(body, prompts[i // params.n], part, part.text if body.stop else None, i)
            for i, part in enumerate(answers)
        ]
        n_prompt = sum(len(ids) for ids in prompts)
        n_out = sum(len(part.token_ids) for part in answers)
        answer = self._answer(body, answers, choices, "")
        answer.usage = openai_api.Usage(prompt_tokens=n_prompt, completion_tokens=n_out, total_tokens=n_prompt + n_out)
        return Response(_encode(answer), media_type=JSON)

    async def _stream(self, body: Body, prompts: list[list[int]], params: SamplingParams) -> Response:
        if len(prompts) != 1 or (isinstance(body, openai_api.CompletionBody) and body.echo):
            raise BadRequest("a stream takes one prompt, without echo")
        parts = self._sampler.stream(prompts[0], params, body.model, body.pin_version, _delay_s(body))
        first = await anext(parts)  # an unknown version must be a 404, what the engine refuses a 400

        def event(part: SampledPart) -> bytes:
            choice = self._choice(body, prompts[0], part, part.text, part.index)
            return b"data: " + _encode(self._answer(body, [part], [choice], ".chunk")) + b"\n\n"

        async def events() -> AsyncIterator[bytes]:
            async with aclosing(parts):
                yield event(first)
                async for part in parts:
                    yield event(part)
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def _answer(
        self, body: Body, parts: Sequence[SampledPart], choices: list[openai_api.CompletionChoice], suffix: str
    ) -> openai_api.AnswerBody:
        chat = isinstance(body, openai_api.ChatBody)
        newest = max((part.ref for part in parts if part.ref is not None), default=None)
        return openai_api.AnswerBody(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{next(self._ids)}",
            object=f"chat.completion{suffix}" if chat else "text_completion",
            created=int(time.time()),
            model=BASE if newest is None else str(newest),
            choices=choices,
        )

    def _choice(
        self, body: Body, prompt: list[int], part: SampledPart, text: str | None, index: int
    ) -> openai_api.CompletionChoice:
        """Make one choice; with ``text`` None it is decoded here."""
        ids = part.token_ids
        if text is None:
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
        choice = openai_api.CompletionChoice(index=index, finish_reason=part.finish_reason, versions=part.versions)
        if body.return_token_ids:
            choice.token_ids = ids
        if isinstance(body, openai_api.ChatBody):
            choice.logprobs = {"content": self._chat_logprobs(part)} if body.logprobs else None
            if body.stream:
                choice.delta = {"role": "assistant", "content": text}
            else:
                choice.message = {"role": "assistant", "content": text}
            return choice
        rows = part.rows() if body.logprobs or body.echo or body.return_kept else []
        values = part.values() if body.logprobs is not None else []
        if body.echo:
            text = self._tokenizer.decode(prompt, skip_special_tokens=True) + text
            if body.logprobs is not None:
                values, rows = part.prompt_logprobs + values, part.prompt_rows + rows
            if body.return_token_ids:
                choice.token_ids = [*prompt, *ids]
        choice.text = text
        kept, masses = list[list[int]](), list[float]()
        if body.return_kept:
            kept = [list(row) for row in rows]
            masses = _log_masses(rows)
            values = [value - mass for value, mass in zip(values, masses, strict=True)]
            rows = [dict(itertools.islice(row.items(), 1 + (body.logprobs or 0))) for row in rows]
        if body.return_columns:
            n_prompt = len(prompt) - body.routes_from
            routes = b"" if body.pin_version or body.stream else self._routes(part, n_prompt + len(ids))
            cut = len(routes) // (n_prompt + len(ids)) * n_prompt
            choice.columns = TokenColumns.of(ids, values, part.versions, routes[cut:], kept, masses)
            choice.prompt_routes = None if index % body.n else routes[:cut] or None
            choice.token_ids = choice.versions = None
        if body.logprobs is not None:
            choice.logprobs = {} if body.return_columns else {"token_logprobs": values}
            if body.logprobs > 0:
                decode = self._tokenizer.decode
                choice.logprobs["top_logprobs"] = [{decode([t]): value for t, value in row.items()} for row in rows]
                if body.return_token_ids:
                    choice.logprobs["top_ids"] = rows
        return choice

    def _routes(self, part: SampledPart, n_tokens: int) -> bytes:
        """[T, L, K] of the last ``n_tokens`` as `RouteShape` describes them; the last of an answer has no route."""
        if self._shape is None or part.routes is None:
            return b""
        kept = part.routes[:n_tokens, list(self._shape.sparse_layers)].astype(self._shape.routes.dtype)
        return kept.tobytes() + b"\xff" * (self._shape.routes.n_bytes * (n_tokens - len(kept)))

    def _chat_logprobs(self, part: SampledPart) -> list[dict[str, Any]]:
        decode = self._tokenizer.decode
        return [
            {
                "token": decode([token]),
                "logprob": row[token],
                "top_logprobs": [{"token": decode([t]), "logprob": value} for t, value in row.items()],
            }
            for token, row in zip(part.token_ids, part.logprobs, strict=True)
        ]

    async def models(self, request: Request) -> Response:
        names = [*([BASE] if self._adapters.has_base else []), *map(str, sorted(self._adapters.versions.active))]
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "areal_lora"} for name in names]
        return Response(_encode({"object": "list", "data": data}), media_type=JSON)

    async def health(self, request: Request) -> Response:
        await self._generator.engine.check_health()
        return Response(b'{"status":"ok"}', media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        s = self._generator.counters.stats()
        rows: dict[str, tuple[str, float]] = {
            "areal_lora_sequences_running": ("gauge", s.running),
            "areal_lora_sequences_waiting": ("gauge", s.waiting),
            "areal_lora_preemptions_total": ("counter", s.preemptions),
            "areal_lora_kv_cache_share": ("gauge", s.kv_cache_share),
            "areal_lora_adapter_versions": ("gauge", len(self._adapters.versions.active)),
            "areal_lora_requests_total": ("counter", s.requests),
            "areal_lora_sequences_aborted_total": ("counter", s.aborted),
            "areal_lora_sequences_interrupted_total": ("counter", s.interrupted),
            "areal_lora_prompt_tokens_total": ("counter", s.prompt_tokens),
            "areal_lora_cached_tokens_total": ("counter", s.cached_tokens),
            "areal_lora_generated_tokens_total": ("counter", s.generated_tokens),
            "areal_lora_recomputed_tokens_total": ("counter", s.recomputed_tokens),
            "areal_lora_up_seconds_total": ("counter", round(s.up_s, 3)),
            "areal_lora_idle_seconds_total": ("counter", round(s.idle_s, 3)),
        }
        text = "".join(f"# TYPE {name} {kind}\n{name} {value}\n" for name, (kind, value) in rows.items())
        return Response(text, media_type="text/plain; version=0.0.4")


def _log_masses(rows: Sequence[dict[int, float]]) -> list[float]:
    """[T]: the log of the sum of the probabilities of each of ``rows``."""
    sizes = np.array([len(row) for row in rows], np.int64)
    flat = np.fromiter(itertools.chain.from_iterable(row.values() for row in rows), np.float64)
    sums: list[float] = np.logaddexp.reduceat(flat, sizes.cumsum() - sizes).tolist() if rows else []
    return sums


def _check_size(body: Body, n_prompts: int, tokens: int = 0) -> None:
    if reason := too_large(n_prompts, body.n, tokens, body.wants_logprobs or 0):
        raise BadRequest(reason)


def _delay_s(body: Body) -> float:
    return BACKGROUND_S if body.background else 0.0


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "min_tokens", "seed", "stop", "stop_token_ids", "ignore_eos")
"""Settings with vLLM's names."""


def _sampling(body: Body, max_tokens: int) -> SamplingParams:
    """Raises VLLMClientError for values the engine refuses."""
    plain = body if isinstance(body, openai_api.CompletionBody) else None
    echo, structured = plain is not None and plain.echo, plain.structured_outputs if plain else None
    return SamplingParams(
        n=body.n,
        max_tokens=max_tokens,
        **{name: getattr(body, name) for name in _SAMPLING},
        logprobs=body.wants_logprobs,
        flat_logprobs=plain is not None and plain.return_columns,
        prompt_logprobs=body.wants_logprobs if echo else None,
        extra_args={SCORE_TEMPERATURE: body.temperature or 1.0} if echo else None,
        structured_outputs=None if structured is None else StructuredOutputsParams(json=structured.json),
        routed_experts_prompt_start=plain.routes_from if plain else 0,
        # Text is decoded once at the end, not token by token, unless there are stop strings to find.
        detokenize=bool(body.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


STATUS = {
    UnicodeError: 400,
    RecursionError: 400,
    UnknownVersionError: 404,
    msgspec.MsgspecError: 400,
    BadRequest: 400,
    VLLMClientError: 400,
    PublishError: 503,
    EngineDeadError: 500,  # 503: nothing has started, another server may be used
}
"""Of known errors."""


async def _refused(request: Request, error: Exception) -> Response:
    status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
    reason = str(error)
    if isinstance(error, UnicodeError | RecursionError):
        reason = f"the body cannot be read: {type(error).__name__}"
    elif isinstance(error, EngineDeadError):
        reason = f"the engine has ended: {error}"
    return Response(openai_api.error_body(status, reason), status_code=status, media_type=JSON)

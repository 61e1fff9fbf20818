"""A rollout server without a model, for tests of what talks to one.

It speaks the data plane's completions on a loopback port. Answers, delays and faults are
injected; everything it was asked is kept.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from areal_lora.types import RouteShape, TokenColumns

Answer = tuple[list[int], str]


def echo_answer(prompt: list[int], sample: int) -> Answer:
    """Two tokens that name the sample, and a text that names the prompt."""
    return [1000 + sample, 2], f"{sum(prompt)}"


def routes_of(shape: RouteShape, token_ids: list[int]) -> np.ndarray:
    """[T, L, K] of what a server has read: by token and place; the last one was sampled and not read."""
    ids, places = np.array(token_ids)[:, None], np.arange(len(token_ids))[:, None]
    rows = (7 * ids + 31 * places + np.arange(shape.layers * shape.per_token)) % shape.experts
    rows[-1] = -1
    return rows.reshape(-1, shape.layers, shape.per_token)


def no_calls(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Texts without tool calls."""
    return [{"content": text, "calls": []} for text in body["texts"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Replacement of one answer: a status, a dropped connection, or an edited body."""

    status: int = 200
    disconnect: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)
    edit: Callable[[dict[str, Any]], None] | None = None


@dataclass(slots=True, kw_only=True)
class FakeServer:
    """``async with FakeServer() as server``; then ``server.url``. Versions not in ``models`` are a 404.

    ``fault(k)`` and ``delay_s(k)`` are asked for the k-th request (from 0). ``served_as`` lets
    the server use another version than the one asked for. Without ``columns`` it ignores ``return_columns``, as stock
    vLLM. With ``routes`` its answers have routes of that shape. ``between_parts(t)`` is awaited before the t-th part of
    a stream. ``parse`` answers ``POST /v1/tool_calls``.
    """

    models: set[str] = field(default_factory=set)
    answer: Callable[[list[int], int], Answer] = echo_answer
    delay_s: Callable[[int], float] = lambda _: 0.0
    fault: Callable[[int], Fault | None] = lambda _: None
    served_as: Callable[[str], str] = lambda model: model
    parse: Callable[[dict[str, Any]], list[dict[str, Any]]] = no_calls
    columns: bool = True
    routes: RouteShape | None = None
    between_parts: Callable[[int], Awaitable[None]] = lambda _: asyncio.sleep(0)
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    port: int = 0
    open_requests: int = 0
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> FakeServer:
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/tool_calls", self._parse)
        # Handlers end with their client, as in the real server.
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        assert self._runner is not None
        await self._runner.shutdown()
        await self._runner.cleanup()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self.open_requests += 1
        try:
            return await self._serve(request)
        finally:
            self.open_requests -= 1

    async def _parse(self, request: web.Request) -> web.Response:
        return web.json_response({"answers": self.parse(await request.json())})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        await asyncio.sleep(self.delay_s(number))
        fault = self.fault(number)
        if fault is not None and fault.disconnect:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault is not None and fault.status != 200:
            return web.json_response({"error": {"message": "injected"}}, status=fault.status, headers=fault.headers)
        if body["model"] not in self.models:
            return web.json_response({"error": {"message": f"no such model {body['model']}"}}, status=404)
        reply = self._reply(body)
        if fault is not None and fault.edit is not None:
            fault.edit(reply)
        return await self._streamed(request, reply) if body.get("stream") else web.json_response(reply)

    async def _streamed(self, request: web.Request, reply: dict[str, Any]) -> web.StreamResponse:
        """One token and one letter an event; the answers' last ones have the rest and the reason."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for choice in reply["choices"]:
            made = msgspec.convert(choice["columns"], TokenColumns)
            for t, (token, value, version) in enumerate(zip(made.ids, made.scores, made.each_version, strict=True)):
                last = t + 1 == len(made)
                part = choice | {"columns": msgspec.to_builtins(TokenColumns.of([token], [value], [version]))}
                part["text"] = choice["text"][t:] if last else choice["text"][t : t + 1]
                part["finish_reason"] = choice["finish_reason"] if last else None
                if top_ids := choice["logprobs"].get("top_ids"):
                    part["logprobs"] = {"top_ids": [top_ids[t]]}
                await self.between_parts(t)
                await response.write(b"data: " + msgspec.json.encode(reply | {"choices": [part]}) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _reply(self, body: dict[str, Any]) -> dict[str, Any]:
        model = self.served_as(body["model"])
        version = int(model.rpartition("@v")[2])
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        n = body.get("n", 1)
        choices = []
        for index, (prompt, sample) in enumerate((prompt, sample) for prompt in prompts for sample in range(n)):
            token_ids, text = self.answer(prompt, sample)
            if body.get("echo"):
                token_ids = token_ids[: body["max_tokens"]]
            choice: dict[str, Any] = {
                "index": index,
                "text": text,
                "finish_reason": "stop",
                "versions": [version] * len(token_ids),
            }
            if body.get("return_token_ids"):
                choice["token_ids"] = token_ids
            if body.get("logprobs") is not None:
                scored = [-0.01 * t for t in range(len(prompt))] if body.get("echo") else []
                values = [-0.5 * (t + 1) for t in range(len(token_ids))]
                choice["logprobs"] = {"token_logprobs": [*scored, *values]}
                if body["logprobs"]:
                    choice["logprobs"]["top_ids"] = [{t: v, 65: v - 1} for t, v in zip(token_ids, values, strict=True)]
            if self.columns and body.get("return_columns"):
                made = TokenColumns.of(choice.pop("token_ids"), values, choice.pop("versions"))
                if self.routes is not None:
                    rows = routes_of(self.routes, prompt + token_ids).astype(self.routes.dtype)
                    made = made.routed(rows[len(prompt) :].tobytes())
                    if sample == 0:
                        first = body.get("routes_from", 0)
                        choice["prompt_routes"] = base64.b64encode(rows[first : len(prompt)].tobytes()).decode()
                choice["columns"] = msgspec.to_builtins(made)
                del choice["logprobs"]["token_logprobs"]
            choices.append(choice)
        return {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": model, "choices": choices}

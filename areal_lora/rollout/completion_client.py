"""HTTP client of the rollout servers' data plane: OpenAI completions with token ids.

Failures are typed (contract C8): :class:`GenerationFault` names the kind of failure and whether
a retry can succeed. This module never retries; the controller retries whole groups.
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias, TypeVar

import aiohttp
import msgspec

from areal_lora.errors import RolloutError
from areal_lora.network.http_server import LEAVING_HEADER, ParsedText, StructuredOutputs, ToolCallsAnswer, ToolCallsBody
from areal_lora.network.tls import Plane, authorization, client_context
from areal_lora.rollout.routing import Home, Router, ServerLease, VersionRetired
from areal_lora.types import AdapterRef, Cause, Generation, Outcome, TokenColumns

# Shorter than uvicorn's 5 s, so that the server never closes a connection we are about to use.
KEEP_ALIVE_S = 4.0


class FaultKind(StrEnum):
    """Reason of a retry or drop of a group; the words appear in metrics and ledger."""

    RETIRED = "version_retired"
    CONNECTION = "connection"
    SERVER_ERROR = "server_error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"
    PROTOCOL = "protocol"
    REJECTED = "rejected"
    SCORER = "scorer"
    ENVIRONMENT = "environment"
    AGENT = "agent"
    WORKFLOW = "workflow"
    LEASE = "lease_expired"
    TEACHER = "teacher"


# Faults of the transport or the server: the retry samples the same answer, with the same seed.
# Not the time of an episode, which may never end with these answers.
_UNSERVED = (FaultKind.CONNECTION, FaultKind.RETIRED, FaultKind.TEACHER)
"""A server that restarts is lost, then without the version; a teacher of others is waited for."""
_SAME_ANSWER = (*_UNSERVED, FaultKind.SERVER_ERROR, FaultKind.ABORTED, FaultKind.LEASE)
_OUTCOMES = {FaultKind.TIMEOUT: Outcome.TIMEOUT, FaultKind.ABORTED: Outcome.ABORTED}


class GenerationFault(RolloutError):
    """A rollout request gave no answer that may be trained on. ``cause`` is that of user code."""

    def __init__(self, kind: FaultKind, detail: str, cause: Cause = Cause.OTHER) -> None:
        self.kind, self.detail, self.cause = kind, detail, cause
        super().__init__(f"{kind}: {detail}")

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES.get(self.kind, Outcome.ERROR)

    @property
    def retryable(self) -> bool:
        """False where the same request would be refused again."""
        return self.kind is not FaultKind.REJECTED

    @property
    def resample(self) -> bool:
        """Whether the answer itself was at fault: a retry with the same seed would fail again."""
        return self.kind not in _SAME_ANSWER

    @property
    def unserved(self) -> bool:
        """Whether nothing has had the request yet: no server, or not what user code connects to."""
        return self.kind in _UNSERVED or self.cause is Cause.UNREACHABLE


class HandedBack(Exception):
    """The server is leaving, or has lost a conversation's version: another one has to answer. No fault."""


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``POST /v1/completions``; ``prompt`` is token ids.

    Only the ``top_k`` likeliest tokens are sampled (0: all), only those with at least ``min_p`` of the likeliest one's
    probability, and no end within ``min_tokens``. An answer that ends at one of ``stop`` has the stop's tokens, but not
    its text. ``logprobs``: so many of the likeliest tokens come with each token. The client fills in ``model`` and
    ``pin_version``. With ``return_columns`` our servers answer in columns; stock vLLM, of `areal-lora eval`, does not.
    ``return_kept``: they have the ids that were kept for each token, and log-probabilities normalised over them.
    The first ``routes_from`` tokens of the prompt come without routes.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    n: int = 1
    logprobs: int | None = None
    return_token_ids: bool = False
    return_columns: bool = False
    return_kept: bool = False
    routes_from: int = 0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    echo: bool = False
    stream: bool = False
    structured_outputs: StructuredOutputs | None = None
    model: str = ""
    pin_version: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float] = []
    top_ids: list[dict[int, float]] | None = None


class SampledChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: str | None
    text: str = ""
    token_ids: list[int] | None = None
    versions: list[int] | None = None
    logprobs: TokenLogprobs | None = None
    columns: TokenColumns | None = None
    prompt_routes: bytes = b""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a completion answer that is used; ``model`` is the ref that really answered.

    ``versions`` of a choice has the adapter version of each token.
    """

    model: str
    choices: list[SampledChoice]


encoded = msgspec.json.Encoder(enc_hook=list).encode
"""Writes an array("i") of token ids, which has 4 bytes each instead of the 36 of a list."""
_event = msgspec.json.Decoder(Completion).decode
T = TypeVar("T")
Arrived: TypeAlias = Callable[[int, Generation], None]
"""Gets the index of an answer and its next part, perhaps without tokens."""


@dataclass(slots=True)
class _PartReader:
    """A streamed completion, which ``arrived`` gets part by part. It is read once: parts cannot be taken back."""

    arrived: Arrived
    pinned: AdapterRef | None
    parts: dict[int, list[Generation]] = field(default_factory=dict)

    async def read(self, response: aiohttp.ClientResponse) -> Completion:
        rest, model = b"", ""
        async for data in response.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if event != b"data: [DONE]":
                    model = self._take(_event(event.removeprefix(b"data: ")))
        return Completion(model=model, choices=[_whole(index, parts) for index, parts in self.parts.items()])

    def _take(self, event: Completion) -> str:
        for choice in event.choices:
            part = _generation(choice, self.pinned, some=True)
            self.parts.setdefault(choice.index, []).append(part)
            self.arrived(choice.index, part)
        return event.model


def _whole(index: int, parts: Sequence[Generation]) -> SampledChoice:
    return SampledChoice(
        index=index,
        finish_reason=parts[-1].finish_reason or None,
        text="".join(part.text for part in parts),
        columns=TokenColumns.joined([part.columns for part in parts]),
        logprobs=TokenLogprobs(top_ids=[row for part in parts for row in part.top_logprobs or ()] or None),
    )


_Body: TypeAlias = CompletionRequest | ToolCallsBody
_Read: TypeAlias = Callable[[aiohttp.ClientResponse], Awaitable[T]]


def _decoded(kind: type[T]) -> _Read[T]:
    async def read(response: aiohttp.ClientResponse) -> T:
        return msgspec.json.decode(await response.read(), type=kind)

    return read


class CompletionClient:
    """One session with keep-alive to all rollout servers. Use as an async context manager.

    ``pins``: requests are answered by the version that they name, or fail; a newer version never takes over.
    ``home`` is that of the conversation whose requests these are, if they are of one.
    """

    def __init__(self, router: Router, secret: str) -> None:
        self.router, self._secret, self.pins = router, secret, False
        self.home: Home | None = None
        # An open data plane on loopback needs no key, and another process may have taken its port.
        self._plain = {"Content-Type": "application/json"}
        self._keyed = self._plain | authorization(secret, Plane.DATA)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "CompletionClient":
        context = client_context(self._secret, Plane.DATA)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=context)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._session.close()

    def pinned(self) -> "CompletionClient":
        """The same session, for evaluations; this client has been entered."""
        pinned = copy.copy(self)
        pinned.pins = True
        return pinned

    def conversation(self) -> "CompletionClient":
        """The same session, for a conversation; of one for a group of them, for a conversation of the group."""
        client = copy.copy(self)
        client.home = Home(self.home)
        return client

    def newest(self, ref: AdapterRef) -> AdapterRef:
        """The newest version that a server holds, or that of the conversation; ``ref`` if requests are pinned."""
        return ref if self.pins else self.router.newest(ref, self.home)

    async def complete(
        self, ref: AdapterRef, request: CompletionRequest, timeout_s: float, streamed: _PartReader | None = None
    ) -> tuple[AdapterRef, list[SampledChoice]]:
        """The version that answered, and the ``request.n`` answers in their order; raises GenerationFault."""
        body = msgspec.structs.replace(request, pin_version=self.pins, stream=streamed is not None)
        read = _decoded(Completion) if streamed is None else streamed.read
        completion = await self._request(ref, "/v1/completions", body, read, request.n, timeout_s)
        choices = sorted(completion.choices, key=lambda choice: choice.index)
        if [choice.index for choice in choices] != list(range(request.n)):
            raise GenerationFault(FaultKind.PROTOCOL, f"{completion.model}: {len(choices)} answers for {request.n}")
        if any(choice.finish_reason not in ("stop", "length") for choice in choices):
            raise GenerationFault(FaultKind.ABORTED, f"{completion.model}: generation was cut off")
        return _served_ref(completion, ref, exactly=self.pins), choices

    async def sample(
        self, ref: AdapterRef, request: CompletionRequest, *, timeout_s: float, arrived: Arrived | None = None
    ) -> list[Generation]:
        """``request.n`` answers with per-token logprobs, also to ``arrived`` as they come; raises GenerationFault."""
        request = msgspec.structs.replace(
            request, logprobs=request.logprobs or 0, return_token_ids=True, return_columns=True
        )
        pinned = ref if self.pins else None
        streamed = None if arrived is None else _PartReader(arrived, pinned)
        _, choices = await self.complete(ref, request, timeout_s, streamed)
        routes, n_prompt = choices[0].prompt_routes, len(request.prompt)
        answers = [_generation(choice, pinned, routes, n_prompt, request.routes_from) for choice in choices]
        if request.return_kept and not all(answer.columns.kept_counts.all() for answer in answers):
            raise GenerationFault(FaultKind.PROTOCOL, f"{ref}: tokens of a truncated distribution without its ids")
        return answers

    async def score(
        self, ref: AdapterRef, prompt_ids: list[int], answer_ids: list[int], *, temperature: float, timeout_s: float
    ) -> Generation:
        """``answer_ids`` as if they had been sampled after ``prompt_ids``; raises GenerationFault.

        Log-probabilities at ``temperature`` and versions are those of the version that the server uses.
        """
        token_ids = [*prompt_ids, *answer_ids]
        request = CompletionRequest(
            prompt=token_ids, max_tokens=1, temperature=temperature, top_p=1.0, logprobs=0, echo=True
        )
        served, (choice,) = await self.complete(ref, request, timeout_s)
        logprobs = choice.logprobs.token_logprobs if choice.logprobs else []
        if len(logprobs) != len(token_ids) + 1:
            detail = f"{len(logprobs)} log-probabilities for {len(token_ids)} scored tokens and a sampled one"
            raise GenerationFault(FaultKind.PROTOCOL, detail)
        versions = [served.version] * len(answer_ids)
        columns = TokenColumns.of(answer_ids, logprobs[len(prompt_ids) : -1], versions)
        return Generation(columns=columns, finish_reason="stop")

    async def tool_calls(self, ref: AdapterRef, request: ToolCallsBody, *, timeout_s: float) -> list[ParsedText]:
        """Content and tool calls of each text, parsed by a server that serves ``ref``; raises GenerationFault."""
        found = await self._request(ref, "/v1/tool_calls", request, _decoded(ToolCallsAnswer), 0, timeout_s)
        if len(found.answers) != len(request.texts):
            raise GenerationFault(FaultKind.PROTOCOL, f"{len(found.answers)} parsed texts for {len(request.texts)}")
        return found.answers

    async def _request(
        self, ref: AdapterRef, path: str, body: _Body, read: _Read[T], sequences: int, timeout_s: float
    ) -> T:
        """One request, and its answer as ``read`` returns it."""
        lease: ServerLease | None = None
        exactly, deadline = self.pins or self.home is None, asyncio.get_running_loop().time() + timeout_s
        try:
            while True:
                with contextlib.suppress(HandedBack):
                    async with (
                        asyncio.timeout_at(deadline) as clock,
                        self.router.lease(ref, sequences, clock, self.home, exactly=exactly) as lease,
                    ):
                        if isinstance(body, CompletionRequest):
                            body = msgspec.structs.replace(body, model=str(lease.ref))
                        return await self._exchange(lease, path, [encoded(body)], read)
                lease = None
        except TimeoutError:
            if lease is not None and lease.server.lost:
                raise GenerationFault(FaultKind.CONNECTION, f"{lease.server.url}: excluded by the trainer") from None
            if lease is None:
                raise GenerationFault(FaultKind.CONNECTION, f"no server was available within {timeout_s:g} s") from None
            # A long answer is no sign of a bad server; the trainer's pings find one that hangs.
            raise GenerationFault(FaultKind.TIMEOUT, f"no answer within {timeout_s:g} s") from None
        except VersionRetired as error:
            raise GenerationFault(FaultKind.RETIRED, str(error)) from None
        except msgspec.DecodeError as error:
            detail = f"{lease.server.url if lease else ref}: {path} returned another body: {error}"
            raise GenerationFault(FaultKind.PROTOCOL, detail) from None

    async def _exchange(self, lease: ServerLease, path: str, body: list[bytes], read: _Read[T]) -> T:
        """Takes what it sends out of ``body``."""
        server, started = lease.server, False
        headers = dict(self._keyed if server.url.startswith("https:") else self._plain)
        headers["Content-Length"] = str(len(body[0]))  # else in chunks, of which the last is a write more
        try:
            async with self._session.post(f"{server.url}{path}", data=_sent_once(body), headers=headers) as response:
                if response.status == 200:
                    started = response.content_type == "text/event-stream"
                    answer = await read(response)
                    lease.outcome = "succeeded"
                    return answer
                payload = await response.read()
        except aiohttp.ClientError as error:
            if server.leaving and not started:
                raise HandedBack from error
            lease.outcome = "failed"
            raise GenerationFault(FaultKind.CONNECTION, f"{server.url}: {error}") from error
        if LEAVING_HEADER in response.headers:
            lease.outcome = "left"
            raise HandedBack
        detail = f"{server.url}: HTTP {response.status}: {payload[:200].decode(errors='replace')}"
        if response.status == 404:
            lease.outcome = "retired"
            if self.home is not None:
                raise HandedBack
            raise GenerationFault(FaultKind.RETIRED, detail)
        if response.status >= 500 or response.status == 429:
            lease.outcome = "failed"
            raise GenerationFault(FaultKind.SERVER_ERROR, detail)
        raise GenerationFault(FaultKind.REJECTED, detail)


async def _sent_once(body: list[bytes]) -> AsyncIterator[bytes]:
    """Give ``body`` away as it is sent: the connection would keep bytes until the answer."""
    yield body.pop()


def _served_ref(completion: Completion, requested: AdapterRef, *, exactly: bool) -> AdapterRef:
    """The version that the server reports: unless ``exactly`` another than ``requested``, of the same adapter."""
    try:
        ref = AdapterRef.parse(completion.model)
    except ValueError as error:
        raise GenerationFault(FaultKind.PROTOCOL, str(error)) from None
    if ref.name != requested.name or (exactly and ref != requested):
        raise GenerationFault(FaultKind.PROTOCOL, f"requested {requested}, answered by {ref}")
    return ref


def _generation(
    choice: SampledChoice, pinned: AdapterRef | None, routes: bytes = b"", n: int = 0, at: int = 0, some: bool = False
) -> Generation:
    """Tokens carry the version that the server reports (contract C2), and where it returns them their routes.

    ``routes`` are those of the ``n`` tokens of the prompt from ``at`` on. With ``some`` there may be no tokens.
    """
    none = some and not choice.columns and not choice.token_ids
    columns = TokenColumns.unsampled([]) if none else choice.columns or _columns(choice, pinned)
    if not some and not len(columns):
        raise GenerationFault(FaultKind.PROTOCOL, f"answer {choice.index} has no tokens")
    if columns.runs[:, 0].min(initial=0) < 0 or not (abs(columns.scores) < float("inf")).all():
        what = "tokens of the base model, or log-probabilities that are not finite"
        raise GenerationFault(FaultKind.PROTOCOL, f"answer {choice.index} has {what}")
    if len(routes) * len(columns) != len(columns.routes) * (n - at):
        raise GenerationFault(FaultKind.PROTOCOL, f"answer {choice.index} has routes for a part of its tokens")
    return Generation(
        columns=columns,
        finish_reason=choice.finish_reason or "",
        text=choice.text,
        top_logprobs=choice.logprobs.top_ids if choice.logprobs else None,
        prompt_routes=routes,
        routes_from=at,
    )


def _columns(choice: SampledChoice, pinned: AdapterRef | None) -> TokenColumns:
    """Of an answer in lists. Stock vLLM reports no versions: its tokens are of the ``pinned`` one."""
    versions = choice.versions
    if versions is None and pinned is not None:
        versions = [pinned.version] * len(choice.token_ids or ())
    if not choice.token_ids or choice.logprobs is None or versions is None:
        raise GenerationFault(FaultKind.PROTOCOL, f"answer {choice.index} lacks token ids, logprobs or versions")
    try:
        return TokenColumns.of(choice.token_ids, choice.logprobs.token_logprobs, versions)
    except (ValueError, OverflowError) as error:
        raise GenerationFault(FaultKind.PROTOCOL, f"answer {choice.index}: {error}") from None

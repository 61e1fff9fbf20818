"""HTTP client of the rollout servers' data plane: OpenAI completions with token ids.

Failures are typed (contract C8): :class:`GenerationFault` names the kind of failure and whether
a retry can succeed. This module never retries; the controller retries whole groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import aiohttp
import msgspec

from areal_lora.errors import RolloutError
from areal_lora.network.keys import Plane, authorization
from areal_lora.network.tls import client_context
from areal_lora.rollout.routing import Router, Server, VersionRetired
from areal_lora.types import AdapterRef, Generation, Outcome

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


_OUTCOMES = {FaultKind.TIMEOUT: Outcome.TIMEOUT, FaultKind.ABORTED: Outcome.ABORTED}


class GenerationFault(RolloutError):
    """A rollout request did not give an answer that may be trained on."""

    def __init__(self, kind: FaultKind, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")

    @property
    def outcome(self) -> Outcome:
        return _OUTCOMES.get(self.kind, Outcome.ERROR)

    @property
    def retryable(self) -> bool:
        """False where the same request would be refused again."""
        return self.kind is not FaultKind.REJECTED


class CompletionRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of ``POST /v1/completions``; ``prompt`` is one prompt's token ids, or those of several."""

    model: str
    prompt: list[int] | list[list[int]]
    max_tokens: int
    temperature: float
    top_p: float
    n: int = 1
    logprobs: int | None = None
    return_token_ids: bool = False
    seed: int | None = None
    stop: list[str] | None = None
    ignore_eos: bool = False
    pin_version: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True):
    token_logprobs: list[float]


class SampledChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    finish_reason: str | None
    text: str = ""
    token_ids: list[int] | None = None
    versions: list[int] | None = None
    logprobs: TokenLogprobs | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a completion answer that is used; ``model`` is the ref that was really asked.

    ``versions`` of a choice has the adapter version of each token.
    """

    model: str
    choices: list[SampledChoice]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Completion).decode


class CompletionClient:
    """One session with keep-alive to all rollout servers. Use as an async context manager."""

    def __init__(self, router: Router, secret: str) -> None:
        self.router, self._secret = router, secret
        # An open data plane on loopback needs no key, and another process may have taken its port.
        self._plain = {"Content-Type": "application/json"}
        self._keyed = self._plain | authorization(secret, Plane.DATA)
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> CompletionClient:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=client_context(self._secret, Plane.DATA)
        )
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._session.close()

    async def sample(
        self,
        ref: AdapterRef,
        token_ids: list[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        timeout_s: float,
        stop: list[str] | None = None,
        ignore_eos: bool = False,
    ) -> list[Generation]:
        """``n`` sampled answers with per-token logprobs; raises GenerationFault.

        An answer that ends at one of ``stop`` has the stop's tokens, but not its text.
        """
        request = CompletionRequest(
            model=str(ref),
            prompt=token_ids,
            n=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            logprobs=0,
            return_token_ids=True,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        completion = await self._post(ref, request, n, timeout_s)
        _served_ref(completion, ref)
        return [_generation(choice) for choice in completion.choices]

    async def greedy(
        self, ref: AdapterRef, prompts: Sequence[list[int]], *, max_tokens: int, timeout_s: float
    ) -> list[str]:
        """The greedy answer text of every prompt, in order; raises GenerationFault."""
        request = CompletionRequest(
            model=str(ref), prompt=list(prompts), max_tokens=max_tokens, temperature=0.0, top_p=1.0, pin_version=True
        )
        completion = await self._post(ref, request, len(prompts), timeout_s)
        if _served_ref(completion, ref) != ref:
            raise GenerationFault(FaultKind.PROTOCOL, f"asked for {ref}, answered by {completion.model}")
        return [choice.text for choice in completion.choices]

    async def _post(self, ref: AdapterRef, request: CompletionRequest, sequences: int, timeout_s: float) -> Completion:
        """One request to the least loaded server; choices are returned complete and ordered by index."""
        server: Server | None = None
        try:
            async with asyncio.timeout(timeout_s) as clock, self.router.lease(ref, sequences, clock) as server:
                payload = await self._exchange(server, ref, _encode(request))
        except TimeoutError:
            if server is not None and server.lost:
                raise GenerationFault(FaultKind.CONNECTION, f"{server.url}: excluded by the trainer") from None
            if server is None:
                detail = f"no server could be asked within {timeout_s:g} s"
                raise GenerationFault(FaultKind.CONNECTION, detail) from None
            self.router.failed(server)
            raise GenerationFault(FaultKind.TIMEOUT, f"no answer within {timeout_s:g} s") from None
        except VersionRetired as error:
            raise GenerationFault(FaultKind.RETIRED, str(error)) from None
        try:
            completion = _decode(payload)
        except msgspec.DecodeError as error:
            raise GenerationFault(FaultKind.PROTOCOL, f"{server.url}: answer is not a completion: {error}") from None
        completion.choices.sort(key=lambda choice: choice.index)
        if [choice.index for choice in completion.choices] != list(range(sequences)):
            raise GenerationFault(
                FaultKind.PROTOCOL, f"{server.url}: {len(completion.choices)} answers for {sequences} asked"
            )
        if any(choice.finish_reason not in ("stop", "length") for choice in completion.choices):
            raise GenerationFault(FaultKind.ABORTED, f"{server.url}: generation was cut off")
        return completion

    async def _exchange(self, server: Server, ref: AdapterRef, body: bytes) -> bytes:
        headers = self._keyed if server.url.startswith("https:") else self._plain
        try:
            async with self._session.post(f"{server.url}/v1/completions", data=body, headers=headers) as response:
                payload = await response.read()
        except aiohttp.ClientError as error:
            self.router.failed(server)
            raise GenerationFault(FaultKind.CONNECTION, f"{server.url}: {error}") from error
        if response.status == 200:
            self.router.succeeded(server)
            return payload
        detail = f"{server.url}: HTTP {response.status}: {payload[:200].decode(errors='replace')}"
        if response.status == 404:
            self.router.retired(server, ref)
            raise GenerationFault(FaultKind.RETIRED, detail)
        if response.status >= 500 or response.status == 429:
            self.router.failed(server)
            raise GenerationFault(FaultKind.SERVER_ERROR, detail)
        raise GenerationFault(FaultKind.REJECTED, detail)


def _served_ref(completion: Completion, asked: AdapterRef) -> AdapterRef:
    """The version that the server reports: it may differ from the requested one, the adapter may not."""
    try:
        ref = AdapterRef.parse(completion.model)
    except ValueError as error:
        raise GenerationFault(FaultKind.PROTOCOL, str(error)) from None
    if ref.name != asked.name:
        raise GenerationFault(FaultKind.PROTOCOL, f"asked for {asked}, answered by {ref}")
    return ref


def _generation(choice: SampledChoice) -> Generation:
    """Tokens carry the version that the server reports (contract C2)."""
    if not choice.token_ids or choice.logprobs is None or choice.versions is None:
        raise GenerationFault(FaultKind.PROTOCOL, f"answer {choice.index} lacks token ids, logprobs or versions")
    logprobs, versions = choice.logprobs.token_logprobs, choice.versions
    lengths = (len(choice.token_ids), len(logprobs), len(versions))
    if len(set(lengths)) != 1:
        raise GenerationFault(
            FaultKind.PROTOCOL, f"answer {choice.index}: lengths of tokens, logprobs and versions differ: {lengths}"
        )
    if min(versions) < 0:
        raise GenerationFault(FaultKind.PROTOCOL, f"answer {choice.index} was sampled from the base model")
    return Generation(
        token_ids=choice.token_ids,
        logprobs=logprobs,
        versions=versions,
        finish_reason=choice.finish_reason or "",
        text=choice.text,
    )

"""Run prompts on the engine: sampling, scoring, cutting and counting.

Log-probabilities are log softmax(logits / temperature), before top-p and top-k (`compat.model_runner`); of a
greedy request, of the plain logits.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from areal_lora.engine.vllm_ext.compat.engine import EngineLoad
from areal_lora.engine.vllm_ext.compat.first_runner import SCORE_TEMPERATURE
from areal_lora.engine.vllm_ext.server.adapters import VersionLease
from areal_lora.processes.log import get_logger
from areal_lora.processes.watched import reached
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import ServerStats

CUT = "abort"  # vLLM's finish reason of a request that was ended from outside
PROBE, ROLLOUT = -1, 0
"""Priorities; the lower one starts first. A probe is a few dozen tokens, and its publish waits for them: behind an
evaluation's burst of prompts it would wait for the whole burst.
"""
BACKGROUND_S = 30.0
"""Training rollouts come before tenants' requests that arrived up to so much earlier: none waits without a bound."""
FOLLOW_S = 0.25  # until a sequence that was cut requests its rest; the reader of a stream may be slow

log = get_logger(__name__)


class BadRequest(ValueError):
    """The request is invalid and would fail again: status 400."""


@dataclass(slots=True)
class RequestCounters:
    """Count for ``/metrics`` and ``/admin/info``; vLLM's own statistics cost time at every step."""

    clock: Callable[[], float] = time.monotonic
    in_flight: int = 0  # sequences
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ended_prompt_tokens: int = 0  # of engine requests that have ended: those that `cached_tokens` is a part of
    generated_tokens: int = 0
    aborted: int = 0
    interrupted: int = 0
    recomputed_tokens: int = 0
    kv_cache_share: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    began_s: float = field(init=False)
    _idle_s: float = 0.0  # not counting the idle time that lasts
    _idle_since_s: float = field(init=False)
    _preempted: dict[str, int] = field(default_factory=dict)
    _marks: tuple[float, ...] = (0.0, 0, 0, 0)

    def __post_init__(self) -> None:
        self.began_s = self._idle_since_s = self.clock()

    def start(self, sequences: int) -> None:
        if not self.in_flight:
            self._idle_s += self.clock() - self._idle_since_s
        self.in_flight += sequences

    def end(self, sequences: int) -> None:
        self.in_flight -= sequences
        if not self.in_flight:
            self._idle_since_s = self.clock()

    def take(self, load: EngineLoad) -> None:
        """Preemptions of a sequence since the load before are missed if it has ended."""
        self.kv_cache_share, self.running, self.waiting, preempted = load
        self.preemptions += sum(n - self._preempted.get(name, 0) for name, n in preempted.items())
        self._preempted = preempted

    def stats(self) -> ServerStats:
        now = self.clock()
        return ServerStats(
            up_s=now - self.began_s,
            idle_s=self._idle_s + (0.0 if self.in_flight else now - self._idle_since_s),
            **{name: getattr(self, name) for name in COUNTS},
        )

    def figures(self) -> dict[str, float]:
        """Of `obs.machine`. Callable from any one thread: rates are since the call before."""
        found = self.stats()
        marks = found.up_s, found.preemptions, found.cached_tokens, self.ended_prompt_tokens
        seconds, preempted, cached, ended = (now - before for now, before in zip(marks, self._marks, strict=True))
        self._marks = marks
        figures = {
            "sequences_running": found.running,
            "sequences_waiting": found.waiting,
            "preemptions_per_s": preempted / max(1.0, seconds),
            "kv_cache_share": found.kv_cache_share,
        }
        return figures | ({"prefix_cache_share": cached / ended} if ended else {})


COUNTS = [field.name for field in fields(RequestCounters) if field.name in ServerStats.__struct_fields__]


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """One request to the engine, which calls it ``engine_id``. ``finished``: the engine has given its last output.
    ``enough``: the answer is complete and the reader has stopped.

    ``priority`` and then ``arrived_s`` (``time.time``) order the engine's queue. ``follows`` is the request
    that was cut and that this one continues. ``place_free`` is set when the continuation is in the engine's queue,
    or when no continuation will come. ``changes`` are versions (None: the base) with the number of the first token
    that each sampled, and ``read`` tokens have been read. Those of one that is ``void`` are dropped.
    """

    request_id: str
    lease: VersionLease
    arrived_s: float
    engine_id: str = ""
    follows: EngineRequest | None = None
    priority: int = ROLLOUT
    cut: bool = False
    finished: bool = False
    enough: bool = False
    void: bool = False
    changes: list[tuple[int, AdapterRef | None]]
    read: int = 0
    place_free: asyncio.Event = field(default_factory=asyncio.Event)

    def read_next(self, n: int) -> list[AdapterRef | None]:
        """Read ``n`` tokens and return their versions."""
        first, self.read = self.read, self.read + n
        ends = [start for start, _ in self.changes[1:]] + [self.read]
        runs = zip(self.changes, ends, strict=True)
        return [ref for (start, ref), end in runs for _ in range(max(start, first), min(end, self.read))]


@dataclass(slots=True)
class Generator:
    """Run single prompts on the engine."""

    engine: AsyncLLM
    max_model_len: int
    vocab_size: int
    counters: RequestCounters
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def check_prompt(self, token_ids: Sequence[int], max_tokens: int) -> None:
        """Raises BadRequest."""
        if not token_ids:
            raise BadRequest("the prompt is empty")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise BadRequest(f"prompt token ids must lie in 0..{self.vocab_size - 1}")
        if len(token_ids) + max_tokens > self.max_model_len:
            raise BadRequest(
                f"{len(token_ids)} prompt tokens and max_tokens {max_tokens} exceed the context of {self.max_model_len}"
            )

    async def stream(
        self, token_ids: list[int], params: SamplingParams, lease: VersionLease, request: EngineRequest | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield all outputs of one prompt. Closing the iterator aborts the request in the engine."""
        counters, n, request = self.counters, params.n, request or self.new_request(lease)
        counters.start(n)
        queue = None
        try:
            try:
                queue = await self.engine.add_request(
                    request.request_id,
                    {"prompt_token_ids": token_ids},
                    params,
                    lora_request=lease.lora,
                    arrival_time=request.arrived_s,
                    priority=request.priority,
                )
                request.engine_id = queue.request_id
            finally:
                if request.follows is not None:
                    request.follows.place_free.set()
                    request.follows = None
            if params.prompt_logprobs is None:  # not the probe's scores
                reached("server.generating")
            if request.cut:  # while the engine did not know the request yet
                await self.engine.abort(request.request_id)
            while not request.finished:
                output = queue.get_nowait() or await queue.get()
                assert isinstance(output, RequestOutput)
                request.finished = output.finished
                counters.generated_tokens += sum(len(c.token_ids) for c in output.outputs)
                if request.finished:
                    counters.cached_tokens += output.num_cached_tokens or 0
                    counters.ended_prompt_tokens += len(token_ids)
                yield output
        finally:
            counters.end(n)
            if not request.finished:
                counters.aborted += 0 if request.enough else n
                if not self.engine.errored and queue is not None:
                    await self.engine.abort(queue.request_id, internal=True)
                elif not self.engine.errored:
                    # Cut off while it was handed over: the engine may know it, under an id that is not known here.
                    await self.engine.abort(request.request_id)

    def new_request(
        self,
        lease: VersionLease,
        arrived_s: float | None = None,
        follows: EngineRequest | None = None,
        priority: int = ROLLOUT,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=f"{lease.name}-{next(self._ids)}",
            lease=lease,
            changes=[(0, lease.ref)],
            follows=follows,
            priority=priority,
            arrived_s=time.time() if arrived_s is None else arrived_s,
        )

    async def cut(self, requests: Sequence[EngineRequest]) -> None:
        """End requests now; each gets a last output with finish reason ``CUT`` and the tokens so far.

        The engine frees their places only after the continuations are queued: else waiting requests would take them.
        """
        for request in requests:
            request.cut = True
        ended = self.engine.output_processor.abort_requests([request.request_id for request in requests], False)
        try:
            async with asyncio.timeout(FOLLOW_S):
                for request in requests:
                    await request.place_free.wait()
        except TimeoutError:
            log.warning("%d sequences that were cut did not continue within %g s", len(requests), FOLLOW_S)
        finally:
            await self.engine.engine_core.abort_requests_async(ended)

    def routes(self, request: EngineRequest) -> np.ndarray | None:
        """What the engine has returned so far of the routes of ``request``, which runs; None without any."""
        processor = self.engine.output_processor
        (name,) = processor.external_req_ids[request.request_id]
        chunks = processor.request_states[name].routed_experts_chunks
        return np.concatenate(chunks) if chunks else None

    async def final(
        self, token_ids: list[int], params: SamplingParams, lease: VersionLease, request: EngineRequest | None = None
    ) -> RequestOutput:
        """Return the finished output of one prompt; ``params.output_kind`` must be FINAL_ONLY."""
        async with aclosing(self.stream(token_ids, params, lease, request)) as outputs:
            async for output in outputs:
                if output.finished:
                    return output
        raise RuntimeError(f"the engine ended a request on {lease.name} without an output")

    async def score(self, token_ids: list[int], lease: VersionLease, temperature: float = 1.0) -> list[float]:
        """Return the log-probability of every token given those before it, at ``temperature``; entry 0 is 0.0. [T]

        Starts before all waiting requests of the data plane.
        """
        self.check_prompt(token_ids, 1)
        if not temperature > 0:
            raise BadRequest(f"temperature {temperature:g} is not above 0")
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={SCORE_TEMPERATURE: temperature},
        )
        request = self.new_request(lease, priority=PROBE)
        return prompt_logprobs(await self.final(token_ids, params, lease, request))


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """[T], entry 0 is 0.0."""
    ids, table = output.prompt_token_ids, output.prompt_logprobs
    if ids is None or table is None:
        raise RuntimeError("the engine returned no prompt log-probabilities")
    return [0.0] + [entry[token].logprob for token, entry in zip(ids[1:], table[1:], strict=True) if entry is not None]


def prompt_rows(output: RequestOutput) -> list[dict[int, float]]:
    """[T], entry 0 is empty; the others are log-probabilities by token id, the prompt's own token among them."""
    rows = output.prompt_logprobs or []
    return [{} if row is None else {token: scored.logprob for token, scored in row.items()} for row in rows]

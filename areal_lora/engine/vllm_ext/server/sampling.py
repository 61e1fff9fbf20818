"""Sample sequences under the run's in-flight policy (contract C2).

``finish``: a request runs on one version from beginning to end. ``interrupt``: when a newer version of its adapter
becomes active, the server cuts every sequence and continues it on that version::

    prompt ------ v3: t0 .. t41 | prompt t0 .. t41 ------ v4: t42 .. t90 | ... ------> one answer, versions per token

The continuation is a new request of the engine, in the place of the first one: the engine reads the tokens so far
again under the new version, the limit is the remaining one, and random numbers come from (seed, tokens so far).

``keep`` (PipelineRL, arXiv 2509.19128): between two steps of the engine every sequence changes to the new version and
keeps its KV cache; nothing is computed again. The distribution of a token after the change depends on keys and values
that older versions computed: no version alone has its log-probability. The engine's process decides which token is the
first of the new version (`compat.engine.follow_version`). A sequence without a token starts again under the new
version, so that a token is of one version unless another one is before it in its answer.

Requests that are pinned, that score their prompt, that follow a grammar or that name the base stay on their version.

Merged rollouts always interrupt: a server has one version (`gate.Gate`). There the sequences are cut before the new
version is written, and continue as soon as it is.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from vllm import CompletionOutput, RequestOutput, SamplingParams
from vllm.logprobs import FlatLogprobs, SampleLogprobs
from vllm.sampling_params import RequestOutputKind

from areal_lora.config.sections.run import InFlight
from areal_lora.engine.vllm_ext.compat.engine import WHOLE
from areal_lora.engine.vllm_ext.server.adapters import BASE, ServedAdapters, VersionLease
from areal_lora.engine.vllm_ext.server.generate import CUT, EngineRequest, Generator, prompt_logprobs, prompt_rows
from areal_lora.errors import UnknownVersionError
from areal_lora.types import AdapterRef

CONTEXT = 6  # prompt tokens that decide how the first token of the answer is decoded
PENDING = 4  # largest number of tokens of one character


class AnswerText:
    """Decode token by token; ``text`` lacks only a last character whose bytes are incomplete."""

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, stop
        self._ids = list(prompt[-CONTEXT:])
        self._seen, self._read = 0, len(self._ids)  # of _ids; text comes from what the tokens after _read add
        self._hold = max((len(s) for s in stop), default=1) - 1
        self._given = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> bool:
        """Add a token and return whether it completes a stop string; ``text`` then ends before the string."""
        self._ids.append(token)
        before, now = self._decode(self._ids[self._seen : self._read]), self._decode(self._ids[self._seen :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and len(self._ids) - self._read < PENDING:
            return False
        start = len(self.text)
        self.text += now[len(before) :]
        self._seen, self._read = self._read, len(self._ids)
        if cut := [(at + len(s), at) for s in self._stop if (at := self.text.find(s, max(0, start - len(s) + 1))) >= 0]:
            self.text, self.stopped = self.text[: min(cut)[1]], True
        return self.stopped

    def take(self, finished: bool) -> str:
        """Return the text since the last call, without a possible beginning of a stop string."""
        end = len(self.text) if finished else max(self._given, len(self.text) - self._hold)
        piece, self._given = self.text[self._given : end], max(self._given, end)
        return piece


T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class SampledPart:
    """A sampled sequence, or the next part of one. Per-token lists have one entry per token id.

    ``logprobs`` are those of the sampled token, then from the likeliest on; empty unless requested. `FlatLogprobs` of
    answers as columns: objects would take 450 bytes a token, and the collector's time. Others are rows as in ``rows``.
    ``prompt_rows[t]`` maps ids to log-probabilities for token t of the prompt.
    ``routes`` [P + tokens - 1 or more, all layers, K] are the experts of prompt and answer, of the engine's request.
    ``ref`` is the version of the last token (None: the base). ``text`` is set only for streams and stop strings.
    """

    index: int
    ref: AdapterRef | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | FlatLogprobs = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_rows: list[dict[int, float]] = field(default_factory=list)
    routes: np.ndarray | None = None
    text: str = ""
    finish_reason: str | None = None

    def keep(self, n: int) -> None:
        """Drop all but the first ``n`` tokens."""
        del self.token_ids[n:], self.versions[n:]
        self.logprobs = self.logprobs[:n]

    def values(self) -> list[float]:
        """[T]: the log-probability of each token."""
        if isinstance(self.logprobs, FlatLogprobs):
            return [self.logprobs.logprobs[at] for at in self.logprobs.start_indices]
        return [row[token] for token, row in zip(self.token_ids, self.logprobs, strict=True)]

    def rows(self) -> list[dict[int, float]]:
        """[T]: log-probabilities by token id, first the sampled token's."""
        if not isinstance(found := self.logprobs, FlatLogprobs):
            return found
        ids, values = found.token_ids, found.logprobs
        return [
            dict(zip(ids[a:b], values[a:b], strict=True))
            for a, b in zip(found.start_indices, found.end_indices, strict=True)
        ]


class Sampler:
    """Run the data plane's requests. ``decode`` turns token ids into text."""

    def __init__(
        self, generator: Generator, adapters: ServedAdapters, decode: Callable[[list[int]], str], in_flight: InFlight
    ) -> None:
        self._generator, self._adapters, self._decode = generator, adapters, decode
        self._changes, self._keeps = in_flight != "finish", in_flight == "keep"
        self._running: set[EngineRequest] = set()
        self._settled = asyncio.Event()  # cleared while it is not known which tokens are of the new version
        self._settled.set()
        if self._changes:
            adapters.interrupt, adapters.switch = self._cut, self._keep if self._keeps else self._cut

    async def complete(
        self, prompts: Sequence[list[int]], params: SamplingParams, model: str, pinned: bool, delay_s: float = 0.0
    ) -> list[SampledPart]:
        """Return ``params.n`` answers to every prompt, in order. Raises UnknownVersionError.

        The engine orders the sequences as if they arrived ``delay_s`` seconds from now.
        """
        self._count(prompts)
        arrived_s = time.time() + delay_s
        if self._cuttable(params, model, pinned):
            await self.check(model, pinned)
            ways = [_nth(params, k) for k in range(params.n)]
            return await all_of(
                [self._whole(ids, way, k, model, arrived_s) for ids in prompts for k, way in enumerate(ways)]
            )
        if not params.detokenize:  # else the server's process must read every token, to find stop strings
            params.extra_args = (params.extra_args or {}) | {WHOLE: True}
        await self._adapters.gate.opened()
        newer = self._changes and not pinned and params.prompt_logprobs is None
        with self._adapters.lease(model, pinned=pinned, or_newer=newer) as lease:
            outputs = await all_of(
                [
                    self._generator.final(ids, params.clone(), lease, self._generator.new_request(lease, arrived_s))
                    for ids in prompts
                ]
            )
        return [_part(output, sample, lease) for output in outputs for sample in output.outputs]

    async def stream(
        self, ids: list[int], params: SamplingParams, model: str, pinned: bool, delay_s: float = 0.0
    ) -> AsyncGenerator[SampledPart, None]:
        """Yield the parts of ``params.n`` answers as they arrive. Close it. Raises UnknownVersionError."""
        self._count([ids])
        arrived_s = time.time() + delay_s
        params.output_kind, params.detokenize = RequestOutputKind.DELTA, True
        if self._cuttable(params, model, pinned):
            sequences = [self._sequence(ids, _nth(params, k), k, model, arrived_s) for k in range(params.n)]
            async with aclosing(_merged(sequences)) as parts:
                async for part in parts:
                    yield part
            return
        await self._adapters.gate.opened()
        newer = self._changes and not pinned and params.prompt_logprobs is None
        with self._adapters.lease(model, pinned=pinned, or_newer=newer) as lease:
            request = self._generator.new_request(lease, arrived_s)
            async with aclosing(self._generator.stream(ids, params, lease, request)) as outputs:
                async for output in outputs:
                    for sample in output.outputs:
                        yield _part(output, sample, lease)

    async def check(self, model: str, pinned: bool) -> None:
        """Raise UnknownVersionError if a request for ``model`` would."""
        await self._adapters.gate.opened()
        with self._adapters.lease(model, or_newer=self._changes and not pinned):
            pass

    def _cuttable(self, params: SamplingParams, model: str, pinned: bool) -> bool:
        whole = params.prompt_logprobs is not None or params.structured_outputs is not None
        return self._changes and not pinned and model != BASE and not whole

    def _count(self, prompts: Sequence[list[int]]) -> None:
        self._generator.counters.requests += len(prompts)
        self._generator.counters.prompt_tokens += sum(map(len, prompts))

    # ------------------------------------------------------------ interrupt, keep

    def _on_others(self, ref: AdapterRef) -> list[EngineRequest]:
        """Sequences on other versions of the adapter, also on a lost one that had the name of ``ref``. Those of a
        dropped adapter that had its name end as they are."""
        versions = self._adapters.versions
        incarnation = versions.incarnations.get(ref.name)
        mine = ((t, t.lease.ref) for t in self._running if t.lease.incarnation == incarnation)
        return [t for t, on in mine if on and on.name == ref.name and (on != ref or t.lease.resident in versions.left)]

    async def _cut(self, ref: AdapterRef) -> None:
        """Cut all sequences on other versions of the adapter; ``_sequence`` continues them on the newest.

        It ends those on a lost version: an error.
        """
        await self._generator.cut(self._on_others(ref))

    async def _keep(self, ref: AdapterRef) -> None:
        """Have all sequences of the adapter continue on ``ref`` with their KV caches.

        Cut those without a token, and those that do not follow it: versions were lost since they started.
        """
        cut: list[EngineRequest] = []
        self._settled.clear()
        sent = {request for request in self._running if request.engine_id}  # before the change
        try:
            known = await self._adapters.follow(ref)
            for request in self._on_others(ref):
                sampled, computed = known.get(request.engine_id, (0, 0))
                if not request.lease.follows:
                    cut.append(request)
                elif sampled:
                    request.lease.move(self._adapters.versions, ref)
                    request.changes.append((sampled, ref))
                elif request.engine_id in known or request not in sent:  # others have ended
                    request.void = True
                    self._generator.counters.recomputed_tokens += computed
                    cut.append(request)
        finally:
            self._settled.set()
        await self._generator.cut(cut)

    async def _whole(
        self, ids: list[int], params: SamplingParams, index: int, model: str, arrived_s: float
    ) -> SampledPart:
        """Return one answer. Without stop strings the engine reports only the end of each part."""
        whole = SampledPart(index=index, ref=None, logprobs=FlatLogprobs() if params.flat_logprobs else [])
        async with aclosing(self._sequence(ids, params, index, model, arrived_s)) as parts:
            async for part in parts:
                whole.ref, whole.finish_reason = part.ref, part.finish_reason
                whole.token_ids += part.token_ids
                whole.versions += part.versions
                whole.logprobs.extend(part.logprobs)
                whole.text += part.text
                if part.routes is not None:  # a token has those of the first version that read it
                    known = part.routes[:0] if whole.routes is None else whole.routes
                    whole.routes = np.concatenate([known, part.routes[len(known) :]])
        return whole

    async def _sequence(
        self, ids: list[int], params: SamplingParams, index: int, model: str, arrived_s: float
    ) -> AsyncGenerator[SampledPart, None]:
        """Yield the parts of one answer across versions. Only the last part has a finish reason."""
        done: list[int] = []
        text = AnswerText(self._decode, ids, params.stop or ()) if params.detokenize else None
        name, incarnation = model, None
        request: EngineRequest | None = None
        try:
            while True:
                if request is not None and not self._adapters.gate.is_open:
                    request.place_free.set()  # nothing else can take it before the gate opens
                await self._adapters.gate.opened()
                await self._settled.wait()
                with self._adapters.lease(name, or_newer=True, incarnation=incarnation, follow=self._keeps) as lease:
                    request = self._generator.new_request(lease, arrived_s, follows=request)
                    self._running.add(request)
                    rest = continued(params, len(done), whole=lease.follows)
                    outputs = self._generator.stream(ids + done, rest, lease, request)
                    try:
                        async for output in outputs:
                            await self._settled.wait()
                            if request.void:
                                continue
                            part = _part(output, output.outputs[0], lease, request, index)
                            if request.cut and part.finish_reason == CUT:
                                part.finish_reason = None
                            if text is not None:
                                ends = (i for i, token in enumerate(part.token_ids, 1) if text.add(token))
                                if n := next(ends, 0):  # that many tokens complete a stop string
                                    part.keep(n)
                                    part.finish_reason = "stop"
                                    if not output.finished:  # else the engine has given them, and forgotten it
                                        part.routes = self._generator.routes(request)
                                part.text = text.take(part.finish_reason is not None)
                            done += part.token_ids
                            request.enough = part.finish_reason is not None
                            yield part
                            if request.enough:
                                return
                    finally:
                        self._running.discard(request)
                        await outputs.aclose()
                    if lease.resident in self._adapters.versions.left:  # its name may be another version's by now
                        raise UnknownVersionError(f"{lease.name} is lost: the trainer resumed from an older version")
                if not request.void:
                    self._generator.counters.interrupted += 1
                    self._generator.counters.recomputed_tokens += len(ids) + len(done)
                name, incarnation = lease.name, lease.incarnation
        except (asyncio.CancelledError, GeneratorExit):
            if request is not None and request.finished and not request.enough:  # it was cut, and did not continue
                self._generator.counters.aborted += 1
            raise
        finally:
            if request is not None:
                request.place_free.set()


def continued(params: SamplingParams, n: int, *, whole: bool = False) -> SamplingParams:
    """Make ``params`` for the rest of a sequence after ``n`` tokens; this module makes the text, not the engine.

    With ``whole`` the engine may hold back all tokens until the last.
    """
    rest = params.clone()
    if whole and not params.detokenize:
        rest.extra_args = (params.extra_args or {}) | {WHOLE: True}
    rest.stop, rest.detokenize, rest.output_text_buffer_length = [], False, 0
    if params.max_tokens is not None:
        rest.max_tokens = params.max_tokens - n
    rest.min_tokens = max(0, params.min_tokens - n)
    if n and params.seed is not None:
        rest.seed = continuation_seed(params.seed, n)
    if params.detokenize:
        rest.output_kind = RequestOutputKind.DELTA
    return rest


def continuation_seed(seed: int, n: int) -> int:
    """Derive the seed after ``n`` tokens of a sequence that started with ``seed``: a seed's numbers are used once."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{n}".encode(), digest_size=8).digest()) >> 1


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """Make ``params`` for the ``index``-th of ``n`` answers alone, with the seed that vLLM would give it."""
    one = params.clone()
    one.n = 1
    if params.seed is not None:
        one.seed = params.seed + index
    return one


def _part(
    output: RequestOutput,
    sample: CompletionOutput,
    lease: VersionLease,
    request: EngineRequest | None = None,
    index: int = 0,
) -> SampledPart:
    """Of ``sample``, or of ``request`` alone, whose place in the answer is ``index``."""
    n = len(sample.token_ids)
    refs = [lease.ref] * n if request is None else request.read_next(n)
    return SampledPart(
        index=sample.index if request is None else index,
        ref=refs[-1] if refs else lease.ref,
        token_ids=list(sample.token_ids),
        logprobs=found if isinstance(found := sample.logprobs, FlatLogprobs) else _rows(found),
        versions=[-1 if ref is None else ref.version for ref in refs],
        text=sample.text,
        finish_reason=sample.finish_reason,
        prompt_logprobs=prompt_logprobs(output) if output.prompt_logprobs else [],
        prompt_rows=prompt_rows(output),
        routes=sample.routed_experts,
    )


def _rows(found: SampleLogprobs | None) -> list[dict[int, float]]:
    return [{token: p.logprob for token, p in row.items()} for row in found or ()]


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results; the first error cancels the other coroutines."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _merged(streams: Iterable[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield the items of several generators as they arrive; closing it closes them."""
    queue: asyncio.Queue[T | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                queue.put_nowait(item)

    task = asyncio.ensure_future(all_of([pump(stream) for stream in streams]))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (item := await queue.get()) is not None:
            yield item
        task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""An engine whose token t, the prompt included, has an id and log-probabilities by formula, through vLLM's containers.

A request whose version is replaced has two tokens by then.
"""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

from vllm import CompletionOutput, RequestOutput
from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
from vllm.sampling_params import RequestOutputKind, SamplingParams

from areal_lora.config.sections.run import InFlight
from areal_lora.engine.vllm_ext.server.adapters import ServedAdapters
from areal_lora.engine.vllm_ext.server.generate import CUT, EngineRequest, Generator, RequestCounters
from areal_lora.engine.vllm_ext.server.sampling import SampledPart, Sampler
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply
from tests.support.engine.vllm_ext.late_engine import Queue

TOKENS = 6
AT_CUT = 2
WIDTH = 9  # likeliest tokens that the widest request of the batch has


def token_id(t: int) -> int:
    return 1000 + 7 * t


def row(t: int, n_likeliest: int) -> dict[int, float]:
    """In powers of two; the likeliest token of even ``t`` is the sampled one."""
    sampled, value = token_id(t), -(2.0 ** -(t + 1))
    others = {(sampled if k == 0 and t % 2 == 0 else sampled + 1 + k): value - k for k in range(n_likeliest)}
    return {sampled: value} | others


class ScoredEngine:
    errored = False

    def __init__(self, *, waits: bool) -> None:
        self.engine_core = self.output_processor = self
        self.waits, self.started = waits, asyncio.Event()
        self.waiting: dict[str, tuple[Queue, list[int], SamplingParams]] = {}

    async def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **how: Any) -> Queue:
        queue, ids = Queue(), prompt["prompt_token_ids"]
        queue.request_id = f"{request_id}-engine"
        if self.waits:
            self.waiting[request_id] = queue, ids, params
            self.started.set()
        else:
            self.answer(queue, ids, params, params.max_tokens or 0, "length")
        return queue

    def answer(self, queue: Queue, ids: list[int], params: SamplingParams, n: int, reason: str) -> None:
        """Two tokens at a time, or whole."""
        step = 2 if params.output_kind is RequestOutputKind.DELTA else n
        for first in range(len(ids), len(ids) + n, step):
            samples = []
            for index in range(params.n):
                found = create_sample_logprobs(params.flat_logprobs)
                for t in range(first, first + step):
                    of_t = row(t, WIDTH)
                    pairs = [(token_id(t), of_t[token_id(t)]), *list(of_t.items())[t % 2 :]]
                    given, values = [i for i, _ in pairs], [value for _, value in pairs]
                    nothing = itertools.repeat(None)
                    append_logprobs_for_next_position(found, given, values, nothing, 1, params.logprobs or 0)
                last = first + step == len(ids) + n
                made = [token_id(t) for t in range(first, first + step)]
                samples.append(CompletionOutput(index, "", made, None, found, finish_reason=reason if last else None))
            queue.put_nowait(RequestOutput("", None, ids, None, samples, last))

    def abort_requests(self, names: list[str], internal: bool) -> list[str]:
        for name in names:
            self.waits = False
            self.answer(*self.waiting.pop(name), AT_CUT, CUT)
        return []

    async def call_utility_async(self, method: str, follow_id: int, lora_id: int) -> dict[str, tuple[int, int]]:
        sampled = {}
        for queue, ids, params in self.waiting.values():
            sampled[queue.request_id] = AT_CUT, 0
            self.answer(queue, ids, params, params.max_tokens or 0, "length")
        return sampled

    async def abort_requests_async(self, names: list[str]) -> None: ...

    async def abort(self, name: str, internal: bool = False) -> None: ...


class Routeless(Generator):
    def routes(self, request: EngineRequest) -> None:
        return None


async def answers(
    policy: InFlight, *, flat: bool, logprobs: int, stop: str | None, stream: bool, cut: bool, n: int = 2
) -> dict[int, list[SampledPart]]:
    """The parts of each of ``n`` answers, of a prompt of three tokens."""
    engine: Any = ScoredEngine(waits=cut)
    channel: Any = SimpleNamespace()
    adapters = ServedAdapters(engine, channel, n_workers=1, n_slots=4, resident=2)
    generator = Routeless(engine=engine, max_model_len=64, vocab_size=2000, counters=RequestCounters())
    sampler = Sampler(generator, adapters, lambda ids: "".join(f"<{i}>" for i in ids), policy)

    async def publish(version: int) -> None:
        ref = AdapterRef(name="math", version=version)
        adapters.versions.reserve(ref)
        adapters.versions.activate(ref, version, PublishReply(ref=str(ref), digest="", phases={}))
        if adapters.switch is not None:
            await adapters.switch(ref)

    async def asked() -> list[SampledPart]:
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            **{"n": n, "max_tokens": TOKENS, "logprobs": logprobs, "output_kind": kind},
            **{"flat_logprobs": flat, "stop": stop, "detokenize": stop is not None},
        )
        if stream:
            return [part async for part in sampler.stream([1, 2, 3], params, "math", False)]
        return await sampler.complete([[1, 2, 3]], params, "math", False)

    await publish(1)
    running = asyncio.create_task(asked())
    if cut:
        await engine.started.wait()
        await asyncio.sleep(0.01)  # so that all n are in the engine
        await publish(2)
    found: dict[int, list[SampledPart]] = {}
    for part in await running:
        found.setdefault(part.index, []).append(part)
    return found

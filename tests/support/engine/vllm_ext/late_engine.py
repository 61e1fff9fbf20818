"""An engine to which a request comes after versions have changed, before the server knows it: a race of milliseconds.

Each token is the number of the version that computed it.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from vllm import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from areal_lora.engine.vllm_ext.server.adapters import ServedAdapters
from areal_lora.engine.vllm_ext.server.generate import Generator, RequestCounters
from areal_lora.engine.vllm_ext.server.sampling import SampledPart, Sampler
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.messages import PublishReply

TOKENS = 3


class Queue(asyncio.Queue[RequestOutput]):
    """Of one request: vLLM's collector of its outputs."""

    request_id = ""

    def get_nowait(self) -> Any:
        return None if self.empty() else super().get_nowait()


class LateEngine:
    """Answers a request at once, except the first: it arrives when the next version has come."""

    errored = False

    def __init__(self) -> None:
        self.engine_core = self.output_processor = self
        self.version, self.requests = 0, list[str]()
        self.sent, self.changed, self.arrived = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **how: Any) -> Queue:
        self.sent.set()
        await self.changed.wait()
        queue = Queue()
        queue.request_id = f"{request_id}-engine"
        self.requests.append(queue.request_id)
        sample = CompletionOutput(0, "", [self.version] * TOKENS, None, None, finish_reason="length")
        ids = prompt["prompt_token_ids"]
        queue.put_nowait(RequestOutput(request_id, None, ids, None, [sample], True))
        asyncio.get_running_loop().call_soon(self.arrived.set)
        return queue

    async def call_utility_async(self, method: str, follow_id: int, lora_id: int) -> dict[str, tuple[int, int]]:
        self.version, known = lora_id, dict.fromkeys(self.requests, (0, 0))
        if self.sent.is_set():
            self.changed.set()
            await self.arrived.wait()
        return known

    def abort_requests(self, names: list[str], internal: bool) -> list[str]:
        return []

    async def abort_requests_async(self, names: list[str]) -> None: ...

    async def abort(self, name: str, internal: bool = False) -> None: ...


async def answer_of_a_late_request() -> SampledPart:
    """A request under policy ``keep`` that was sent while v2 replaced v1 and reached the engine after it."""
    engine: Any = LateEngine()
    channel: Any = SimpleNamespace()
    adapters = ServedAdapters(engine, channel, n_workers=1, n_slots=4, resident=2)
    generator = Generator(engine=engine, max_model_len=64, vocab_size=64, counters=RequestCounters())
    sampler = Sampler(generator, adapters, str, "keep")

    async def publish(version: int) -> None:
        ref = AdapterRef(name="math", version=version)
        adapters.versions.reserve(ref)
        adapters.versions.activate(ref, version, PublishReply(ref=str(ref), digest="", phases={}))
        assert adapters.switch is not None
        await adapters.switch(ref)

    await publish(1)
    running = asyncio.create_task(sampler.complete([[1, 2, 3]], SamplingParams(max_tokens=TOKENS), "math", False))
    await engine.sent.wait()
    await publish(2)
    (part,) = await running
    return part

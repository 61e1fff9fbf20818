"""Publishes, nightly a thousand, under streaming requests: every token belongs to the version its answer names.

Every streamed token's log-probability is computed again with transformers and that version's
adapter merged into the weights.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from areal_lora.run_folder.paths import RunFolder
from areal_lora.run_folder.rendezvous import read_secret
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import AdapterLayout
from areal_lora.weight_sync.manifest import base_digest
from areal_lora.weight_sync.trainer.leader import Leader
from areal_lora.weight_sync.trainer.publisher import Publisher
from tests.support.engine.vllm_ext.serving import RunningServer, adapter, running_server
from tests.support.sizes import size
from tests.support.solo_exchange import SoloExchange

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PUBLISHES, SETTLED, STREAMS, NEW_TOKENS = size(60, 1000), 30, size(12, 64), 24
GROWTH_BYTES = 64 << 20
PROMPT_TOKENS = 8
LONGEST = 200  # of the prompts that make up one batch
TOLERANCE = 1e-4


class Values:
    """Adapter values of any version: one random vector, read from another place for each version."""

    def __init__(self, layout: AdapterLayout, seed: int) -> None:
        self.shard = layout.shards[0]
        self._pool = np.random.default_rng(seed).standard_normal(2 * self.shard.nbytes // 4, dtype=np.float32) * 0.1

    def flat(self, version: int) -> np.ndarray:
        n = self.shard.nbytes // 4
        begin = version * 7919 % n
        return self._pool[begin : begin + n]

    def pack(self, version: int):
        def pack(flat: torch.Tensor) -> Iterator[int]:
            flat.numpy().view(np.float32)[:] = self.flat(version)
            yield len(self.shard.tensors)

        return pack

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        flat = torch.from_numpy(self.flat(version).copy())
        return {t.name: flat[t.offset // 4 :][: t.shape[0] * t.shape[1]].view(t.shape) for t in self.shard.tensors}


@dataclass
class Seen:
    """Finished answers by version: (token ids, log-probabilities) with their prompts."""

    answers: dict[int, list[tuple[list[int], list[int], list[float]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    faults: list[str] = field(default_factory=list)


async def stream(server: RunningServer, session: aiohttp.ClientSession, seen: Seen, index: int, stop: asyncio.Event):
    """Ask one answer after the other until told to stop; whatever is not as it should be is a fault."""
    for turn in range(1_000_000):
        if stop.is_set():
            return
        prompt = [5 + (31 * index + 7 * turn + 3 * j) % 240 for j in range(PROMPT_TOKENS)]
        body = {
            "model": "math",
            "prompt": prompt,
            "max_tokens": NEW_TOKENS,
            "temperature": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "stream": True,
        }
        names, tokens, logprobs, reason = set(), [], [], None
        async with session.post(server.url("/v1/completions"), json=body) as response:
            if response.status != 200:
                seen.faults.append(f"status {response.status}: {await response.text()}")
                continue
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                choice = event["choices"][0]
                names.add(event["model"])
                tokens += choice["token_ids"]
                logprobs += choice["logprobs"]["token_logprobs"]
                reason = choice["finish_reason"] or reason
        if len(names) != 1 or len(tokens) != NEW_TOKENS or len(logprobs) != NEW_TOKENS or reason != "length":
            seen.faults.append(f"versions {names}, {len(tokens)} tokens, ended by {reason}")
            continue
        seen.answers[AdapterRef.parse(names.pop()).version].append((prompt, tokens, logprobs))


async def meet_all_sizes(server: RunningServer, session: aiohttp.ClientSession) -> None:
    """Have the engine compute batches of every number of tokens that the streams can bring about.

    It keeps a kernel for each one it meets, and grows by 150 MiB in its first minute of streams without a single
    publish. Publishes alone: 1 MiB in 11,000 versions.
    """
    draw = np.random.default_rng(1)  # no prompt begins like another one, whose blocks would be reused
    for size_of_batch in range(1, STREAMS * (PROMPT_TOKENS + 1) + 1):
        lengths = [min(LONGEST, size_of_batch - done) for done in range(0, size_of_batch, LONGEST)]
        prompts = [draw.integers(5, 245, length).tolist() for length in lengths]
        status, answer = await server.post(session, model="math", prompt=prompts, max_tokens=1)
        assert status == 200, answer


class Reference:
    """transformers in fp32 with one version's adapter merged into a copy of the weights."""

    def __init__(self, server: RunningServer) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
        self._base = dict(self._model.named_parameters())
        self._scale = server.spec.alpha / server.spec.rank

    @torch.no_grad()
    def errors(self, tensors: dict[str, torch.Tensor], answers) -> np.ndarray:
        """|logp server - logp reference| of every streamed token. [tokens]"""
        ids = torch.tensor([prompt + tokens for prompt, tokens, _ in answers])
        served = torch.tensor([logprobs for _, _, logprobs in answers])
        inputs = {"input_ids": ids, "use_cache": False}
        logits = functional_call(self._model, self._merged(tensors), kwargs=inputs).logits
        n = len(answers[0][0])
        logp = logits[:, n - 1 : -1].log_softmax(-1).gather(2, ids[:, n:, None])[..., 0]
        return (logp - served).abs().flatten().numpy()

    def _merged(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        def delta(module: str) -> torch.Tensor:
            return self._scale * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]

        merged = {}
        for name, weight in self._base.items():
            module = name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in tensors:
                weight = weight + delta(module)
            elif name.endswith("experts.gate_up_proj"):
                base = name.removesuffix(".gate_up_proj")
                parts = [[delta(f"{base}.{e}.{p}_proj") for p in ("gate", "up")] for e in range(weight.shape[0])]
                weight = weight + torch.stack([torch.cat(pair) for pair in parts])
            elif name.endswith("experts.down_proj"):
                base = name.removesuffix(".down_proj")
                weight = weight + torch.stack([delta(f"{base}.{e}.down_proj") for e in range(weight.shape[0])])
            merged[name] = weight
        return merged


def rss_bytes(server: RunningServer) -> list[int]:
    """Of the server and its engine's processes."""
    root = psutil.Process(server.process.pid)
    return [p.memory_info().rss for p in [root, *root.children(recursive=True)]]


async def soak(server: RunningServer, publisher: Publisher, layout: AdapterLayout, values: Values) -> tuple[Seen, int]:
    """(what the streams saw, bytes that the server grew after the first publishes)."""
    seen, stop = Seen(), asyncio.Event()
    memory: list[list[int]] = []
    base = base_digest(server.model)

    def publish(version: int) -> None:
        ref = AdapterRef(name="math", version=version)
        parent = AdapterRef(name="math", version=version - 1) if version else None
        publisher.publish(ref, parent, layout, values.pack(version), base, None).wait()

    await asyncio.to_thread(publish, 0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:
        await meet_all_sizes(server, session)
        for i in range(STREAMS):
            tasks.create_task(stream(server, session, seen, i, stop))
        for version in range(1, PUBLISHES + 1):
            async with asyncio.timeout(150.0):  # answers of at least every third version, however slow they are
                while len(seen.answers) < version // 3 and not seen.faults:
                    await asyncio.sleep(0.005)
            await asyncio.to_thread(publish, version)
            if version == SETTLED or version % 250 == 0:
                memory.append(rss_bytes(server))
        memory.append(rss_bytes(server))
        stop.set()
    print("resident MiB of the server's processes:", [[n >> 20 for n in row] for row in memory])
    return seen, sum(memory[-1]) - sum(memory[0])


@pytest.fixture
def server(even_model: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server of its own: nothing else may be in its memory or its slots."""
    folder = tmp_path / "soak"
    # A small key/value cache: its pages are touched one by one, which would look like growth for minutes.
    with running_server(folder, even_model, kv_cache_gib=0.02) as running:
        yield running


def test_a_thousand_publishes_under_streaming_requests(server):
    layout = server.layout(adapter(server.model, 0))
    values = Values(layout, seed=1)
    config = server.config.weight_sync.model_copy(update={"timeout_s": 120.0})
    secret = read_secret(RunFolder(server.folder))
    leader = Leader(run="test", secret=secret, servers=[server.admin.server], config=config)
    publisher = Publisher(run="test", config=config, exchange=SoloExchange(), leader=leader, secret=secret)
    began = time.monotonic()
    try:
        seen, grown = asyncio.run(soak(server, publisher, layout, values))
    finally:
        publisher.close()
    took = time.monotonic() - began
    assert not seen.faults, seen.faults[:3]
    torch.set_num_threads(1)
    reference = Reference(server)
    errors = {v: reference.errors(values.tensors(v), answers) for v, answers in seen.answers.items()}
    worst = max(errors, key=lambda v: errors[v].max())
    tokens = sum(e.size for e in errors.values())
    other = reference.errors(values.tensors(worst + 1), seen.answers[worst])
    print(
        f"{PUBLISHES} publishes in {took:.0f} s ({took / PUBLISHES * 1e3:.0f} ms each), {tokens} tokens of "
        f"{len(errors)} versions, largest |dlogp| {errors[worst].max():.2g} (under the next version: "
        f"{other.max():.2g}), server grew by {grown / 2**20:.0f} MiB after {SETTLED} publishes"
    )
    assert errors[worst].max() <= TOLERANCE, f"version {worst}"
    assert other.max() > 100 * TOLERANCE  # the check can tell versions apart
    assert len(errors) > PUBLISHES / 4  # requests began on versions old and new throughout
    assert grown <= GROWTH_BYTES

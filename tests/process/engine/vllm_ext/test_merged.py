"""A server whose weights are one merged version, against Hugging Face with the adapter merged into the checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from safetensors.torch import load_file

from areal_lora.errors import AdapterError, ManifestError, PublishError
from areal_lora.types import AdapterRef
from areal_lora.weight_sync.layout import Payload, make_layout
from areal_lora.weight_sync.messages import check_served
from tests.support.engine.vllm_ext.serving import (
    ALPHA,
    PARTS,
    PROMPT,
    RANK,
    RunningServer,
    Tensors,
    largest,
    make_model,
    running_server,
    without,
)
from tests.support.sizes import sample, size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe tp2": ("qwen2_moe", {"tp": 2}),
    **{family: (family, {}) for family in ("qwen3_moe", "mixtral", "mistral", "llama", "qwen3", "qwen2")},
}
SERVERS = dict(sample(EVERY.items(), 0, lambda named: [named[1][1].get("tp", 1)]))
WEIGHTS = {"qwen3_moe": 6}  # fused weights that one version of the family's model writes


def running(model: Path, rollout: dict[str, Any], tmp: Path, **env: str) -> Iterator[RunningServer]:
    with running_server(tmp / "run", model, env=env, adapter_mode="merged", **rollout) as server:
        yield server


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    family, rollout = SERVERS[request.param]
    tmp = tmp_path_factory.mktemp("a server")
    yield from running(make_model(tmp / "model", family), rollout, tmp)


def merged(served: RunningServer, tensors: Tensors) -> Tensors:
    base = load_file(served.model / "model.safetensors")
    modules = [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith(".lora_A.weight")]
    scale = ALPHA / RANK
    return {
        f"{m}.weight": base[f"{m}.weight"] + scale * tensors[f"{m}.lora_B.weight"] @ tensors[f"{m}.lora_A.weight"]
        for m in modules
    }


def publish(served: RunningServer, tensors: Tensors, **how: Any) -> AdapterRef:
    weights = merged(served, tensors)
    owned = {0: [(n, tuple(t.shape)) for n, t in weights.items()]}
    layout = make_layout(served.spec, "float32", owned, {}, Payload.MERGED)
    return served.publish(weights, layout=layout, **how)


def test_a_version_scores_like_merged_hugging_face_and_never_builds_on_the_last(served: RunningServer) -> None:
    if served.newest is None:
        assert largest(served.score(None), served.logprobs(None, PROMPT)) < 1e-4, (
            "before the first version it is the base"
        )
    want = {seed: served.logprobs(served.adapter(seed), PROMPT) for seed in (1, 2)}
    for seed in (1, 2, 1):
        got = served.score(publish(served, served.adapter(seed)))
        assert largest(got, want[seed]) < 1e-4
        assert largest(got, want[3 - seed]) > 0.1
    zero = served.score(publish(served, served.adapter(1, b_scale=0.0)))
    assert largest(zero, served.logprobs(None, PROMPT)) < 1e-4


@pytest.mark.parametrize("part", sample(PARTS, 0, lambda part: [PARTS[part]]))
def test_every_part_shows(served: RunningServer, part: str) -> None:
    tensors = served.adapter(1)
    less = without(tensors, part)
    if all((less[n] == t).all() for n, t in tensors.items()):
        pytest.skip("this family has no such part")
    got = served.score(publish(served, less))
    assert largest(got, served.logprobs(less, PROMPT)) < 1e-4
    assert largest(got, served.logprobs(tensors, PROMPT)) > 1e-3


def test_what_a_merged_server_refuses(served: RunningServer) -> None:
    ref = publish(served, served.adapter(1))
    before = served.score(ref)
    with pytest.raises(AdapterError, match="expects it merged"):
        check_served(served.layout(served.adapter(2)), served.modules())
    with pytest.raises(ManifestError, match="is not served by this engine"):
        served.publish(served.adapter(2))
    weights = merged(served, served.adapter(2))
    last = max(weights)
    owned = {0: [(n, tuple(t.shape)) for n, t in weights.items() if n != last]}
    with pytest.raises(ManifestError, match=rf"1 tensors, first {last}"):
        served.publish(weights, layout=make_layout(served.spec, "float32", owned, {}, Payload.MERGED))
    spoiled = served.adapter(2)
    spoiled[min(n for n in spoiled if "lora_B" in n)][0, 0] = float("nan")
    with pytest.raises(ManifestError, match="holds NaN"):
        publish(served, spoiled)
    assert served.score(ref) == before, "a version that is refused changes nothing"
    assert served.admin.score(None, [PROMPT], 120.0) == [], "the base is gone, and nothing else is given for it"
    with pytest.raises(PublishError, match="404"):
        served.score(AdapterRef(name="math", version=ref.version - 1))


@pytest.fixture(scope="module")
def one(even_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose second version fails in the middle of being written. Experts do not tie (`even_model`)."""
    fault = f"server.weight_written:{WEIGHTS['qwen3_moe'] + 5}:EIO"
    yield from running(even_model, {}, tmp_path_factory.mktemp("one"), AREAL_LORA_FAULT=fault)


def test_a_mixture_is_never_served(one: RunningServer) -> None:
    old = publish(one, one.adapter(1))

    async def ask(model: str) -> int:
        async with aiohttp.ClientSession() as session:
            return (await one.post(session, model=model, prompt=PROMPT, max_tokens=4))[0]

    assert asyncio.run(ask("math")) == 200
    with pytest.raises(PublishError, match="al_commit failed"):
        publish(one, one.adapter(2))
    for model in ("math", str(old), "base"):
        assert asyncio.run(ask(model)) == 404, "neither version is whole"
    with pytest.raises(PublishError, match="404"):
        one.score(old)
    again = publish(one, one.adapter(2))
    assert largest(one.score(again), one.logprobs(one.adapter(2), PROMPT)) < 1e-4
    assert asyncio.run(ask("math")) == 200


def test_sequences_go_on_and_each_token_is_of_the_version_it_names(one: RunningServer) -> None:
    """Many versions while answers are sampled: no step and no cached block mixes two versions."""
    versions, seeds = size(12, 200), 3
    first = one.newest.version + 1 if one.newest else 0

    found: list[dict[str, Any]] = []

    def seen() -> int:
        return len({version for answer in found for version in answer["versions"]})

    async def answers(stop: asyncio.Event) -> None:
        async def stream(i: int) -> None:
            async with aiohttp.ClientSession() as session:
                prompt = [(31 * i + 7 * j) % 251 + 5 for j in range(40)]
                while not stop.is_set():
                    status, answer = await one.post(
                        session,
                        model="math",
                        prompt=prompt,
                        max_tokens=160,
                        temperature=1.0,
                        logprobs=0,
                        return_token_ids=True,
                        ignore_eos=True,
                    )
                    assert status == 200, answer
                    found.append({"prompt": prompt, **answer["choices"][0]})

        await asyncio.gather(*(stream(i) for i in range(8)))

    async def both() -> None:
        stop = asyncio.Event()
        asked = asyncio.create_task(answers(stop))
        with ThreadPoolExecutor(1) as pool:
            for version in range(first, first + 8 * versions):
                adapter = one.adapter(version % seeds)
                await asyncio.get_running_loop().run_in_executor(pool, publish, one, adapter)
                if version >= first + versions - 1 and seen() > 10:
                    break
        stop.set()
        await asked

    publish(one, one.adapter(first % seeds))
    first += 1
    asyncio.run(both())
    assert seen() > 10, "versions came while answers were sampled"
    mixed = [answer for answer in found if len(set(answer["versions"])) > 1]
    assert mixed, "answers went on over versions"
    adapters = [one.adapter(seed) for seed in range(seeds)]
    for answer in mixed[:: max(1, len(mixed) // 12)]:
        ids, prompt = answer["token_ids"], answer["prompt"]
        assert len(ids) == len(answer["versions"]) == 160
        assert answer["versions"] == sorted(answer["versions"])
        scores = [one.logprobs(adapter, prompt + ids)[len(prompt) :] for adapter in adapters]
        own = [abs(scores[v % seeds][t] - p) for t, (v, p) in enumerate(_pairs(answer))]
        next_ = [abs(scores[(v + 1) % seeds][t] - p) for t, (v, p) in enumerate(_pairs(answer))]
        assert max(own) < 1e-4, "scored under the version that it names"
        assert max(next_) > 0.05, "which no other version would do"


def _pairs(answer: dict[str, Any]) -> list[tuple[int, float]]:
    return list(zip(answer["versions"], answer["logprobs"]["token_logprobs"], strict=True))

"""Every model family and parallel layout of a server, against Hugging Face with the adapter merged.

One server per row of ``SERVERS`` for all tests: they are the cost here.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from areal_lora.errors import AdapterError, ManifestError, ProcessFailed, PublishError
from areal_lora.families.registry import target_of
from areal_lora.types import AdapterRef, ExpertLayout, ShardManifest
from areal_lora.weight_sync.layout import make_layout
from areal_lora.weight_sync.manifest import Announcement, base_digest, encode
from areal_lora.weight_sync.messages import check_served
from tests.support.clocks import wait_until
from tests.support.engine.vllm_ext.serving import (
    ALPHA,
    PARTS,
    PROMPT,
    RANK,
    RunningServer,
    answers_a_ping,
    largest,
    make_model,
    running_server,
    without,
)
from tests.support.sizes import sample

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OTHER = {
    "name": "other",
    "rslora": True,
    "rank_pattern": {"o_proj": 1, "down_proj|w2": 5},
    "alpha_pattern": {"(q|k|v)_proj": 3.0},
}
EVERY: dict[str, tuple[str, dict[str, Any]]] = {  # test_server does the same for qwen3_moe
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {}),
    "mistral tp2": ("mistral", {"tp": 2}),
    "qwen2_moe tp2": ("qwen2_moe", {"tp": 2}),
    "mixtral tp2 ep2": ("mixtral", {"tp": 2, "expert_parallel": True}),
    "qwen3_moe with dense layers": ("qwen3_moe by step", {}),
}
SERVERS = dict(
    sample(EVERY.items(), 0, lambda named: [named[0] if named[1][0] in ("qwen2_moe", "mixtral") else "dense"])
)


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    family, rollout = SERVERS[request.param]
    model = make_model(tmp_path_factory.mktemp("model"), family)
    folder = tmp_path_factory.mktemp("server") / "run"
    with running_server(folder, model, further=[OTHER], **rollout) as running:
        family = psutil.Process(running.process.pid).children(recursive=True)
        mapped = {m.path for p in family for m in p.memory_maps()}
        shared = {path for path in mapped if path.startswith("/dev/shm/vllm")}
        shares = not any("_C_AVX2" in path for path in mapped)  # vLLM's library for CPUs without AVX-512 cannot
        assert bool(shared) == (shares and running.config.rollout.tp > 1), "workers on a CPU share memory"
        yield running
    assert not any(Path(path).exists() for path in shared), "nothing of a server that ended stays in memory"


def test_an_adapter_scores_like_merged_hugging_face(served: RunningServer) -> None:
    tensors = served.adapter(1)
    base = served.score(None)
    assert largest(base, served.logprobs(None, PROMPT)) < 1e-4
    got = served.score(served.publish(tensors))
    assert largest(got, served.logprobs(tensors, PROMPT)) < 1e-4
    assert largest(got, base) > 0.1, "the adapter must show"
    assert largest(served.score(None), base) < 1e-6


@pytest.mark.parametrize("part", sample(PARTS, 0, lambda part: [PARTS[part]]))
def test_every_part_shows(served: RunningServer, part: str) -> None:
    """The comparison above can fail: without a part of the adapter the scores are others, on both sides the same."""
    tensors = served.adapter(1)
    less = without(tensors, part)
    if all((less[n] == t).all() for n, t in tensors.items()):
        pytest.skip("this family has no such part")
    got = served.score(served.publish(less))
    assert largest(got, served.logprobs(less, PROMPT)) < 1e-4
    assert largest(got, served.logprobs(tensors, PROMPT)) > 1e-3


def test_a_slot_used_before_shows_nothing_of_it(served: RunningServer) -> None:
    for seed in range(served.config.rollout.resident_versions):
        served.publish(served.adapter(seed))
    zero = served.publish(served.adapter(7, b_scale=0.0))
    assert largest(served.score(zero), served.score(None)) < 1e-6


def test_ranks_and_scales_of_single_modules(served: RunningServer) -> None:
    """Another adapter than ``math``: rsLoRA, and other numbers for some modules, written down here."""
    spec, tensors, folded = served.config.adapters[1].spec(str(served.model)), served.adapter(8), {}
    for name, tensor in tensors.items():
        is_a, leaf = "lora_A" in name, name.split(".")[-3]
        rank = {"o_proj": 1, "down_proj": 5, "w2": 5}.get(leaf, RANK)
        alpha = 3.0 if leaf in ("q_proj", "k_proj", "v_proj") else ALPHA
        tensors[name] = (tensor[:rank] if is_a else tensor[:, :rank]).contiguous()
        # The reference scales by ALPHA / RANK.
        folded[name] = tensors[name] if is_a else tensors[name] * (alpha / rank**0.5 * RANK / ALPHA)
    ref = AdapterRef(name="other", version=0)
    served.source.publish(ref, served.layout(tensors, spec), tensors, base=base_digest(served.model))
    got = served.score(ref)
    assert largest(got, served.logprobs(folded, PROMPT)) < 1e-4
    assert largest(got, served.score(None)) > 0.1, "the adapter must show"


def test_experts_that_share_one_adapter(served: RunningServer) -> None:
    """One wire tensor per layer and projection, for all its experts."""
    tensors = served.adapter(3)
    first = {n: re.sub(r"experts\.\d+\.", "experts.0.", n) for n in tensors}
    aliases = {n: wire for n, wire in first.items() if n != wire}
    if not aliases:
        pytest.skip("a dense model")
    wire = {n: t for n, t in tensors.items() if n not in aliases}
    # This run declares an adapter per expert; what the wire shares is the same to the server.
    layout = make_layout(served.spec, "float32", {0: [(n, tuple(t.shape)) for n, t in wire.items()]}, aliases)
    assert layout.nbytes < served.layout(tensors).nbytes
    got = served.score(served.publish(wire, layout=layout))
    assert largest(got, served.logprobs({n: tensors[w] for n, w in first.items()}, PROMPT)) < 1e-4


def test_a_mixed_batch_equals_each_alone(served: RunningServer) -> None:
    first, second = served.publish(served.adapter(3)), served.publish(served.adapter(4))
    jobs = [(m, [10 + i, 20, 30, 40 + i]) for i in range(2) for m in ("base", str(first), str(second))]

    async def both() -> tuple[list[Any], list[Any]]:
        async with aiohttp.ClientSession() as session:
            alone = [await served.greedy(session, m, p, 12) for m, p in jobs]
            return alone, await asyncio.gather(*(served.greedy(session, m, p, 12) for m, p in jobs))

    alone, mixed = asyncio.run(both())
    assert [ids for ids, _ in mixed] == [ids for ids, _ in alone]
    assert max(largest(a[1], b[1]) for a, b in zip(alone, mixed, strict=True)) < 1e-5


def test_what_the_server_can_bind_is_what_the_checkpoint_has(served: RunningServer) -> None:
    tensors = served.adapter(1)
    reply = served.modules()
    assert {f"{m}.lora_B.weight": (n_out, 8) for m, (_, n_out) in reply.modules.items()} == {
        n: tuple(t.shape) for n, t in tensors.items() if "lora_B" in n
    }
    check_served(served.layout(tensors), reply)
    wait_until(partial(answers_a_ping, served))

    foreign = dict(tensors)
    for end in ("A", "B"):
        foreign[f"model.layers.0.mlp.router.lora_{end}.weight"] = tensors[min(tensors)]
    with pytest.raises(AdapterError, match=r"vLLM would ignore model\.layers\.0\.mlp\.router;"):
        check_served(served.layout(foreign), reply)
    fewer = {n: t for n, t in tensors.items() if ".layers.1.self_attn.o_proj" not in n}
    with pytest.raises(AdapterError, match=r"does not adapt.*model\.layers\.1\.self_attn\.o_proj;"):
        check_served(served.layout(fewer), reply)
    narrow = {n: t[:, :-1] if "o_proj.lora_A" in n else t for n, t in tensors.items()}
    with pytest.raises(AdapterError, match=r"differ in the size of model\.layers\.0\.self_attn\.o_proj, "):
        check_served(served.layout(narrow), reply)
    only = {n: t for n, t in tensors.items() if (target_of(n.rpartition(".lora_")[0]) or ("",))[0] == "linear_qkv"}
    check_served(served.layout(only, replace(served.spec, target_modules=("linear_qkv",))), reply)
    shared = replace(served.spec, expert_layout=ExpertLayout.SHARED, rank=16)
    with pytest.raises(AdapterError, match="rank 16"):
        check_served(served.layout(tensors, shared), reply)


def test_a_stopped_worker_does_not_answer_a_ping(served: RunningServer) -> None:
    """The server process itself is well; only its worker (for one worker: the engine) stands still."""
    if served.config.rollout.expert_parallel:
        pytest.skip("a worker of a tensor-parallel server stands still in this test as well")
    server = psutil.Process(served.process.pid)
    family = [p for p in server.children(recursive=True) if "resource_tracker" not in " ".join(p.cmdline())]
    worker = max(family, key=lambda p: len(p.parents()))  # below the engine, if the engine has workers
    wait_until(partial(answers_a_ping, served))
    worker.suspend()
    try:
        wait_until(lambda: worker.status() == psutil.STATUS_STOPPED, what="the worker's stop")
        began = time.monotonic()
        with pytest.raises(PublishError, match="silent for 2 s"):
            served.admin.ping(150.0)
        assert time.monotonic() - began < 75
    finally:
        worker.resume()
    wait_until(partial(answers_a_ping, served))
    tensors = served.adapter(11)
    assert largest(served.score(served.publish(tensors)), served.logprobs(tensors, PROMPT)) < 1e-4


def test_a_dead_engine_ends_the_server_and_the_publish_under_way(served: RunningServer) -> None:
    """The last test of a server, and of one without workers that share memory."""
    if served.config.rollout.tp > 1:
        pytest.skip("what is left in memory is looked at where the server is told to end")
    served.publish(served.adapter(1))  # the source is a member: the announced version waits for its bytes
    layout = served.layout(served.adapter(2))
    manifest = ShardManifest(
        run="test",
        ref=AdapterRef(name="math", version=served.newest.version + 1),
        parent=served.newest,
        base_digest=base_digest(served.model),
        layout=layout.digest,
    )
    raised: list[Exception] = []

    def post() -> None:
        try:
            served.admin.publish(encode(Announcement(manifest=manifest, layout=layout, timeout_s=150.0)), 200.0)
        except (ManifestError, PublishError) as e:
            raised.append(e)

    thread = threading.Thread(target=post)
    thread.start()
    time.sleep(0.5)
    engine = max(psutil.Process(served.process.pid).children(), key=lambda p: p.memory_info().rss)
    began = time.monotonic()
    engine.kill()
    thread.join(200.0)
    assert isinstance(raised[0], PublishError)
    assert time.monotonic() - began < 75, "less than the publish's own deadline"
    assert served.process.wait(120) == ProcessFailed.exit_code

"""Routes of requests that share, cache and lose KV blocks, with the real scheduler and a model that is a formula."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from areal_lora.config.load import load_config
from areal_lora.tokens import RouteShape
from tests.support.lazy import Lazy
from tests.support.paths import EXAMPLES

vllm = Lazy("vllm")
hashing = Lazy("vllm.utils.hashing")
kv_cache_utils = Lazy("vllm.v1.core.kv_cache_utils")
kv_cache_interface = Lazy("vllm.v1.kv_cache_interface")
outputs = Lazy("vllm.v1.outputs")
requests = Lazy("vllm.v1.request")
structured_output = Lazy("vllm.v1.structured_output")
cpu_scheduler = Lazy("areal_lora.engine.vllm_ext.compat.cpu_scheduler")
engine = Lazy("areal_lora.engine.vllm_ext.compat.engine")
assemble = Lazy("areal_lora.engine.vllm_ext.server.assemble")
generate = Lazy("areal_lora.engine.vllm_ext.server.generate")

BLOCK, LAYERS, K = 32, 2, 2


def routes(token_ids: list[int]) -> np.ndarray:
    """[T, L, K]: by token and place."""
    places = np.arange(len(token_ids))[:, None]
    rows = (7 * np.array(token_ids)[:, None] + 3 * places + np.arange(LAYERS * K)) % 251
    return rows.astype(np.uint8).reshape(-1, LAYERS, K)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> cpu_scheduler.GroupScheduler:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    with mock.patch.dict(os.environ):  # vLLM preloads libraries into its processes, which this one's would get, too
        config = assemble.engine_args(load_config(files, ["behaviour.router_replay=rollout"])).create_engine_config()
    config.cache_config.num_gpu_blocks = request.param
    spec = kv_cache_interface.FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv = kv_cache_interface.KVCacheConfig(
        num_blocks=request.param,
        kv_cache_tensors=[],
        kv_cache_groups=[kv_cache_interface.KVCacheGroupSpec(["layer"], spec)],
    )
    kv_cache_utils.init_none_hash(hashing.sha256)
    return cpu_scheduler.GroupScheduler(config, kv, structured_output.StructuredOutputManager(config), BLOCK)


def run(
    scheduler: cpu_scheduler.GroupScheduler, prompts: list[list[int]], n_tokens: int, whole: bool = False
) -> dict[str, Any]:
    """Tokens and returned routes of each request, and the number of preemptions.

    The load that the server reads is what the scheduler's own outputs tell.
    """
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hashing.sha256)
    every = {
        f"{i}": requests.Request(
            request_id=f"{i}",
            prompt_token_ids=prompt,
            sampling_params=vllm.SamplingParams(
                max_tokens=n_tokens, ignore_eos=True, extra_args={engine.WHOLE: True} if whole else None
            ),
            pooling_params=None,
            block_hasher=hasher,
        )
        for i, prompt in enumerate(prompts)
    }
    for request in every.values():
        scheduler.add_request(request)
    returned: dict[str, list[np.ndarray]] = {name: [] for name in every}
    preempted = step = 0
    core: Any = SimpleNamespace(scheduler=scheduler)
    counters = generate.RequestCounters()
    while scheduler.has_unfinished_requests():
        made = scheduler.schedule()
        preempted += len(made.preempted_req_ids or ())
        counters.take(engine.load_now(core))
        assert (counters.preemptions, counters.running) == (preempted, len(made.num_scheduled_tokens))
        assert counters.running + counters.waiting == len(scheduler.requests)
        names = list(made.num_scheduled_tokens)
        parts = {}
        for name in names:
            end = every[name].num_computed_tokens
            parts[name] = routes(list(every[name].all_token_ids))[end - made.num_scheduled_tokens[name] : end]
        output = outputs.ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[(31 * int(name) + 5 * step) % 200] for name in names],
            prompt_logprobs_dict={},
        )
        output.aux_output_connector_output = parts
        step += 1
        for message in scheduler.update_from_output(made, output).values():
            for each in message.outputs:
                if each.routed_experts is not None:
                    returned[each.request_id].append(each.routed_experts)
    found = {name: (list(every[name].all_token_ids), np.concatenate(returned[name])) for name in every}
    return {"found": found, "preempted": preempted, "messages": {n: len(rows) for n, rows in returned.items()}}


PROMPTS = [[(3 * i + k) % 200 for i in range(length)] for k, length in enumerate((9, 32, 33, 70)) for _ in range(3)]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("scheduler", [400, 14], indirect=True, ids=["enough blocks", "few blocks"])
def test_every_token_but_the_last_has_its_route_once(scheduler: cpu_scheduler.GroupScheduler, whole: bool) -> None:
    """Of groups, then of turns that continue them from the cache, also where requests are preempted."""
    enough = scheduler.cache_config.num_gpu_blocks == 400
    first = run(scheduler, PROMPTS, 40, whole)
    turns = [tokens + [7] * 11 for tokens, _ in first["found"].values()]
    second = run(scheduler, turns, 30, whole)
    assert (first["preempted"] + second["preempted"] == 0) == enough
    for each in (first, second):
        for tokens, rows in each["found"].values():
            np.testing.assert_array_equal(rows, routes(tokens)[:-1])
        assert (max(each["messages"].values()) == 1) == whole
    assert not scheduler.aux_output_connector._cached


@pytest.mark.parametrize("experts", [8, 255, 256, 300])
def test_a_route_that_is_no_longer_there_is_no_experts(experts: int) -> None:
    """Block 0 is in place of what a sliding window has left; an expert 255 stays one."""
    shape, dtype = RouteShape(layers=1, per_token=1, experts=experts), np.uint8 if experts <= 256 else np.uint16
    blocks = [SimpleNamespace(block_id=1), SimpleNamespace(block_id=2)]
    kept = cpu_scheduler.KeptRoutes(mock.Mock(get_blocks=lambda name: SimpleNamespace(blocks=[blocks])), 12, 4)
    first = SimpleNamespace(request_id="a", num_tokens=8, num_output_tokens=1, sampling_params=None)
    kept.take_output(first, {"a": np.full((7, 1, 1), experts - 1, dtype)})
    blocks[0] = SimpleNamespace(block_id=0)
    again = SimpleNamespace(request_id="b", num_tokens=8, num_output_tokens=1, sampling_params=None)
    kept.start(again, blocks, 6)
    rows = kept.take_output(again, {"b": np.full((1, 1, 1), experts - 1, dtype)})
    none = int.from_bytes(b"\xff" * shape.n_bytes, "little")
    assert rows.astype(shape.dtype).ravel().tolist() == [none] * 4 + [experts - 1] * 3


@pytest.mark.parametrize("scheduler", [400], indirect=True)
def test_nothing_is_kept_of_an_aborted_request(scheduler: cpu_scheduler.GroupScheduler) -> None:
    request = requests.Request("a", PROMPTS[0], vllm.SamplingParams(max_tokens=9), None)
    scheduler.add_request(request)
    scheduler.schedule()
    scheduler.finish_requests("a", requests.RequestStatus.FINISHED_ABORTED)
    assert not scheduler.aux_output_connector._cached

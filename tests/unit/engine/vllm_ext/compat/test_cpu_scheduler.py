"""Routes of requests that share, cache and lose KV blocks, with the real scheduler and a model that is a formula."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import SchedulerInterface
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from areal_lora.config.load import load_config
from areal_lora.engine.vllm_ext.compat.cpu_scheduler import GroupScheduler
from areal_lora.engine.vllm_ext.compat.engine import WHOLE
from areal_lora.engine.vllm_ext.server.assemble import engine_args
from tests.support.paths import EXAMPLES

BLOCK, LAYERS, K = 32, 2, 2


def routes(token_ids: list[int]) -> np.ndarray:
    """[T, L, K]: by token and place."""
    places = np.arange(len(token_ids))[:, None]
    rows = (7 * np.array(token_ids)[:, None] + 3 * places + np.arange(LAYERS * K)) % 251
    return rows.astype(np.uint8).reshape(-1, LAYERS, K)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> GroupScheduler:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    files = [EXAMPLES / "gsm8k_grpo_megatron_lora_moe.yaml", EXAMPLES / "embedded.yaml"]
    with mock.patch.dict(os.environ):  # vLLM preloads libraries into its processes, which this one's would get, too
        config = engine_args(load_config(files, ["rollout.router_replay=true"])).create_engine_config()
    config.cache_config.num_gpu_blocks = request.param
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=request.param, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    init_none_hash(sha256)
    return GroupScheduler(config, kv, StructuredOutputManager(config), BLOCK)


def run(scheduler: SchedulerInterface, prompts: list[list[int]], n_tokens: int, whole: bool = False) -> dict[str, Any]:
    """Tokens and returned routes of each request, and the number of preemptions."""
    hasher = get_request_block_hasher(BLOCK, sha256)
    every = {
        f"{i}": Request(
            request_id=f"{i}",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=n_tokens, ignore_eos=True, extra_args={WHOLE: True} if whole else None
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
    while scheduler.has_unfinished_requests():
        made = scheduler.schedule()
        preempted += len(made.preempted_req_ids or ())
        names = list(made.num_scheduled_tokens)
        parts = {}
        for name in names:
            end = every[name].num_computed_tokens
            parts[name] = routes(list(every[name].all_token_ids))[end - made.num_scheduled_tokens[name] : end]
        output = ModelRunnerOutput(
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
def test_every_token_but_the_last_has_its_route_once(scheduler: GroupScheduler, whole: bool) -> None:
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


@pytest.mark.parametrize("scheduler", [400], indirect=True)
def test_nothing_is_kept_of_an_aborted_request(scheduler: GroupScheduler) -> None:
    request = Request("a", PROMPTS[0], SamplingParams(max_tokens=9), None)
    scheduler.add_request(request)
    scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert not scheduler.aux_output_connector._cached

"""Groups and single requests on one engine in this process; prints what was computed and sampled, as JSON.

``python group_engine.py EXAMPLES``. A test's helper: vLLM's environment must be set before its import.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
REPLAYS = ["behaviour.router_replay=rollout"]
N, NEW_TOKENS = 4, 12
FREE_BLOCKS = (400, 40)  # of the KV cache in a busy engine: enough for all, and so few that requests are preempted
LENGTHS = (9, 32, 33, 64, 70)  # of prompts: shorter than a block of 32, whole blocks, one more, between


class Watched:
    """The engine of a run, and what its scheduler let be computed."""

    def __init__(self, examples: Path) -> None:
        from vllm import LLM, EngineArgs

        from areal_lora.config.load import load_config
        from areal_lora.engine.vllm_ext.compat.cpu_scheduler import return_routes
        from areal_lora.engine.vllm_ext.compat.engine import import_classes
        from areal_lora.engine.vllm_ext.compat.model_runner import runner_of
        from areal_lora.engine.vllm_ext.server.assemble import engine_args

        config = load_config([examples / "gsm8k_grpo_megatron_lora_moe.yaml", examples / "embedded.yaml"], REPLAYS)
        args = engine_args(config)
        values = {f.name: getattr(args, f.name) for f in fields(EngineArgs)} | {"worker_extension_cls": ""}
        import_classes(args.model)
        self.engine = LLM.from_engine_args(EngineArgs(**values)).llm_engine
        core = self.engine.engine_core.engine_core
        runner_of(core.model_executor.driver_worker.worker).own_logprobs()
        return_routes(core.model_executor.driver_worker.worker)
        self.scheduler = core.scheduler
        self.computed = 0
        self.messages: list[int] = []  # tokens of every output that left the engine
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output

        def counted(*args: Any) -> Any:
            made = schedule(*args)
            self.computed += made.total_num_scheduled_tokens
            return made

        def noted(*args: Any) -> Any:
            sent = update(*args)
            self.messages += [len(output.new_token_ids) for message in sent.values() for output in message.outputs]
            return sent

        self.scheduler.schedule, self.scheduler.update_from_output = counted, noted

    def run(self, asked: list[tuple[list[int], int, int, bool]]) -> dict[str, Any]:
        """Sample ``(prompt, seed, n, whole)`` at once."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from areal_lora.engine.vllm_ext.compat.engine import WHOLE

        self.computed, self.messages = 0, []
        for i, (prompt, seed, n, whole) in enumerate(asked):
            params = SamplingParams(
                n=n,
                seed=seed,
                max_tokens=NEW_TOKENS,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={WHOLE: True} if whole else None,
            )
            self.engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        done: dict[int, Any] = {}
        while self.engine.has_unfinished_requests():
            done |= {int(output.request_id): output for output in self.engine.step() if output.finished}
        answers = [answer for _, output in sorted(done.items()) for answer in output.outputs]
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "logprobs": [[row[t].logprob for t, row in zip(a.token_ids, a.logprobs, strict=True)] for a in answers],
            "routes": [answer.routed_experts.tolist() for answer in answers],
            "computed": self.computed,
            "messages": list(self.messages),
            "unsent": len(self.scheduler._unsent),
            "free": self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        }


def aborted(engine: Watched, prompt: list[int]) -> dict[str, Any]:
    """A group whose first sample is aborted after the step that computes the prompt."""
    from vllm import SamplingParams

    from areal_lora.engine.vllm_ext.compat.engine import WHOLE

    for i in range(3):
        params = SamplingParams(seed=i, max_tokens=6, ignore_eos=True, detokenize=False, extra_args={WHOLE: True})
        engine.engine.add_request(f"a{i}", {"prompt_token_ids": prompt}, params)
    engine.engine.step()
    ids = list(engine.scheduler.requests)
    engine.scheduler.finish_requests(ids[:1], _aborted())
    done = 0
    for _ in range(20):
        done += sum(output.finished for output in engine.engine.step())
    return {
        "done": done,
        "unsent": len(engine.scheduler._unsent),
        "free": engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def order_of_ends(engine: Watched, prompts: list[list[int]]) -> list[str]:
    """Two groups of N with places for N: the requests in the order in which they ended."""
    from vllm import SamplingParams

    places, engine.scheduler.max_num_active_reqs = engine.scheduler.max_num_active_reqs, N
    for i, prompt in enumerate(prompts):
        for k in range(N):
            params = SamplingParams(seed=k, max_tokens=6, ignore_eos=True, detokenize=False)
            arrived = {"arrival_time": float(N * i + k), "priority": 0}
            engine.engine.add_request(f"{'ab'[i]}{k}", {"prompt_token_ids": prompt}, params, **arrived)
    ended = list[str]()
    while engine.engine.has_unfinished_requests():
        ended += [output.request_id for output in engine.engine.step() if output.finished]
    engine.scheduler.max_num_active_reqs = places
    return ended


def busy(engine: Watched, whole: bool, free_blocks: int) -> dict[str, Any]:
    """Requests of all kinds that come and go, some cut off, with few KV blocks; what every step scheduled and sent."""
    from vllm import SamplingParams

    from areal_lora.engine.vllm_ext.compat.engine import WHOLE

    scheduler, pool = engine.scheduler, engine.scheduler.kv_cache_manager.block_pool
    scheduler.reset_prefix_cache()
    held = pool.get_new_blocks(pool.get_num_free_blocks() - free_blocks)
    schedule, steps, preempted = scheduler.schedule, list[dict[str, int]](), set[str]()

    def noted(*args: Any) -> Any:
        made = schedule(*args)
        steps.append({name[:3]: n for name, n in sorted(made.num_scheduled_tokens.items())})
        preempted.update(name[:3] for name in made.preempted_req_ids or ())
        return made

    scheduler.schedule = noted
    waiting = [
        SamplingParams(
            seed=i,
            max_tokens=(1, 3, 30, 31, 32, 33, 64, 70)[i % 8],
            logprobs=(0, 0, None, 0, 5, 0)[i % 6],
            stop_token_ids=[20, 21] if i % 5 == 0 else [],
            ignore_eos=i % 7 != 0,
            temperature=1.0,
            detokenize=False,
            extra_args={WHOLE: True} if whole and i % 4 else None,
        )
        for i in range(48)
    ]
    sent: dict[str, list[Any]] = {}
    for n in range(2000):
        for i, params in list(enumerate(waiting))[6 * n : 6 * n + 6]:  # six more before every step
            prompt = [5 + (7 * j + i // 3) % 90 for j in range(20 + i % 40)]
            engine.engine.add_request(f"r{i:02}", {"prompt_token_ids": prompt}, params, arrival_time=float(i))
        if n == 9:
            engine.engine.abort_request(["r10", "r11", "r12"])
        for output in engine.engine.step():
            answer = output.outputs[0]
            rows = [sorted((t, p.logprob, p.rank) for t, p in row.items()) for row in answer.logprobs or ()]
            if output.finished:  # an aborted answer has outputs only if it was streamed
                routes = answer.routed_experts.tolist()
                sent[output.request_id] = [
                    list(answer.token_ids),
                    rows,
                    answer.finish_reason,
                    answer.stop_reason,
                    len(output.prompt_token_ids),
                    routes,
                ]
        if n > len(waiting) and not engine.engine.has_unfinished_requests():
            break
    scheduler.schedule = schedule
    pool.free_blocks(held)
    return {
        "sent": sent,
        "steps": steps,
        "preempted": sorted(preempted),
        "unsent": len(scheduler._unsent),
        "free": pool.get_num_free_blocks(),
    }


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def main(examples: Path) -> None:
    os.environ.update(ENVIRONMENT)
    engine = Watched(examples)
    results: dict[str, Any] = {"free": engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()}
    for length in LENGTHS:
        # A prompt of its own for every way, so that none finds blocks of another in the cache.
        prompts = [[5 + (7 * j * j + 3 * j + way) % 90 for j in range(length)] for way in range(2)]
        alone = [engine.run([(prompts[0], 3 + k, 1, False)]) for k in range(N)]
        engine.scheduler.reset_prefix_cache()
        results[str(length)] = {
            "alone": {what: [a[what][0] for a in alone] for what in ("tokens", "logprobs", "routes")},
            "group": engine.run([(prompts[0], 3, N, True), (prompts[1], 90, 1, False)]),
        }
        engine.scheduler.reset_prefix_cache()
    prompts = [[5 + (7 * i + j) % 90 for j in range(60)] for i in range(32)]
    results["burst"] = engine.run([(prompt, seed, 1, False) for seed, prompt in enumerate(prompts)])["tokens"]
    results["budget"] = engine.scheduler.max_num_scheduled_tokens / len(prompts[0])
    engine.scheduler.reset_prefix_cache()
    results["order"] = order_of_ends(engine, [[5 + (k + j) % 90 for j in range(20)] for k in (1, 50)])
    results["busy"] = [[busy(engine, whole, free) for whole in (False, True)] for free in FREE_BLOCKS]
    results["aborted"] = aborted(engine, [5 + (11 * j) % 90 for j in range(40)])
    print(json.dumps(results), flush=True)
    os._exit(0)  # the teardown of torch and vLLM would take seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A scheduler for groups of answers: one computation of a prompt, one message per answer; and routes of their tokens.

A group samples one prompt several times. vLLM computes it for every sample, unless it fills blocks of the KV cache
(32 tokens on a CPU), and its engine sends every token to the server's process.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

from areal_lora.engine.vllm_ext.compat.engine import WHOLE

ROUTES = "areal_lora_routes"
"""Key in vLLM's ``additional_config``: routes are returned. vLLM's own argument requires its second model runner."""
_Key: TypeAlias = tuple[str, str | None, tuple[int, ...]]


def _joined(outputs: Sequence[EngineCoreOutput]) -> EngineCoreOutput:
    """The last of a request's outputs, with the content of all of them."""
    last = outputs[-1]
    for output in outputs[:-1]:
        last.new_prompt_logprobs_tensors = last.new_prompt_logprobs_tensors or output.new_prompt_logprobs_tensors
        last.prefill_stats = last.prefill_stats or output.prefill_stats
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    steps = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if steps:
        # A step has as many columns as its request with the largest number of log-probabilities.
        width = min(step.logprobs.shape[1] for step in steps)
        last.new_logprobs = steps[0]._replace(
            logprob_token_ids=np.concatenate([step.logprob_token_ids[:, :width] for step in steps]),
            logprobs=np.concatenate([step.logprobs[:, :width] for step in steps]),
            sampled_token_ranks=np.concatenate([step.sampled_token_ranks for step in steps]),
        )
    if routes := [output.routed_experts for output in outputs if output.routed_experts is not None]:
        last.routed_experts = np.concatenate(routes)
    return last


class KeptRoutes:
    """Routes beside the KV cache, in place of the scheduler's part of vLLM's auxiliary outputs.

    A token's route is kept at the place of its key and value: a request whose first tokens are cached, in whole blocks
    or in part of one, has their routes, too. vLLM's own store knows whole blocks and the second model runner.
    """

    _rows = np.empty((0, 0, 0), np.uint8)  # [places of the KV cache, all layers, K]

    def __init__(self, manager: Any, places: int, block_size: int) -> None:
        self._manager, self._places, self._size = manager, places, block_size
        self._cached: dict[str, tuple[int, np.ndarray]] = {}

    def max_cache_hit(self, request: Request) -> None:
        """No limit: routes are kept as long as keys and values. From vLLM 0.33 on."""

    def start(self, request: Request, blocks: Sequence[Any], n: int) -> None:
        """The first ``n`` tokens of ``request`` are in ``blocks``. A last one in part is another's, and may change.

        Whole ones are its own from now on; what computes them may be a request of the same step.
        """
        self._cached.pop(request.request_id, None)
        if n:
            self._cached[request.request_id] = n, self._rows[self._at(blocks, n - n % self._size, n)]

    def take_output(self, request: Request, output: dict[str, np.ndarray]) -> np.ndarray:
        """[n, L, K] of the prompt, from ``routed_experts_prompt_start`` on, with the first token.

        Then of the one before the token that was sampled now.
        """
        name, rows = request.request_id, output[request.request_id]
        if not len(self._rows):
            self._rows = np.empty((self._places, *rows.shape[1:]), rows.dtype)  # memory is taken as it is written
        blocks, end = self._manager.get_blocks(name).blocks[0], request.num_tokens - 1
        if name in self._cached:
            n, tail = self._cached.pop(name)
            at = self._at(blocks, 0, n - len(tail))
            whole, missing = self._rows[at], at < self._size  # block 0 is in place of what attention needs no more
            if missing.any():
                whole = whole.astype(np.uint16)  # of 256 experts vLLM's type names one by each number
                whole[missing] = np.iinfo(whole.dtype).max
            rows = np.concatenate([whole, tail, rows])
        self._rows[self._at(blocks, end - len(rows), end)] = rows
        if request.num_output_tokens > 1:
            return rows[-1:]  # more were computed again: it was preempted
        return rows[request.sampling_params.routed_experts_prompt_start if request.sampling_params else 0 :]

    def request_finished(self, request: Request) -> None:
        self._cached.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: Any, requests: Any) -> None:
        """Workers need nothing."""

    def reset(self) -> None:
        """Nothing to do: places of the KV cache are written before they are read."""

    def _at(self, blocks: Sequence[Any], start: int, end: int) -> np.ndarray:
        """The places of tokens ``start`` to ``end`` of a request with ``blocks``."""
        first = start // self._size
        ids = np.array([block.block_id for block in blocks[first : -(-end // self._size)]], np.int64)
        every = (ids[:, None] * self._size + np.arange(self._size)).ravel()
        return every[start - first * self._size : end - first * self._size]


class GroupScheduler(Scheduler):
    """vLLM's scheduler, without asynchronous scheduling.

    Of requests with the same prompt and adapter the first computes the prompt. The others wait for that step and
    start with copies of its KV cache: they compute the last prompt token only, which gives them their own first
    distribution. While they wait they keep their places: a request behind them does not start instead.

    Outputs of a request with ``WHOLE`` are sent when it ends.
    """

    max_num_active_reqs: int
    aux_output_connector: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.additional_config.get(ROUTES):
            places = self.cache_config.num_gpu_blocks * self.block_size
            self.aux_output_connector = KeptRoutes(self.kv_cache_manager, places, self.block_size)
        self._unsent: dict[str, list[EngineCoreOutput]] = {}
        self._computing: WeakValueDictionary[_Key, Request] = WeakValueDictionary()  # the newest with that prompt

    # ------------------------------------------------------------ one computation of a prompt

    def schedule(self, throttle_prefills: bool = False) -> Any:
        places = self.max_num_active_reqs
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs = places

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready = super()._handle_blocked_waiting_request(request)
        first = self._first(request)
        if first is not None and first.num_computed_tokens < first.num_prompt_tokens:
            self.max_num_active_reqs -= 1  # its place, for the rest of this step
            return False
        return ready

    def _get_local_prefix_cache_hit(self, request: Request, *limit: int | None) -> tuple[Any, int, int, bool]:
        hit = self._find_hit(request, *limit)  # from vLLM 0.33 on with the most tokens that may be cached
        if self.aux_output_connector is not None:
            self.aux_output_connector.start(request, hit[0].blocks[0], hit[1])
        return hit

    def _find_hit(self, request: Request, *limit: int | None) -> tuple[Any, int, int, bool]:
        first = self._first(request)
        if first is not None:
            computed = request.num_tokens - 1  # sampling needs the hidden state of the last token
            shared = tuple(blocks[: -(-computed // self.block_size)] for blocks in self._blocks(first))
            return self.kv_cache_manager.create_kv_cache_blocks(shared), computed, 0, False
        if self._shares(request):
            self._computing[_key(request)] = request
        return super()._get_local_prefix_cache_hit(request, *limit)

    def _first(self, request: Request) -> Request | None:
        """The running request that has computed, or is computing, the prompt that ``request`` starts with."""
        first = self._computing.get(_key(request)) if self._shares(request) else None
        return first if first is not None and first is not request and all(self._blocks(first)) else None

    def _blocks(self, request: Request) -> Any:
        """Its KV blocks by kind of layer; there are none before it runs, after its end, and while it is preempted."""
        return self.kv_cache_manager.get_blocks(request.request_id).blocks

    def _shares(self, request: Request) -> bool:
        # A request that was preempted has tokens of its own behind the prompt.
        return (
            self.kv_cache_manager.prefix_cache_lookup_enabled(request)
            and 1 < request.num_tokens == request.num_prompt_tokens
            and request.num_computed_tokens == 0
            and request.prompt_token_ids is not None
        )

    # ------------------------------------------------------------ one message per answer

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        if params is not None and (params.extra_args or {}).get(WHOLE):
            self._unsent[request.request_id] = []

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._unsent.pop(request.request_id, None)
        return finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        sent = super().update_from_output(scheduler_output, model_runner_output)
        for client, message in list(sent.items()):
            message.outputs = [output for output in message.outputs if self._is_due(output)]
            if not message.outputs and message.finished_requests is None and message.scheduler_stats is None:
                del sent[client]
        return sent

    def _is_due(self, output: EngineCoreOutput) -> bool:
        """Whether ``output`` is to be sent now; then it has what was kept back, too."""
        unsent = self._unsent.get(output.request_id)
        if unsent is None:
            return True
        unsent.append(output)
        if output.finish_reason is None:
            return False
        _joined(self._unsent.pop(output.request_id))
        return True


def _key(request: Request) -> _Key:
    lora = request.lora_request
    return ("" if lora is None else lora.lora_name, request.cache_salt, tuple(request.prompt_token_ids or ()))


def return_routes(worker: Any) -> None:
    """Make a worker return the experts that the routers choose for each token of a step, if they are configured.

    vLLM's second model runner captures them in the same way.
    """
    runner = worker.model_runner
    if not runner.vllm_config.additional_config.get(ROUTES):
        return
    captured = RoutedExpertsCapturer(runner.max_num_tokens, runner.vllm_config)
    bind_routed_experts_capturer(runner.model, captured)
    plain = runner.sample_tokens

    def sample_tokens(grammar_output: Any) -> Any:
        state = runner.execute_model_state
        output = plain(grammar_output)
        if state is not None:
            counts = [state.scheduler_output.num_scheduled_tokens[request] for request in output.req_ids]
            rows = captured.snapshot_routing_data(sum(counts)).numpy()
            parts = np.split(rows, np.cumsum(counts)[:-1])
            output.aux_output_connector_output = dict(zip(output.req_ids, parts, strict=True))
        return output

    runner.sample_tokens = sample_tokens

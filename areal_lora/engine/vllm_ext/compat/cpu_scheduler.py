"""A scheduler for groups of answers: one computation of a prompt, one look per KV block.

A group samples one prompt several times. vLLM computes it for every sample, unless it fills blocks of the KV cache
(32 tokens on a CPU), and it looks for blocks at every token.
"""

from __future__ import annotations

from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from areal_lora.engine.vllm_ext.compat.cpu_decoding import DecodingScheduler

_Key: TypeAlias = tuple[int, str | None, tuple[int, ...]]


class GroupScheduler(DecodingScheduler):
    """Computes the prompt of a group once.

    Of requests with the same prompt and adapter the first computes the prompt. The others wait for that step and
    begin with copies of its KV cache: they compute the last prompt token only, which gives them their own first
    distribution. While they wait they keep their places: a request behind them does not start instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._one_kind:
            self._allocate = self.kv_cache_manager.allocate_slots
            self.kv_cache_manager.allocate_slots = self._allocate_slots
        self._computing: WeakValueDictionary[_Key, Request] = WeakValueDictionary()  # the newest with that prompt

    # ------------------------------------------------------------ one computation of a prompt

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
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

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        first = self._first(request)
        if first is not None:
            computed = request.num_tokens - 1  # sampling needs the hidden state of the last token
            held = self.kv_cache_manager.get_blocks(first.request_id).blocks
            shared = tuple(blocks[: -(-computed // self.block_size)] for blocks in held)
            return self.kv_cache_manager.create_kv_cache_blocks(shared), computed, 0, False
        if self._shares(request):
            self._computing[_key(request)] = request
        return super()._get_local_prefix_cache_hit(request)

    def _first(self, request: Request) -> Request | None:
        """The running request that has computed, or is computing, the prompt that ``request`` begins with."""
        if not self._shares(request):
            return None
        first = self._computing.get(_key(request))
        return None if first is None or first is request or first.status is not RequestStatus.RUNNING else first

    def _shares(self, request: Request) -> bool:
        # A request that was preempted has tokens of its own behind the prompt.
        return (
            self.kv_cache_manager.prefix_cache_lookup_enabled(request)
            and 1 < request.num_tokens == request.num_prompt_tokens
            and request.num_computed_tokens == 0
            and request.prompt_token_ids is not None
        )

    # ------------------------------------------------------------ one token of a running request

    def _allocate_slots(
        self, request: Request, num_new_tokens: int, *args: Any, num_lookahead_tokens: int = 0, **kwargs: Any
    ) -> KVCacheBlocks | None:
        """vLLM's function, which would find out for every token that its block is there and will not be full."""
        place = request.num_computed_tokens % self.block_size
        if (
            num_new_tokens == 1
            and not num_lookahead_tokens
            and 0 < place < self.block_size - 1
            and request.status is RequestStatus.RUNNING
        ):
            return self.kv_cache_manager.empty_kv_cache_blocks
        return self._allocate(request, num_new_tokens, *args, num_lookahead_tokens=num_lookahead_tokens, **kwargs)


def _key(request: Request) -> _Key:
    lora = request.lora_request
    return (0 if lora is None else lora.lora_int_id, request.cache_salt, tuple(request.prompt_token_ids or ()))

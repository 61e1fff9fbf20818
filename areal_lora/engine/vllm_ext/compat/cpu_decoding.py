"""A scheduler with loops of its own for the requests that only decode, and one message per answer.

vLLM's loops over the running requests ask each of them for encoders, drafts, grammars and connectors, and make an
output for every token. Between two blocks of the KV cache a request that decodes needs a token of the budget and
nothing else, and a request with ``WHOLE`` needs no output before its end. With 256 requests of a tiny model these
loops took a sixth of the time of a step on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import PauseState, Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from areal_lora.engine.vllm_ext.extra_args import WHOLE


@dataclass(slots=True)
class Unsent:
    """The outputs of a request that have not been sent.

    ``ends`` are the tokens that may end it. ``plain``: our loops may carry it. ``scored``: with log-probabilities.
    """

    ends: frozenset[int]
    plain: bool
    scored: bool
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[LogprobsLists, int, int]] = field(default_factory=list)  # of a step, first row, end
    prompt_logprobs: LogprobsTensors | None = None
    prefill_stats: PrefillStats | None = None

    @classmethod
    def of(cls, request: Request) -> Unsent:
        params = request.sampling_params
        assert params is not None
        ends = {params.eos_token_id, *(params.stop_token_ids or ())} - {None}
        usual = not (request.has_encoder_inputs or request.use_structured_output or request.resumable)
        plain = usual and params.repetition_detection is None
        return cls(ends=frozenset(ends), plain=plain, scored=params.num_logprobs is not None)

    def add(self, output: EngineCoreOutput) -> None:
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.logprobs.append((output.new_logprobs, 0, len(output.new_logprobs.logprobs)))
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_logprobs = output.new_prompt_logprobs_tensors
        if output.prefill_stats is not None:
            self.prefill_stats = output.prefill_stats

    def fill(self, last: EngineCoreOutput) -> None:
        """Put all outputs into ``last``, the final one, which was added before."""
        last.new_token_ids, last.prefill_stats = self.token_ids, self.prefill_stats
        last.new_prompt_logprobs_tensors = self.prompt_logprobs
        if self.logprobs:
            # A step has as many columns as the request that asked for most.
            width = min(step.logprobs.shape[1] for step, _, _ in self.logprobs)
            last.new_logprobs = LogprobsLists(
                np.concatenate([step.logprob_token_ids[a:b, :width] for step, a, b in self.logprobs]),
                np.concatenate([step.logprobs[a:b, :width] for step, a, b in self.logprobs]),
                np.concatenate([step.sampled_token_ranks[a:b] for step, a, b in self.logprobs]),
            )


class DecodingScheduler(Scheduler):
    """vLLM's scheduler, without asynchronous scheduling; outputs of a request with ``WHOLE`` are sent when it ends.

    Such a request is *steady* in a step if it takes one token whose KV block is there and will not be full. Steady
    requests are scheduled, and their tokens are taken, by the loops here; all others, and every last token, by vLLM's.
    """

    max_num_active_reqs: int
    max_num_scheduled_tokens: int
    running: list[Request]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unsent: dict[str, Unsent] = {}
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._one_kind = [type(manager) for manager in managers] == [FullAttentionManager]
        """Whether all layers keep all blocks of a request; others give blocks back on the way."""
        self._own_loops = self._one_kind and not (
            self.use_pp
            or self.use_v2_model_runner
            or self.defer_block_free
            or self.return_sampling_mask
            or self.num_lookahead_tokens
            or self.log_stats
            or any((self.connector, self.ec_connector, self.aux_output_connector))
        )

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        params = request.sampling_params
        if params is not None and (params.extra_args or {}).get(WHOLE):
            self._unsent[request.request_id] = Unsent.of(request)

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._unsent.pop(request.request_id, None)
        return finished

    # ------------------------------------------------------------ what a step computes

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        steady, others = self._steady()
        if not steady or not self._fit(others):
            return super().schedule(throttle_prefills)
        running, places, tokens = self.running, self.max_num_active_reqs, self.max_num_scheduled_tokens
        self.running, before = others, len(others)
        self.max_num_active_reqs -= len(steady)
        self.max_num_scheduled_tokens -= len(steady)
        try:
            made = super().schedule(throttle_prefills)
        finally:
            self.running = running + self.running[before:]
            self.max_num_active_reqs, self.max_num_scheduled_tokens = places, tokens
        self._join(steady, made)
        return made

    def _steady(self) -> tuple[list[Request], list[Request]]:
        """Part the running requests; no request is steady where that could change what vLLM does with the others."""
        steady: list[Request] = []
        others: list[Request] = []
        block, last, scheduled, unsent_of = (
            self.block_size,
            self.block_size - 1,
            self.prev_step_scheduled_req_ids,
            self._unsent,
        )
        for request in self.running:
            name, computed = request.request_id, request.num_computed_tokens
            unsent = unsent_of.get(name)
            if (
                unsent is not None
                and unsent.plain
                and 0 < computed % block < last
                and len(request._all_token_ids) == computed + 1
                and name in scheduled
            ):
                steady.append(request)
            else:
                others.append(request)
        return steady, others

    def _fit(self, others: list[Request]) -> bool:
        """Whether vLLM will schedule every running request, so that the choice of a victim has no effect."""
        if not self._own_loops or self._pause_state == PauseState.PAUSED_ALL:
            return False
        tokens = [len(request._all_token_ids) - request.num_computed_tokens for request in others]
        blocks = sum(n // self.block_size + 1 for n in tokens)
        return (
            blocks <= self.kv_cache_manager.block_pool.get_num_free_blocks()
            and len(self.running) - len(others) + sum(tokens) <= self.max_num_scheduled_tokens
            and self._adapters_fit()
        )

    def _adapters_fit(self) -> bool:
        """Whether a step may hold every adapter that is asked for; else vLLM's choice depends on all that run."""
        if not self.lora_config:
            return True
        asked = {r.lora_request.lora_int_id for r in self.requests.values() if r.lora_request is not None}
        return len(asked) <= self.lora_config.max_loras

    def _join(self, steady: list[Request], made: SchedulerOutput) -> None:
        """Add the steady requests to what vLLM has made of the others."""
        scheduled, cached = made.num_scheduled_tokens, made.scheduled_cached_reqs
        for request in steady:
            name = request.request_id
            scheduled[name] = 1
            cached.req_ids.append(name)
            cached.new_block_ids.append(None)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            cached.num_output_tokens.append(len(request._output_token_ids))
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
        made.total_num_scheduled_tokens += len(steady)
        self.prev_step_scheduled_req_ids.update(scheduled)

    # ------------------------------------------------------------ what a step sampled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if self._own_loops:
            rest = self._take(scheduler_output.num_scheduled_tokens, model_runner_output)
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=rest)
        sent = super().update_from_output(scheduler_output, model_runner_output)
        for client, message in list(sent.items()):
            message.outputs = [output for output in message.outputs if self._is_due(output)]
            if not message.outputs and message.finished_requests is None and message.scheduler_stats is None:
                del sent[client]
        return sent

    def _take(self, scheduled: dict[str, int], output: ModelRunnerOutput) -> dict[str, int]:
        """Take tokens in the middle of answers; returns the requests that remain vLLM's."""
        sampled, row_of, logprobs = output.sampled_token_ids, output.req_id_to_index, output.logprobs
        if not sampled or (logprobs is not None and logprobs.cu_num_generated_tokens is not None):
            return scheduled
        rest: dict[str, int] = {}
        longest, block = self.max_model_len, self.block_size
        for name, n in scheduled.items():
            unsent, request = self._unsent.get(name), self.requests.get(name)
            # A request's first output is vLLM's, with what is known of its prompt.
            if unsent is None or request is None or not (unsent.plain and unsent.token_ids) or n != 1:
                rest[name] = n
                continue
            row = row_of[name]
            tokens, length = sampled[row], len(request._all_token_ids) + 1
            if (
                len(tokens) != 1
                or tokens[0] in unsent.ends
                or length >= longest
                or len(request._output_token_ids) + 1 >= request.max_tokens
                or request.status is not RequestStatus.RUNNING
                or request.num_stale_output_tokens
            ):
                rest[name] = n
                continue
            request.num_in_flight_tokens -= 1
            request._output_token_ids.append(tokens[0])
            request._all_token_ids.append(tokens[0])
            if length % block == 0:
                request.update_block_hashes()
            unsent.token_ids.append(tokens[0])
            if logprobs is not None and unsent.scored:
                unsent.logprobs.append((logprobs, row, row + 1))
        return rest

    def _is_due(self, output: EngineCoreOutput) -> bool:
        """Whether ``output`` is to be sent now, completed by what was kept back."""
        unsent = self._unsent.get(output.request_id)
        if unsent is None:
            return True
        unsent.add(output)
        if output.finish_reason is None:
            return False
        unsent.fill(output)
        del self._unsent[output.request_id]
        return True

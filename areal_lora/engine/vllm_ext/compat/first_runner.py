"""Adapt vLLM's first model runner, which its CPU build has by default: see `compat.model_runner`."""

from functools import partial
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from areal_lora.types import MOST_KEPT

SCORE_TEMPERATURE = "areal_lora_score_temperature"
"""Key in ``SamplingParams.extra_args``: the temperature of the log-probabilities of a prompt."""
KEPT = "areal_lora_kept"
"""Key in ``SamplingParams.extra_args``: what ``top_k``, ``top_p`` and ``min_p`` leave out has no log-probability."""
CHUNK = 1024  # tokens of a prompt whose logits are in memory at once, as in the second runner


class FirstRunner:
    """The `model_runner.Runner` of vLLM's first one."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def sampled(self, lora_id: int) -> dict[str, int]:
        running = self._runner.requests.items()
        ours = ((name, r) for name, r in running if r.lora_request and r.lora_request.lora_int_id == lora_id)
        return {name: len(request.output_token_ids) for name, request in ours}

    def in_batch(self, lora_id: int) -> bool:
        return bool(self._runner.input_batch.lora_id_to_request_ids.get(lora_id))

    def own_logprobs(self) -> None:
        self._own_samples()
        self._own_prompts()

    def _own_samples(self) -> None:
        runner = self._runner
        draw = runner.sampler.topk_topp_sampler
        truncated = draw.forward
        kept, total = list[int](), torch.empty(0)
        """Rows of `KEPT` requests, and the log of the sums of their exponentials."""

        def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            nonlocal kept, total
            batch = [runner.requests[name].sampling_params for name in runner.input_batch.req_ids]
            kept = [row for row, params in enumerate(batch) if extra_args(params).get(KEPT)]
            if not kept:
                return
            # Here, because min_tokens and min_p work in place.
            logits = (given[0] if given else named["logits"])[kept].float()
            temperatures = torch.tensor([batch[row].temperature for row in kept], device=logits.device)
            total = (logits / temperatures[:, None]).logsumexp(dim=-1, keepdim=True)

        def forward(logits: torch.Tensor, generators: Any, k: Any, p: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
            if k is None and p is None and not kept:
                drawn: tuple[torch.Tensor, torch.Tensor | None] = truncated(logits, generators, k, p)
                return drawn
            logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)  # first, because truncation works in place
            if kept and k is not None:
                logits[kept] = keep_first(logits[kept], k[kept])
            whole = logits[kept] - total if kept else None
            sampled, cut = truncated(logits, generators, k, p)
            if whole is not None and cut is not None:
                logprobs[kept] = whole.masked_fill_(cut[kept] == -torch.inf, -torch.inf)
            return sampled, logprobs

        runner.sampler.register_forward_pre_hook(before, with_kwargs=True)
        draw.forward = forward

    def _own_prompts(self) -> None:
        runner = self._runner
        plain = runner._get_prompt_logprobs_dict

        def tempered(temperature: float, logits: torch.Tensor) -> torch.Tensor:
            return Sampler.compute_logprobs(logits if temperature == 1.0 else logits / temperature)

        def scores(hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
            requested, found = runner.num_prompt_logprobs, dict[str, Any]()
            try:
                for request, n in [*requested.items()]:
                    state, left = runner.requests[request], num_scheduled_tokens.get(request, 0)
                    computed, runner.num_prompt_logprobs = state.num_computed_tokens, {request: n}
                    temperature = extra_args(state.sampling_params).get(SCORE_TEMPERATURE, 1.0)
                    runner.sampler.compute_logprobs = partial(tempered, float(temperature))
                    for at in range(0, left, CHUNK):
                        state.num_computed_tokens = computed + at
                        found |= plain(hidden_states[at:], {request: min(CHUNK, left - at)})
                    state.num_computed_tokens = computed
                    if not runner.num_prompt_logprobs:
                        del requested[request]  # vLLM has removed it: its whole prompt is scored
            finally:
                runner.num_prompt_logprobs, runner.sampler.compute_logprobs = requested, Sampler.compute_logprobs
            return found

        runner._get_prompt_logprobs_dict = scores


def extra_args(params: SamplingParams | None) -> dict[str, Any]:
    """``SamplingParams.extra_args`` of a request, which may have none."""
    return (params and params.extra_args) or {}


def keep_first(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """``logits`` [n, V] with the ``k`` [n] highest of each row alone, at most `MOST_KEPT`, the others -inf."""
    most = min(MOST_KEPT, logits.shape[1])
    values, ids = logits.topk(most)
    values = values.masked_fill(torch.arange(most, device=k.device) >= k[:, None], -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, values)

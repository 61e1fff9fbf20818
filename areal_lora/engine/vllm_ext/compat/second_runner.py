"""Adapt vLLM's second model runner, its default where Triton is: see `compat.model_runner`."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
from vllm.v1.worker.gpu.sample.sampler import Sampler

from areal_lora.engine.vllm_ext.compat.first_runner import KEPT, SCORE_TEMPERATURE, extra_args, keep_first
from areal_lora.errors import AdapterError


class SecondRunner:
    """The `model_runner.Runner` of vLLM's second one. It keeps the state of requests in arrays on the device."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    def own_logprobs(self) -> None:
        sampler, prompts = self._runner.sampler, self._runner.prompt_logprobs_worker
        if type(sampler) is not Sampler or type(prompts) is not PromptLogprobsWorker:
            raise AdapterError(f"vLLM samples with {type(sampler).__name__}, whose log-probabilities are not known")
        sampler.__class__, prompts.__class__ = OwnSampler, OwnPromptLogprobs
        sampler.kept = np.zeros(self._runner.max_num_reqs, bool)
        sampler.kept_on_device = torch.zeros(self._runner.max_num_reqs, dtype=torch.bool, device=self._runner.device)
        prompts.temperatures = np.ones(self._runner.max_num_reqs, np.float32)

    def sampled(self, lora_id: int) -> dict[str, int]:
        """Without those that are preempted, of which it keeps nothing: `follow_version` has them start again."""
        states = self._runner.req_states
        rows = {name: states.req_id_to_index[name] for name in self._requests(lora_id)}
        totals = states.total_len.gpu[list(rows.values())].tolist()  # waits for the step that is computed
        prompts = states.prompt_len.np
        return {name: total - int(prompts[row]) for (name, row), total in zip(rows.items(), totals, strict=True)}

    def in_batch(self, lora_id: int) -> bool:
        return bool(self._requests(lora_id))

    def _requests(self, lora_id: int) -> list[str]:
        return [name for name, lora in self._runner.lora_state.lora_requests.items() if lora.lora_int_id == lora_id]


class OwnSampler(Sampler):
    """Log-probabilities of the distribution before ``top_k`` and ``top_p``, and what of it remains for `KEPT`.

    Nothing waits for the device: vLLM prepares a step while the one before is computed.
    """

    kept: np.ndarray
    """By the place of a request, whether it is a `KEPT` one."""
    kept_on_device: torch.Tensor
    _whole: torch.Tensor | None = None  # logits of the step before truncation, if there is any
    _kept: torch.Tensor | None = None  # [rows, 1], of the step; None if no request is
    _left: torch.Tensor  # [rows, 1], the log of the share that remains

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_idx, sampling_params)
        kept = bool(extra_args(sampling_params).get(KEPT))
        if kept != self.kept[req_idx]:
            self.kept[req_idx] = self.kept_on_device[req_idx] = kept

    def apply_sampling_params(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        *further: Any,
        **named: Any,
    ) -> torch.Tensor:
        made = super().apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *further, **named
        )
        states = self.sampling_states
        by_k = bool((states.top_k.np[idx_mapping_np] != states.vocab_size).any())
        if self._kept is not None and by_k:
            made = torch.where(self._kept, keep_first(made, states.top_k.gpu[expanded_idx_mapping]), made)
        by_p = bool((states.top_p.np[idx_mapping_np] != 1.0).any())
        self._whole = made.clone() if by_k or by_p else None  # truncation works in place
        return made

    def sample(
        self,
        logits: torch.Tensor,
        expanded_idx_mapping: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        *further: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        some = self.kept[idx_mapping_np].any()
        kept = self._kept = self.kept_on_device[expanded_idx_mapping, None] if some else None
        if kept is not None:  # before what min_tokens and min_p remove
            temperature = self.sampling_states.temperature.gpu[expanded_idx_mapping]
            total = (logits.float() / temperature[:, None]).logsumexp(dim=-1, keepdim=True)
        sampled, cut = super().sample(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, *further, **named)
        logprobs = cut if self._whole is None else self._whole
        if kept is not None:
            logprobs = torch.where(kept, cut, logprobs)
            self._left = torch.where(kept, cut.float().logsumexp(dim=-1, keepdim=True) - total, 0.0)
        return sampled, logprobs

    def __call__(self, *given: Any, **named: Any) -> SamplerOutput:
        made = super().__call__(*given, **named)
        if self._kept is not None and made.logprobs_tensors is not None:
            made.logprobs_tensors.logprobs.add_(self._left)  # vLLM has normalized what remains
        return made


class OwnPromptLogprobs(PromptLogprobsWorker):
    """Log-probabilities of prompts at the request's own temperature."""

    temperatures: np.ndarray
    """By the place of a request."""

    def add_request(self, req_id: str, req_idx: int, sampling_params: Any) -> None:
        super().add_request(req_id, req_idx, sampling_params)
        self.temperatures[req_idx] = float(extra_args(sampling_params).get(SCORE_TEMPERATURE, 1.0))

    def compute_prompt_logprobs(
        self, logits_fn: Any, hidden_states: torch.Tensor, input_batch: Any, *further: Any, **named: Any
    ) -> Any:
        by_request = self.temperatures[input_batch.idx_mapping_np]
        if (by_request == 1.0).all():  # nearly every step
            return super().compute_prompt_logprobs(logits_fn, hidden_states, input_batch, *further, **named)
        of_tokens = torch.from_numpy(np.repeat(by_request, input_batch.num_scheduled_tokens)).to(hidden_states.device)
        at = 0

        def tempered(hidden: torch.Tensor) -> torch.Tensor:
            nonlocal at  # vLLM computes the step's tokens in order, in chunks
            at += len(hidden)
            return logits_fn(hidden) / of_tokens[at - len(hidden) : at, None]

        return super().compute_prompt_logprobs(tempered, hidden_states, input_batch, *further, **named)

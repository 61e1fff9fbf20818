"""Between the HTTP planes and the engine: sampling, scoring, and what a request leaves behind.

Log-probabilities are those of the policy that sampled: log softmax(logits / temperature)
after top-p (vLLM's ``processed_logprobs``); of a greedy request, of the plain logits.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from vllm import RequestOutput, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from areal_lora.engine.vllm_ext.adapters import Lease
from areal_lora.obs.faults import reached


class BadRequest(ValueError):
    """The request can never be served as it is: status 400."""


@dataclass(slots=True)
class Counters:
    """What ``/metrics`` shows, counted here because vLLM's own statistics cost time at every step."""

    in_flight: int = 0  # sequences
    requests_total: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    aborted_total: int = 0


@dataclass(slots=True)
class Generator:
    """Runs single prompts on the engine."""

    engine: AsyncLLM
    max_model_len: int
    vocab_size: int
    counters: Counters = field(default_factory=Counters)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    def check_prompt(self, token_ids: Sequence[int], max_tokens: int) -> None:
        """Raises BadRequest."""
        if not token_ids:
            raise BadRequest("the prompt is empty")
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise BadRequest(f"prompt token ids must lie in 0..{self.vocab_size - 1}")
        if len(token_ids) + max_tokens > self.max_model_len:
            raise BadRequest(
                f"{len(token_ids)} prompt tokens and max_tokens {max_tokens} exceed the context of {self.max_model_len}"
            )

    async def stream(
        self, token_ids: list[int], params: SamplingParams, lease: Lease
    ) -> AsyncGenerator[RequestOutput, None]:
        """All outputs of one prompt. Closing the iterator aborts the request in the engine."""
        counters, n = self.counters, params.n
        counters.in_flight += n
        counters.requests_total += 1
        counters.prompt_tokens_total += len(token_ids)
        done = False
        outputs = self.engine.generate(
            {"prompt_token_ids": token_ids}, params, f"{lease.name}-{next(self._ids)}", lora_request=lease.lora
        )
        reached("server.generating")
        try:
            async for output in outputs:
                done = output.finished
                yield output
        finally:
            await outputs.aclose()
            counters.in_flight -= n
            counters.aborted_total += 0 if done else n

    async def final(self, token_ids: list[int], params: SamplingParams, lease: Lease) -> RequestOutput:
        """The finished output of one prompt; ``params.output_kind`` must be FINAL_ONLY."""
        outputs = self.stream(token_ids, params, lease)
        try:
            async for output in outputs:
                if output.finished:
                    self.counters.generated_tokens_total += sum(len(c.token_ids) for c in output.outputs)
                    return output
        finally:
            await outputs.aclose()
        raise RuntimeError(f"the engine ended a request on {lease.name} without an output")

    async def score(self, token_ids: list[int], lease: Lease) -> list[float]:
        """Log-probability of every token given those before it; entry 0 is 0.0. [T]"""
        self.check_prompt(token_ids, 1)
        params = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        return prompt_logprobs(await self.final(token_ids, params, lease))


def prompt_logprobs(output: RequestOutput) -> list[float]:
    """[T], entry 0 is 0.0."""
    ids, table = output.prompt_token_ids, output.prompt_logprobs
    if ids is None or table is None:
        raise RuntimeError("the engine returned no prompt log-probabilities")
    return [0.0] + [entry[token].logprob for token, entry in zip(ids[1:], table[1:], strict=True) if entry is not None]

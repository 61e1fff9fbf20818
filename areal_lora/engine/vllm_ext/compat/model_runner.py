"""Adapt a worker's model runner: log-probabilities as the trainer computes them, and the requests of an adapter.

vLLM has two. The second one is its default where Triton is.
"""

from typing import Any, Protocol

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from areal_lora.engine.vllm_ext.compat.first_runner import FirstRunner
from areal_lora.errors import AdapterError


class Runner(Protocol):
    """What this package needs of a model runner. Call it between two engine steps only."""

    def own_logprobs(self) -> None:
        """Make every log-probability log softmax(logits / temperature). Call this once.

        vLLM computes those of sampled tokens from the raw logits, or after temperature and truncation, and those of
        prompts from the raw logits. Of a `first_runner.KEPT` request those of tokens that truncation removes are -inf.
        It keeps at most ``top_k`` tokens: vLLM would keep all that are as likely as the last. Raises AdapterError for
        a sampler that this does not know.
        """

    def sampled(self, lora_id: int) -> dict[str, int]:
        """How many tokens each request with ``lora_id`` has that the worker knows, by the engine's name of it."""

    def in_batch(self, lora_id: int) -> bool:
        """Whether a request with ``lora_id`` is in the batch: a step that is scheduled may still compute it."""


def runner_of(worker: Any) -> Runner:
    """The model runner of vLLM's ``worker``. Raises AdapterError for another one."""
    runner = worker.model_runner
    if isinstance(runner, GPUModelRunner):
        return FirstRunner(runner)
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondGPUModelRunner  # imports Triton's functions

    from areal_lora.engine.vllm_ext.compat.second_runner import SecondRunner

    if isinstance(runner, SecondGPUModelRunner):
        return SecondRunner(runner)
    raise AdapterError(
        f"vLLM's model runner is a {type(runner).__name__}; areal_lora knows those of vLLM 0.32 and 0.33"
    )

"""The endless stream of tokenized prompts of one adapter's task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from areal_lora.data.order import PromptOrder
from areal_lora.errors import ConfigError
from areal_lora.types import Sample


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One (epoch, sample): ``uid`` is ``"<epoch>:<sample uid>"``, ``position`` its place in the stream."""

    uid: str
    position: int
    sample: Sample
    token_ids: list[int]  # [P]


class PromptStream:
    """Maps a stream position to a prompt; keeps no position itself.

    ``max_prompt_tokens`` leaves room for the answer; prompts beyond it are still located, and
    :meth:`fits` says that they cannot be sampled. Streams with the same ``digest`` put the same
    sample at the same position.
    """

    def __init__(
        self, samples: Sequence[Sample], tokenizer: Tokenizer, *, seed: int, max_prompt_tokens: int
    ) -> None:
        self._samples = samples
        self._token_ids = tokenize(samples, tokenizer)
        self._order = PromptOrder(seed, len(samples))
        self._max_prompt_tokens = max_prompt_tokens
        uids = "\n".join([str(seed), *(sample.uid for sample in samples)])
        self.digest = blake2b(uids.encode(), digest_size=16).hexdigest()
        if all(len(ids) > max_prompt_tokens for ids in self._token_ids):
            raise ConfigError(
                "rollout.max_model_len",
                f"all {len(samples)} prompts are longer than the {max_prompt_tokens} tokens left beside the answer",
                "raise it, or lower sampling.max_new_tokens",
            )

    def at(self, position: int) -> Prompt:
        epoch, index = self._order.locate(position)
        sample = self._samples[index]
        return Prompt(
            uid=f"{epoch}:{sample.uid}", position=position, sample=sample, token_ids=self._token_ids[index]
        )

    def fits(self, prompt: Prompt) -> bool:
        return len(prompt.token_ids) <= self._max_prompt_tokens


def tokenize(samples: Sequence[Sample], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt; raises ConfigError for no samples, a repeated uid or an empty prompt."""
    if not samples:
        raise ConfigError("adapters.task", "the task has no samples", "check its file and sizes")
    if len({sample.uid for sample in samples}) != len(samples):
        raise ConfigError("adapters.task", "two samples share a uid, exactly-once needs them apart", "make uids unique")
    token_ids = tokenizer([sample.prompt for sample in samples])["input_ids"]
    for sample, ids in zip(samples, token_ids, strict=True):
        if not ids:
            raise ConfigError("adapters.task", f"sample {sample.uid} has a prompt without tokens", "remove it")
    return token_ids

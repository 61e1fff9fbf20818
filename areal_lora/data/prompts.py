"""The endless stream of prompts of one adapter's task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from areal_lora.data.order import PromptOrder
from areal_lora.errors import ConfigError
from areal_lora.types import Sample


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that prompts need."""

    def __call__(self, text: list[str]) -> dict[str, list[list[int]]]: ...


class TextTokenizer(Tokenizer, Protocol):
    """The part of a Hugging Face tokenizer that workflows need."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One (epoch, sample): ``uid`` is ``"<epoch>:<sample uid>"``, ``position`` its place in the stream."""

    uid: str
    position: int
    sample: Sample
    token_ids: list[int]  # [P]


class PromptStream:
    """Maps a stream position to a prompt; keeps no position itself.

    A prompt is tokenized each time it is located: token ids of a large data set would fill gigabytes, and
    tokenizing it as a whole would hold up the start for minutes. ``max_prompt_tokens`` leaves room for the
    answer; prompts beyond it are still located, and :meth:`refusal` states why they cannot be sampled. Streams
    with the same ``digest`` put the same sample at the same position.
    """

    def __init__(self, samples: Sequence[Sample], tokenizer: Tokenizer, *, seed: int, max_prompt_tokens: int) -> None:
        """Raises ConfigError for samples that share a uid, a blank prompt, or none that fits."""
        check_samples(samples)
        self._samples, self._tokenizer = samples, tokenizer
        self._order = PromptOrder(seed, len(samples))
        self._max_prompt_tokens = max_prompt_tokens
        self.digest = _digest(seed, samples)
        for sample in samples:
            if not sample.prompt.strip():
                _token_ids([sample], tokenizer)
        if not any(self.refusal(self.at(position)) is None for position in range(len(samples))):
            raise ConfigError(
                "rollout.max_model_len",
                f"all {len(samples)} prompts are longer than the {max_prompt_tokens} tokens left beside the answer",
                "raise it, or lower sampling.max_new_tokens",
            )

    def at(self, position: int) -> Prompt:
        epoch, index = self._order.locate(position)
        sample = self._samples[index]
        return Prompt(
            uid=f"{epoch}:{sample.uid}",
            position=position,
            sample=sample,
            token_ids=self._tokenizer([sample.prompt])["input_ids"][0],
        )

    def refusal(self, prompt: Prompt) -> str | None:
        """The reason for which the prompt cannot be sampled, as dropped groups name it; None if it can."""
        if not prompt.token_ids:
            return "prompt_empty"
        return "prompt_too_long" if len(prompt.token_ids) > self._max_prompt_tokens else None


def check_samples(samples: Sequence[Sample]) -> None:
    """Raises ConfigError for no samples or a repeated uid."""
    if not samples:
        raise ConfigError("adapters.task", "the task has no samples", "check its file and sizes")
    if len({sample.uid for sample in samples}) != len(samples):
        raise ConfigError("adapters.task", "two samples share a uid, exactly-once needs them apart", "make uids unique")


def tokenize(samples: Sequence[Sample], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of every prompt of a small set; raises as `check_samples` and for a prompt without tokens."""
    check_samples(samples)
    return _token_ids(samples, tokenizer)


def _token_ids(samples: Sequence[Sample], tokenizer: Tokenizer) -> list[list[int]]:
    token_ids = tokenizer([sample.prompt for sample in samples])["input_ids"]
    for sample, ids in zip(samples, token_ids, strict=True):
        if not ids:
            raise ConfigError("adapters.task", f"sample {sample.uid} has a prompt without tokens", "remove it")
    return token_ids


def _digest(seed: int, samples: Sequence[Sample]) -> str:
    digest = blake2b(str(seed).encode(), digest_size=16)
    for sample in samples:
        digest.update(b"\n" + sample.uid.encode())
    return digest.hexdigest()
